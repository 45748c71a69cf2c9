"""The five ``*-no-sync-reentry`` patches, in real training that is entered once per rollout.

ms-swift, Megatron-Bridge and verl are the installed packages, and their own functions put the hooks on the
config. Megatron-LM and slime are not on PyPI: tests/harness/standins has functions of our own with the same
statements. megatron-core underneath is real in every case.
"""

from __future__ import annotations

import pytest

from tests.harness.by_case import exhaustive_but
from tests.harness.training_checks import assert_failure, assert_same_training

RULE_COVERAGE = {
    "minimal scope": "because the question is within the assertion that only overlapped gradient reduction reaches",
    "no side effects": "because it looks at config.no_sync_func, and assigns nothing",
    "backward compatible": (
        "test_a_custom_no_sync_func_is_still_rejected",
        "test_actor_and_critic_on_one_config_reduce_their_own_gradients",
    ),
    "no new blocking": "because it says yes where an assertion failed, and takes no lock",
    "as before": "test_a_custom_no_sync_func_is_still_rejected",
}

MESSAGE = "When overlap_grad_reduce is True, config.no_sync_func must be None"
ENTRIES = {
    "swift": "tests.harness.framework_entries:install_swift",
    "megatron-bridge": "tests.harness.framework_entries:install_megatron_bridge",
    "verl": "tests.harness.framework_entries:install_verl",
    "slime": "slime",
    "megatron-lm": "megatron-lm",
    "megatron-lm-newer": "megatron-lm-newer",
}


@pytest.fixture(params=exhaustive_but(ENTRIES, "verl"))
def entry(request):
    return ("--entry", ENTRIES[request.param])


@pytest.fixture(scope="module")
def reference(train):
    return train("--scenario", "reference")


def test_rollouts_crash_without_the_patch_and_train_on_with_it(train, reference, entry):
    """With both overlap flags and saves; the assertion comes first, and the pre-hooks would come next."""
    unpatched = train(*entry, "--no-overlap-param-gather")
    assert_failure(unpatched, "AssertionError", MESSAGE, rollout=2)
    assert_same_training(train(*entry, "--save", "--apply"), reference)


def test_a_custom_no_sync_func_is_still_rejected(train, entry):
    assert_failure(train("--scenario", "custom-no-sync", *entry, "--apply"), "AssertionError", MESSAGE, rollout=1)


@pytest.mark.parametrize("name", exhaustive_but(["swift", "verl", "slime"], "verl"))
def test_actor_and_critic_on_one_config_reduce_their_own_gradients(train, name):
    """Each entry installs its own model's functions, so the reduced gradients are those of a float64 reference.

    Tolerance 1e-4 of the largest gradient: float32 rounding showed as up to 1e-5 here, wrong gradients as 1e-2 to 0.8.
    """
    sizes = ("--rollouts", "2", "--steps", "2")
    reports = train("--scenario", "shared-config", "--entry", ENTRIES[name], *sizes, "--apply")
    for report in reports:
        assert report["failure"] is None, report["failure"]
        assert {gradient["role"] for gradient in report["gradients"]} == {"actor", "critic"}
        assert len(report["gradients"]) == 2 * 2 * 2
        assert max(gradient["max_relative"] for gradient in report["gradients"]) < 1e-4


def test_skipping_the_installation_would_corrupt_gradients(train):
    """What the upstream pull requests do ("install only when None"): the reason why our assertion lets it run.

    It also shows that the comparison in the test above can fail.
    """
    reports = train(
        "--scenario", "shared-config", "--entry", "none-twice", "--rollouts", "1", "--steps", "2", "--apply"
    )
    errors = [g["max_relative"] for report in reports for g in report["gradients"] if g["role"] == "critic"]
    assert all(report["failure"] is None for report in reports), "silently: nothing raises"
    assert max(errors) > 0.1


@pytest.mark.exhaustive
def test_disabled_it_stays_away(train):
    settings = {"RLHF_PATCHES_DISABLE": "*-no-sync-reentry"}
    arguments = ("--entry", ENTRIES["verl"], "--no-overlap-param-gather", "--apply")
    assert_failure(train(*arguments, **settings), "AssertionError", MESSAGE, rollout=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["swift", "megatron-bridge", "verl"])
def test_the_site_hook_patches_torchrun_workers(train, run_with_torchrun, installed, name):
    """The built wheel and fresh interpreters: bit for bit what forks of a fork server compute."""
    arguments = ("--entry", ENTRIES[name], "--save")
    torchrun = run_with_torchrun(
        "tests.harness.rollout_training", *arguments, python=installed.python, RLHF_PATCHES_AUTOLOAD="1"
    )
    assert_same_training(torchrun, train(*arguments, "--apply"))
