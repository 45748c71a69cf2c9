"""megatron-core-forward-pre-hook-reentry, in real training of a real GPTModel on two ranks.

Both overlap flags and the distributed optimizer are on; three rollouts of three steps with two and three
micro-batches in turn. The reference is one uninterrupted, unpatched run of the same nine steps. Everything is
deterministic on CPU (one thread a rank), so equality is bit for bit and needs no tolerance.
"""

from __future__ import annotations

import pytest

from tests.harness.training_checks import assert_failure, assert_same_training

ROLLOUTS = "tests.harness.rollout_training"
PRE_HOOKS_ONLY = ("--entry", "none-twice")


@pytest.fixture(scope="module")
def reference(train):
    return train("--scenario", "reference")


@pytest.mark.parametrize(
    ("save", "crash"),
    [
        # train() disables at the end of a rollout and again at the next one
        pytest.param((), {"rollout": 2, "doing": "train"}, marks=pytest.mark.exhaustive),
        (("--save",), {"rollout": 1, "doing": "save"}),  # save() disables after train() has
    ],
)
def test_rollouts_crash_without_the_patch_and_train_on_with_it(train, reference, save, crash):
    assert_failure(train(*PRE_HOOKS_ONLY, *save), "KeyError", "GPTModel(", **crash)
    assert_same_training(train(*PRE_HOOKS_ONLY, *save, "--apply"), reference)


def test_saves_see_synchronized_parameters(train):
    """disable_forward_pre_hook(param_sync=True) synchronizes also where no hook is left to remove."""
    first, second = train(*PRE_HOOKS_ONLY, "--save", "--apply")
    assert len(first["saves"]) == 3
    assert [save["state"] for save in first["saves"]] == [save["state"] for save in second["saves"]]


def test_forward_pre_hooks_are_there_when_training_needs_them(train):
    """The first step of each rollout runs without them, all others with one on every module, never with two."""
    (report, _) = train(*PRE_HOOKS_ONLY, "--save", "--apply")
    (expected, _) = train("--scenario", "reference")
    everywhere = expected["steps"][-1]["forward_pre_hooks"]
    assert everywhere > 0
    assert [step["forward_pre_hooks"] for step in report["steps"]] == [0, everywhere, everywhere] * 3


def test_gradient_accumulation_reduces_once_a_step(train):
    """no_sync holds back every micro-batch but the last; a run without it shows that the count can fail."""
    for report in train(*PRE_HOOKS_ONLY, "--save", "--apply"):
        assert all(step["reduce_scatters"]["before_last_micro_batch"] == 0 for step in report["steps"])
        # 0.16 learns in the very first step which gradients to wait for, and reduces after backward there.
        for step in report["steps"][1:]:
            assert step["reduce_scatters"]["during_backward"] == step["reduce_scatters"]["total"] > 1
    for report in train("--entry", "never", "--rollouts", "1"):
        early = [step["reduce_scatters"]["before_last_micro_batch"] for step in report["steps"]]
        assert report["failure"] is not None or any(early)


def test_disabled_it_stays_away(train):
    settings = {"RLHF_PATCHES_DISABLE": "megatron-core-forward-pre-hook-reentry"}
    assert_failure(train(*PRE_HOOKS_ONLY, "--apply", **settings), "KeyError", "GPTModel(", rollout=2)


COLD = (ROLLOUTS, *PRE_HOOKS_ONLY, "--save")


@pytest.mark.exhaustive
def test_the_site_hook_patches_torchrun_workers(run_with_torchrun, installed, reference):
    """The built wheel, no line of ours in the training script; bit for bit what forks of a fork server compute."""
    assert_same_training(run_with_torchrun(*COLD, python=installed.python, RLHF_PATCHES_AUTOLOAD="1"), reference)


@pytest.mark.exhaustive
def test_not_asked_for_the_installed_wheel_patches_no_torchrun_workers(run_with_torchrun, installed):
    assert_failure(run_with_torchrun(*COLD, python=installed.python), "KeyError", "GPTModel(", rollout=1, doing="save")
