"""The Triton kernels, by Triton's interpreter; `tests/gpu/test_fused.py` has the same on a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches._vocab_parallel import fused
from tests.harness import ranks, side_by_side
from tests.patches.vocab_parallel.test_numbers import check, run

WORKER = Path(__file__).with_name("fused_ranks.py")
EPS = {"float32": 2**-23, "bfloat16": 2**-8, "float16": 2**-11}


def hold(device, number, settings=None, *more):
    """Each rank's errors against float64, and that nothing was left to torch's operators."""
    for rank in ranks.run(WORKER, ["--device", device, *more], number, settings=settings):
        assert rank.status == 0, rank.errors
        report = rank.said
        assert report["by operators"] == 0
        assert not report["failed"]
        for name, (log_prob, entropy, gradient) in report["cases"].items():
            # float32 arithmetic on logits up to 15; of the gradient, weights up to 4, and entropies' factor x - m.
            assert max(log_prob, entropy) < 16 * 2**-23 * 3, name
            assert gradient < 64 * 2**-23 * 8 + 4 * EPS[name.partition(",")[0]], name
        # Each token's log-probability, entropy and gradient: NaN in the first, -inf alone in the second.
        assert report["hopeless"] == ([False] * 6 + [True] * 3 if number == 1 else [])
        yield report


@pytest.mark.parametrize("more", [("--some",), pytest.param((), marks=pytest.mark.exhaustive)], ids=["some", "all"])
@pytest.mark.parametrize("number", [1, 2])
def test_against_float64(number, more):
    pytest.importorskip("triton", reason="torch's builds for CUDA bring it")
    settings = side_by_side.on_path("numpy-2.1")  # newer ones have no int() of an array, which the interpreter takes
    assert len(list(hold("cpu", number, settings, *more))) == number


@pytest.mark.parametrize("from_call", [0, 3, 7, 9])
def test_where_a_kernel_cannot_be_launched_operators_compute_the_same(from_call, monkeypatch):
    """Seven parts forward, seven backward: the first may have its gradient by then, in the logits' own memory."""
    calls = []

    def launch(name, *arguments):
        matrix = arguments[0]
        calls.append(name)
        if len(calls) > from_call:
            raise RuntimeError("no compiler")
        if name == "sum_up":
            maximum, total, weighted = arguments[2:5]
            z = matrix.float() - torch.amax(matrix.float(), -1, out=maximum)[:, None]
            torch.sum(z.exp(), -1, out=total)
            torch.sum(z.exp() * z, -1, out=weighted)
        else:
            gradient, _, maximum, factor, slope, target, of_target = arguments[2:9]
            z = matrix.float() - maximum[:, None]
            found = z.exp() * (slope[:, None] * z + factor[:, None])
            gradient.copy_(found.scatter_add_(-1, target[:, None], of_target[:, None]))

    class Launched:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **_: launch(self.name, *arguments)

    kernels = SimpleNamespace(sum_up=Launched("sum_up"), write_gradient=Launched("write_gradient"))
    monkeypatch.setattr(fused, "serves", lambda logits: not fused._failed)
    monkeypatch.setattr(fused, "_failed", False)
    monkeypatch.setattr(fused, "_kernels", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    values = torch.randn(2, 7, 101).transpose(0, 1)  # as Megatron's [S, B, V], turned: parts of the logits
    found, wanted = run(values, torch.randint(0, 101, (7, 2)), with_entropy=True)
    check(found, wanted, 1, torch.float32)
    assert fused._failed
    assert len(calls) == from_call + 1


def test_it_serves_plain_tensors_on_a_gpu_alone():
    assert not fused.serves(torch.randn(2, 3))
