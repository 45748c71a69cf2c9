"""``skyrl-kl-no-grad`` on SkyRL's real workers, against a computation in float64 (kl_no_grad_ranks.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.skyrl import _conditions
from tests.harness.forkserver import SKYRL_WORKERS, skyrl

RULE_COVERAGE = {
    "minimal scope": "test_without_the_kl_loss_nothing_is_trained",
    "no side effects": "because it calls the function that the decorator holds",
    "backward compatible": "test_functions_of_users_stay",
    "no new blocking": "because it computes on one rank's tensors; no lock, no collective",
    "known": "test_functions_of_users_stay",
    "stay the same": "test_the_values_are_as_released",
    "is not affected": "because the reward's call is in another function",
    "are not affected": "test_without_the_kl_loss_nothing_is_trained",
}
WORKER = "tests.patches.skyrl.kl_no_grad_ranks"
CASES = [f"{backend}, {estimator}" for backend in ("fsdp", "megatron") for estimator in ("k1", "abs", "k2", "k3")]
# float32 log-probabilities of a model of two layers.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, levels=(*skyrl("0.1"), SKYRL_WORKERS), ranks=1, TORCHDYNAMO_DISABLE="1")
    assert (found["version"], found["status"]) == ("0.1.0", "applied")
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_estimate(report, case):
    assert report["before"][case]["norm"] == report["reverted"][case]["norm"] == 0
    assert report["after"][case]["norm"] > 1e-3
    assert report["after"][case]["error"] < ROUNDING


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_as_released(report, case):
    assert report["after"][case]["metrics"] == report["before"][case]["metrics"]
    assert report["after"][case]["metrics"]["final_loss"] == pytest.approx(report["after"][case]["loss"], rel=1e-5)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_without_the_kl_loss_nothing_is_trained(report, backend):
    """The policy loss is 0 here."""
    case = f"{backend}, off"
    assert report["before"][case]["norm"] == report["after"][case]["norm"] == 0
    assert report["before"][case]["metrics"] == report["after"][case]["metrics"]


@pytest.mark.parametrize("case", ["own", "own, without a gradient"])
def test_functions_of_users_stay(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]
    assert bool(report["after"][case]) == (case == "own")


def test_it_reports_the_losses_with_kl(report):
    calls = len(CASES) + 4
    assert report["reached"] == {"calls": calls, "asked": calls, "held": calls - 2}


@pytest.mark.parametrize(
    ("loss", "config", "used", "coefficient", "holds"),
    [
        (None, None, True, 0.001, True),
        (None, None, True, 0.0, False),
        (None, None, False, 0.001, False),
        ("cross_entropy", None, True, 0.001, False),
        (None, {"kl_loss_coef": 0.0}, True, 0.001, None),
    ],
)
def test_the_condition(loss, config, used, coefficient, holds):
    algorithm = SimpleNamespace(policy_loss_type="regular", use_kl_loss=used, kl_loss_coef=coefficient)
    worker = SimpleNamespace(cfg=SimpleNamespace(algorithm=algorithm))
    assert _conditions.has_a_kl_loss(worker, loss, config) is holds
