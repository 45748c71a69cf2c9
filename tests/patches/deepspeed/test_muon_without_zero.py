"""``deepspeed-muon-without-zero``: steps of the real optimizer, against Muon's definition (muon_without_zero_ranks.py).

Newton-Schulz runs in bfloat16 until 0.18.9, which is up to 8e-2 of the weights' way, and in float32 on a CPU since.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.deepspeed import muon_without_zero
from rlhf_patches.patches.deepspeed._muon_conditions import has_matrices
from rlhf_patches.patches.deepspeed.proofs import muon_without_zero_ranks
from tests.harness.forkserver import beside

WORKER = muon_without_zero_ranks.__name__
RULE_COVERAGE = {
    "minimal scope": "test_flat_partitions_and_other_groups_are_as_released",
    "no side effects": "test_gradients_stay",
    "backward compatible": (
        "test_flat_partitions_and_other_groups_are_as_released",
        "test_a_parameter_without_a_gradient_raises_as_released",
        "test_checkpoints_load_with_and_without_it",
    ),
    "no new blocking": "because it is arithmetic on one rank: no lock, no collective",
    "known": "test_a_subclass_is_as_released",
    "Flat partitions, which ZeRO's optimizers pass, only": "test_flat_partitions_and_other_groups_are_as_released",
    "The gradients stay as they were": "test_gradients_stay",
    "does not change a subclass": "test_a_subclass_is_as_released",
}
WITHOUT = ("float32", "accumulated", "bfloat16", "stage 0")
WITH = ("stage 1", "stage 2")
ROUNDING = 0.12


@pytest.fixture(
    scope="module",
    params=[
        "deepspeed-0.18.9",
        *(pytest.param(f"deepspeed-{each}", marks=pytest.mark.exhaustive) for each in ("0.18.2", "0.18.5")),
    ],
)
def report(request, run_ranks):
    arguments = ("--more", "float32", "accumulated", "stage 0", *WITH)
    if request.param == "deepspeed-0.18.9":  # before, bfloat16 without ZeRO adds each step's gradients to the last's
        arguments = ("--more", *WITHOUT, *WITH)
    (found,) = run_ranks(WORKER, *arguments, levels=beside(request.param, "deepspeed"), ranks=1)
    assert found["status"] == "applied"
    return found


def test_without_it_a_step_is_not_muon_s(report):
    for state in ("before", "reverted"):
        for case in {*WITHOUT} & {*report[state]}:
            assert report[state][case]["error"] > 0.5
            assert report[state][case]["length"] < 0.5
            assert not report[state][case]["states"]


def test_with_it_a_step_is_muon_s(report):
    for case in {*WITHOUT} & {*report["after"]}:
        assert report["after"][case]["error"] < ROUNDING


def test_two_ranks_train_alike(run_ranks):
    found = run_ranks(WORKER, "accumulated", levels=beside("deepspeed-0.18.9", "deepspeed"))
    assert all(each["before"]["accumulated"]["error"] > 0.5 for each in found)
    assert all(each["after"]["accumulated"]["error"] < ROUNDING for each in found)
    assert found[0]["after"] == found[1]["after"]


def test_flat_partitions_and_other_groups_are_as_released(report):
    for case in WITH:
        assert report["after"][case] == report["before"][case]
    before, after = (report[state]["by itself"] for state in ("before", "after"))
    assert after["matrix"] != before["matrix"]
    assert (after["vector"], after["other"]) == (before["vector"], before["other"])


def test_gradients_stay(report):
    assert report["before"]["by itself"]["stay"]
    assert report["after"]["by itself"]["stay"]


def test_a_parameter_without_a_gradient_raises_as_released(report):
    assert report["before"]["by itself"]["raised"] == report["after"]["by itself"]["raised"] != ""


def test_a_convolution_in_channels_last_is_stepped_as_any_other(report):
    """Upstream's function refuses its gradient, which a step without it takes."""
    before, after = (report[state]["convolutions"] for state in ("before", "after"))
    assert before[0] == before[1]
    assert after[0] == after[1] != before[0]


def test_a_subclass_is_as_released(report):
    assert report["before"]["by itself"] == report["before"]["a subclass"] == report["after"]["a subclass"]


def test_checkpoints_load_with_and_without_it(report):
    """Each state loads those of the states before: as released, patched, reverted."""
    before, after, reverted = (report[state]["resumed"] for state in ("before", "after", "reverted"))
    assert after["1"]["error"] < ROUNDING  # its own: the momentum is loaded
    assert after["0"]["error"] > ROUNDING  # of SGD's first step
    # The optimizer's state that is loaded changes nothing without the patch; the weights are those of the checkpoint.
    assert reverted["0"] == reverted["2"] == before["0"]
    assert reverted["1"]["length"] > before["0"]["length"]


def test_repaired_releases_are_left_alone(run_ranks):
    for release in ("deepspeed-0.19.7", None):
        (found,) = run_ranks(WORKER, "float32", levels=beside(release, "deepspeed"), ranks=1)
        assert found["status"] == "unaffected"
        assert found["after"] == found["before"]
        assert found["before"]["float32"]["error"] < ROUNDING


class OfDeepSpeed:
    """What `update` needs of the optimizer."""

    __module__ = "deepspeed.runtime.zero.muon.muon_optimizer"

    def __init__(self, *params):
        self.state = {param: {} for param in params}
        self.param_groups = [{"use_muon": True, "params": list(params), "momentum": 0.9}]


def test_later_releases_settings_are_passed_on(monkeypatch):
    """0.19.0 has several iterations, and 0.19.2 experts in one tensor; earlier releases take no such arguments."""
    seen = []
    module = SimpleNamespace(muon_update=lambda grad, momentum, **more: seen.append(more) or grad)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.muon.original_muon", module)
    plain, experts = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    experts.is_expert_group = True
    optimizer = OfDeepSpeed(plain, experts)
    (group,) = optimizer.param_groups
    for more in ({}, {"ns_method": "gram"}):
        for param in (plain, experts):
            param.grad = torch.ones(2, 3)
            muon_without_zero.update(optimizer, param, group | more)
    assert seen == [
        {"beta": 0.9},
        {"beta": 0.9, "is_expert_group": True},
        {"beta": 0.9, "ns_method": "gram"},
        {"beta": 0.9, "ns_method": "gram", "is_expert_group": True},
    ]


def test_which_runs_meet_it():
    matrix, flat = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(6))
    own = type("Own", (OfDeepSpeed,), {"__module__": "mine"})
    assert has_matrices(OfDeepSpeed(matrix, flat)) is True
    assert has_matrices(OfDeepSpeed(flat)) is False
    assert has_matrices(own(matrix)) is None
    assert has_matrices(own(flat)) is False
