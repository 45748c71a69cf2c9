"""The schedule of learning rates, taken in advance: each of torch's and transformers' holds, and stays what it was."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from rlhf_patches.rehearsal import rates

STEPS = 12
TRANSFORMERS = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
TRANSFORMERS += ("inverse_sqrt", "warmup_stable_decay", "cosine_with_min_lr")
MORE = {"warmup_stable_decay": {"num_decay_steps": 4}, "cosine_with_min_lr": {"min_lr_rate": 0.1}}


def of_transformers(name):
    def make(optimizer):
        return transformers.get_scheduler(
            name, optimizer, num_warmup_steps=2, num_training_steps=STEPS, scheduler_specific_kwargs=MORE.get(name, {})
        )

    return make


SCHEDULERS = {
    **{name: of_transformers(name) for name in TRANSFORMERS},
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "several steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "linear of torch": lr_scheduler.LinearLR,
    "constant of torch": lr_scheduler.ConstantLR,
    "polynomial of torch": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, STEPS),
    "cosine of torch": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "one cycle of each group": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-1], total_steps=STEPS),
    "one after the other": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2]
    ),
    "both": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    ),
}
NOTES = {
    "a floor": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-4),
    "a rate for all": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS),
    "each its own": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step]),
}


def made(make):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, (1e-3, 1e-2), strict=True)]
    optimizer = torch.optim.AdamW(groups)
    before = rates.of_groups(optimizer)
    return optimizer, make(optimizer), before


def trained(optimizer, scheduler):
    seen = []
    for _ in range(STEPS - 1):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        settings = [
            {name: value for name, value in each.items() if name != "params"} for each in optimizer.param_groups
        ]
        seen.append(copy.deepcopy(settings))
    return seen


@pytest.mark.parametrize("name", [*SCHEDULERS, *NOTES])
def test_a_schedule_is_taken_in_advance_and_stays_what_it_was(name):
    make = {**SCHEDULERS, **NOTES}[name]
    optimizer, scheduler, before = made(make)
    found = rates.relation(optimizer, scheduler, before, STEPS)
    assert found.verdict.value == ("note" if name in NOTES else "holds"), found.text
    assert found.measured == "2 groups"
    untouched = made(make)
    assert trained(optimizer, scheduler) == trained(*untouched[:2])


def test_a_schedule_of_groups_that_are_gone():
    """As of DeepSpeed, which takes away a group without parameters after the scheduler was made."""
    optimizer, scheduler, _ = made(SCHEDULERS["lambda"])
    del optimizer.param_groups[1]
    found = rates.relation(optimizer, scheduler, rates.of_groups(optimizer), STEPS)
    assert found.verdict.value == "deviates"
    assert "step 1 of LambdaLR raises ValueError: zip()" in found.text


def test_an_empty_group_has_no_rate():
    optimizer, _, before = made(SCHEDULERS["lambda"])
    optimizer.add_param_group({"params": [], "lr": 1.0})
    assert rates.of_groups(optimizer) == before == [1e-3, 1e-2]
    assert rates.relation(optimizer, SCHEDULERS["lambda"](optimizer), before, STEPS).verdict.value == "holds"


def test_what_cannot_be_taken_in_advance():
    optimizer, scheduler, before = made(lr_scheduler.ReduceLROnPlateau)
    assert "cannot be stepped" in rates.relation(optimizer, scheduler, before, STEPS).text
    optimizer, scheduler, before = made(SCHEDULERS["lambda"])
    for unknown in (None, before[:1]):
        assert "are not known" in rates.relation(optimizer, scheduler, unknown, STEPS).text
    assert rates.of_groups(object()) is None


def test_one_factor_for_all_groups():
    assert rates.judge([1e-3, 1e-2], [[0.0, 0.0], [5e-4, 5e-3]]).verdict.value == "holds"
    found = rates.judge([1e-3, 1e-2], [[0.0, 0.0], [1e-3, 1e-3]])
    assert (found.verdict.value, found.text) == (
        "note",
        "the schedule has no common factor: [0.001 0.01] become [0.001 0.001]",
    )
