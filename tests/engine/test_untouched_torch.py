"""`untouched` on what torch makes: modules with wrappers, optimizers, schedulers, tensors, hooks."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import numpy
import pytest
import torch

from rlhf_patches.testing import untouched


def make():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model = torch.compile(inner)  # an OptimizedModule; nothing is compiled before a call
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.1)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        mask=torch.tensor([1.0, float("nan")]),
        array=numpy.array([1.0, float("nan")]),
    )


def wrap(trainer):
    trainer.model._orig_mod = torch.nn.Sequential(trainer.model._orig_mod)


CHANGES = {
    "what a compiled model is of": (wrap, "trainer.model._orig_mod is another object: Sequential before, Sequential"),
    "the model": (
        lambda t: setattr(t, "model", t.model._orig_mod),
        "trainer.model is another object: OptimizedModule before, Sequential now",
    ),
    "a mode": (lambda t: t.model._orig_mod[0].eval(), "trainer.model._orig_mod.0.training has changed: True before"),
    "a parameter": (
        lambda t: setattr(t.model._orig_mod[0], "weight", torch.nn.Parameter(torch.ones(3, 2))),
        "trainer.model._orig_mod.0.weight is another object: Parameter before, Parameter now",
    ),
    "a parameter less": (
        lambda t: delattr(t.model._orig_mod[0], "bias"),
        "trainer.model._orig_mod.0.bias is gone: Parameter before",
    ),
    "a parameter frozen": (
        lambda t: t.model._orig_mod[0].weight.requires_grad_(False),
        "trainer.model._orig_mod.0.weight.requires_grad has changed: True before, False now",
    ),
    "a dtype": (
        lambda t: t.model._orig_mod[0].half(),
        "trainer.model._orig_mod.0.weight.dtype has changed: torch.float32 before, torch.float16 now",
    ),
    "a buffer": (
        lambda t: t.model._orig_mod[1].register_buffer("late", torch.ones(1)),
        "trainer.model._orig_mod.1.late is new: Tensor",
    ),
    "a submodule": (
        lambda t: t.model._orig_mod.append(torch.nn.ReLU()),
        "trainer.model._orig_mod.2 is new: ReLU",
    ),
    "a forward hook": (
        lambda t: t.model._orig_mod[0].register_forward_hook(print),
        "trainer.model._orig_mod.0._forward_hooks[0] is new: builtin_function_or_method",
    ),
    "a parameter's hook": (
        lambda t: t.model._orig_mod[0].weight.register_hook(print),
        "trainer.model._orig_mod.0.weight._backward_hooks has changed: None before, OrderedDict now",
    ),
    "a hook after the gradient": (
        lambda t: t.model._orig_mod[0].weight.register_post_accumulate_grad_hook(print),
        "trainer.model._orig_mod.0.weight._post_accumulate_grad_hooks has changed: None before, OrderedDict now",
    ),
    "an attribute of a tensor": (
        lambda t: setattr(t.mask, "note", 1),
        "trainer.mask.note is new: 1",
    ),
    "a learning rate": (
        lambda t: t.optimizer.param_groups[0].update(lr=0.2),
        "trainer.optimizer.param_groups[0]['lr'] has changed: 0.1 before, 0.2 now",
    ),
    "a group": (
        lambda t: t.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
        "trainer.optimizer.param_groups[1] is new: dict",
    ),
    "a step of the scheduler": (
        lambda t: setattr(t.scheduler, "last_epoch", 3),
        "trainer.scheduler.last_epoch has changed: 0 before, 3 now",
    ),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_each_change_is_said_with_its_path(change, said):
    trainer = make()
    with pytest.raises(AssertionError) as raised, untouched(trainer):
        change(trainer)
    # torch numbers hooks throughout the process.
    assert re.sub(r"_hooks\[\d+\]", "_hooks[0]", str(raised.value)).startswith(said), str(raised.value)


def step(trainer):
    trainer.model._orig_mod(torch.ones(4, 2)).sum().backward()
    trainer.optimizer.step()


def test_a_training_step_changes_values_and_the_optimizers_state_only():
    trainer = make()
    with untouched(trainer.model, trainer.mask, trainer.array):
        trainer.model._orig_mod(torch.ones(4, 2)).sum().backward()
    with untouched(trainer, changes=("trainer.optimizer.state[*", "*_opt_called")):
        step(trainer)
    trainer = make()
    said = r"trainer\.optimizer\.state\[Parameter\] is new: dict"
    with pytest.raises(AssertionError, match=said), untouched(trainer):
        step(trainer)


VALUES = {
    "a parameter": (
        lambda t: t.model._orig_mod[0].weight.detach().add_(1),
        "trainer.model._orig_mod.0.weight has different",
    ),
    "a gradient": (
        lambda t: t.model._orig_mod[0](torch.ones(4, 2)).sum().backward(),
        "trainer.model._orig_mod.0.weight has different contents",
    ),
    "a buffer": (
        lambda t: t.model._orig_mod[1](torch.ones(4, 3)),
        "trainer.model._orig_mod.1.running_mean has different",
    ),
    "a tensor": (lambda t: t.mask.mul_(2), "trainer.mask has different contents"),
    "an array": (lambda t: numpy.multiply(t.array, 2, out=t.array), "trainer.array has different contents"),
}


@pytest.mark.parametrize(("change", "said"), VALUES.values(), ids=VALUES)
def test_contents_are_compared_where_asked_for(change, said):
    trainer = make()
    with untouched(trainer):
        change(trainer)
    trainer = make()
    with pytest.raises(AssertionError) as raised, untouched(trainer, contents=True):
        change(trainer)
    assert str(raised.value).startswith(said), str(raised.value)


@pytest.mark.parametrize("contents", [False, True])
def test_looking_at_them_is_no_change_nan_and_odd_tensors_included(contents):
    trainer = make()
    trainer.meta = torch.ones(2, device="meta")
    trainer.half = torch.ones(2, dtype=torch.bfloat16)
    trainer.sparse = torch.eye(2).to_sparse()
    trainer.loss = (trainer.mask * torch.ones(2, requires_grad=True)).sum()
    with untouched(trainer, contents=contents):
        trainer.model.state_dict()
        list(trainer.model.named_parameters())
        with contextlib.suppress(AttributeError):
            trainer.model.nothing  # noqa: B018


def test_accelerates_unwrap_model_writes_to_a_compiled_model():
    """Why there is the rule: on a wrapper's parameters it depends which state dict a checkpoint gets."""
    accelerate = pytest.importorskip("accelerate")
    unwrap_model = accelerate.Accelerator(cpu=True).unwrap_model
    plain = torch.nn.Linear(2, 2)
    with untouched(plain):
        unwrap_model(plain)
    model = torch.compile(torch.nn.DataParallel(plain))
    said = r"^model\._orig_mod is another object: DataParallel before, Linear now$"
    with pytest.raises(AssertionError, match=said), untouched(model):
        unwrap_model(model)
