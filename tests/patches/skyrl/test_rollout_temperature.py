"""skyrl-rollout-temperature: what SkyRL's own functions ask of vLLM, and the ratios of its own correction.

`ratio` is float64 on both sides, and the same operations where the modes agree: 1 to 1e-12.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import skyrl_inference
from tests.harness.side_by_side import folder
from tests.harness.skyrl_on_cpu import INFERENCE
from tests.patches.skyrl.rollout_temperature_ranks import CASES

RULE_COVERAGE = {
    "minimal scope": "test_the_rest_is_as_released",
    "no side effects": "test_the_users_own_comes_first",  # the worker holds engine_init_kwargs against what they were
    "backward compatible": ("test_the_rest_is_as_released", "test_an_old_vllm_is_asked_for_nothing"),
    "no new blocking": "because it is an argument of an engine that is not there yet",
    "The following stay as released": "test_the_rest_is_as_released",
    "vLLM before": "test_an_old_vllm_is_asked_for_nothing",
    "takes precedence": "test_the_users_own_comes_first",
}
ENGINES = INFERENCE[1:]
REPAIRED = tuple(CASES)[:4]


@pytest.fixture(
    scope="module", params=["0.2", "0.4", *(pytest.param(v, marks=pytest.mark.exhaustive) for v in ("0.1", "0.3"))]
)
def report(request, run_ranks):
    folder(f"skyrl-{request.param}")
    (found,) = run_ranks(
        "tests.patches.skyrl.rollout_temperature_ranks", levels=skyrl_inference(request.param), ranks=1
    )
    assert found["status"] == "applied"
    has = {found["after"]["top_p"][name] is not None for name in ENGINES}
    assert has == {found["version"] in ("0.1.0", "0.2.0")}
    return found


def test_ratios_are_1_where_weights_are_the_same(report):
    assert report["after"]["ratio"] < 1e-12
    for state in ("before", "reverted"):
        assert report[state]["ratio"] > 0.5


@pytest.mark.parametrize("case", REPAIRED)
def test_vllm_is_asked_for_the_temperature(report, case):
    after = report["after"][case]
    assert after["servers"] == "processed_logprobs"
    for name in ENGINES:
        assert after[name] in (None, {"kwargs": {"logprobs_mode": "processed_logprobs"}, "the same": False})
    for state in ("before", "reverted"):
        assert report[state][case]["servers"] == "raw_logprobs"
        for name in ENGINES:
            assert report[state][case][name] in (None, {"kwargs": {}, "the same": True})


@pytest.mark.parametrize("case", [case for case in CASES if case not in (*REPAIRED, "the user's own")])
def test_the_rest_is_as_released(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]


def test_the_users_own_comes_first(report):
    after = report["after"]["the user's own"]
    assert after["servers"] == "raw_logprobs"
    for name in ENGINES:
        if after[name] is not None:
            assert after[name]["kwargs"] == {"logprobs_mode": "raw_logprobs", "max_model_len": 7}


def test_the_condition(report):
    """Known for each server and engine that is changed, not the user's own, and for temperature 1 in training."""
    functions = 1 + sum(report["after"]["top_p"][name] is not None for name in ENGINES)
    reached = report["reached"]
    assert reached["held"] == len(REPAIRED) * functions
    assert reached["asked"] == reached["held"] + 2 * functions
    assert reached["calls"] > reached["asked"]


def test_an_old_vllm_is_asked_for_nothing(report):
    assert report["before"]["old vLLM"] == report["after"]["old vLLM"]
