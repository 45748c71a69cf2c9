"""Functions that torch holds or hides: autograd functions, its decorators, and what Dynamo has compiled."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from rlhf_patches import Condition, Replace, Rewrite, Status, Wrap, api
from rlhf_patches.guards.fingerprints import fingerprint

SOURCE = """\
import torch

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x  # the bug: 2 is missing

@torch.no_grad()
def detached(x):
    return x - 1

class Model(torch.nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x - 1

def plain(x):
    return x - 1
"""
FIXES = """\
def backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return 2 * gradient * x

def forward(ctx, x):
    ctx.save_for_backward(x)
    return x * x * 1

def detached(x):
    return x + 1

def model_forward(self, x):
    return x + 1

def doubled(wrapped, instance, args, kwargs):
    return 2 * wrapped(*args, **kwargs)

def plus_two(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) + 2
"""


def change(framework, kind, function, pattern, replacement, replace, wrap):
    framework.write("fixes", FIXES)
    target, prints = framework.path(f"mod:{function}"), {fingerprint(SOURCE, function): "1.0"}
    if kind == "rewrite":
        return Rewrite(target, pattern, replacement)
    if kind == "replace":
        return Replace(target, framework.path(f"fixes:{replace}"), prints)
    return Wrap(target, framework.path(f"fixes:{wrap}"), prints)


kinds = pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])


@kinds
def test_autograd_function(framework, engine, kind):
    """``apply`` of the class is bound before the patch; a graph built before the patch runs its backward after it."""
    framework.write("mod", SOURCE)
    patch = framework.patch(
        change(framework, kind, "Square.backward", "gradient * x", "2 * gradient * x", "backward", "doubled")
    )
    made = engine(patch)
    square = framework.load().Square.apply

    def gradient(output, x):
        return torch.autograd.grad(output, x)[0].item()

    x = torch.tensor(3.0, requires_grad=True)
    built_before = square(x)
    assert gradient(square(x), x) == 3
    assert made.apply()[patch.name].status is Status.APPLIED
    assert (gradient(square(x), x), gradient(built_before, x)) == (6, 6)
    built_while = square(x)
    made.revert()
    assert (gradient(square(x), x), gradient(built_while, x)) == (3, 3)


@kinds
@pytest.mark.parametrize(("function", "replace"), [("detached", "detached"), ("Model.forward", "model_forward")])
def test_behind_no_grad(framework, engine, kind, function, replace):
    """The patched function still runs under the decorator: no gradient is recorded."""
    framework.write("mod", SOURCE)
    patch = framework.patch(change(framework, kind, function, "x - 1", "x + 1", replace, "plus_two"))
    made = engine(patch)
    mod = framework.load()
    call = mod.detached if function == "detached" else mod.Model()
    x = torch.tensor(3.0, requires_grad=True)
    assert call(x).item() == 2
    assert made.apply()[patch.name].status is Status.APPLIED
    assert call(x).item() == 4
    assert not call(x).requires_grad
    made.revert()
    assert call(x).item() == 2


@kinds
@pytest.mark.parametrize("compiled_first", [True, False])
def test_dynamo_cache_is_warned_of(framework, engine, kind, compiled_first):
    """Dynamo compiles per code object, so the swap itself takes effect; what it inlined elsewhere does not."""
    framework.write("mod", SOURCE)
    patch = framework.patch(change(framework, kind, "plain", "x - 1", "x + 1", "detached", "plus_two"))
    made = engine(patch)
    plain = framework.load().plain
    compiled = torch.compile(plain, backend="eager")
    x = torch.tensor(3.0)
    try:
        if compiled_first:
            assert compiled(x).item() == 2
        row = made.apply()[patch.name]
        assert row.status is Status.APPLIED
        assert ("torch._dynamo.reset()" in row.reason) is compiled_first
        assert (framework.path("mod:plain") in row.reason) is compiled_first
        torch._dynamo.reset()
        assert compiled(x).item() == 4
        made.revert()
        torch._dynamo.reset()
        assert compiled(x).item() == 2
    finally:
        torch._dynamo.reset()


@kinds
@pytest.mark.parametrize(("function", "replace"), [("plain", "detached"), ("Model.forward", "model_forward")])
def test_compiles_as_one_graph(framework, engine, kind, function, replace):
    """fullgraph: Dynamo traces through a trampoline, without falling back to the interpreter."""
    framework.write("mod", SOURCE)
    patch = framework.patch(change(framework, kind, function, "x - 1", "x + 1", replace, "plus_two"))
    made = engine(patch)
    module = framework.load()
    assert made.apply()[patch.name].status is Status.APPLIED
    called = module.Model() if "." in function else lambda x: module.plain(x)
    torch._dynamo.reset()
    x = torch.ones(3)
    assert torch.equal(torch.compile(called, backend="eager", fullgraph=True)(x), x + 1)


def test_a_compiled_function_whose_implementation_asks(framework, engine, monkeypatch):
    framework.write("mod", SOURCE)
    framework.write(
        "fixes",
        """
        import torch
        import rlhf_patches

        @torch.compiler.disable
        def around(wrapped, instance, args, kwargs):
            target = f"{wrapped.__module__}:plain"
            asked = rlhf_patches.in_force("some-bug"), rlhf_patches.matched("some-bug", target)
            return wrapped(*args, **kwargs) + 2, asked
        """,
    )
    prints = {fingerprint(SOURCE, "plain"): "1.0"}
    patch = framework.patch(Wrap(framework.path("mod:plain"), framework.path("fixes:around"), prints), name="some-bug")
    made = engine(patch)
    monkeypatch.setattr(api, "engine", made)
    made.apply()
    plain = framework.load().plain
    x = torch.arange(3.0)
    result, asked = torch.compile(lambda x: plain(x + 1), backend="eager")(x)
    assert torch.equal(result, x + 2)
    assert asked == (True, fingerprint(SOURCE, "plain"))


def test_what_a_repair_decides_keeps_compiled_code_whole(framework, engine):
    """Of compiled code nothing is counted, and no graph breaks."""
    framework.write("mod", "class Model:\n    def forward(self, x):\n        return x - 1\n")
    path = framework.path("mod:Model.forward")
    framework.write("fixes", "import rlhf_patches\n\ndef one(x):\n    rlhf_patches.decided(NAME, True)\n    return 1\n")
    change = Rewrite(path, "x - 1", "x + $ONE(x)", uses={"ONE": framework.path("fixes:one")})
    patch = dataclasses.replace(framework.patch(change), conditions=(Condition(path),))
    made = engine(patch)
    made.apply()
    importlib.import_module(framework.path("fixes")).NAME = patch.name
    function = framework.load().Model().forward
    assert function(torch.ones(())) == 2
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert [compiled(torch.ones(())).item() for _ in range(2)] == [2.0, 2.0]
    reached = made.report()[patch.name].reached
    assert (reached.held, reached.asked) == (1, 1)
