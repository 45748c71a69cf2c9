"""``trl-vllm-raw-logprobs``: the real vLLM's log-probabilities are those that the trainer computes."""

from __future__ import annotations

import functools

import pytest

from rlhf_patches.patches.trl.vllm_raw_logprobs import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import trl_server

RULE_COVERAGE = {
    "minimal scope": "because a mode is chosen by which log-probabilities are returned, of samples that are the same",
    "no side effects": "because one argument is added to the call that makes the engine",
    "backward compatible": "because TRL asks for vLLM 0.10 and later, each of which takes the argument",
    "no new blocking": "because an engine is started as it was",
    "Not repaired": "because it was read in vLLM 0.10.0: `Sampler.forward` takes them before the temperature",
    "agrees as released": "test_with_a_nucleus_it_has_to_stay_off",
    "asked for by name": "test_with_a_nucleus_it_has_to_stay_off",
}
WORKER = "tests.patches.trl_on_vllm.vllm_raw_logprobs_ranks"
#: Of one token. All is float32 in vLLM, logits are of the order of 10; seen are 6e-5.
TOLERANCE = 1e-3


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.22.2", "trl==0.23.0", "trl==0.23.1", "trl==0.24.0", "trl==0.27.0", "trl==0.27.1")
    held = RULE_COVERAGE


@pytest.fixture(scope="module")
def differences(run_ranks):
    @functools.cache
    def run(version):
        (found,) = run_ranks(WORKER, levels=trl_server.levels(version), ranks=1)
        assert found["version"] == version
        return found

    return run


def test_the_server_s_log_probabilities_hold_the_temperature(differences):
    found = differences("0.27.0")
    assert found["status"] == "applied"
    for temperature in ("0.7", "1.5"):
        assert found["before"][f"temperature {temperature}"] > 0.3
        assert found["after"][f"temperature {temperature}"] < TOLERANCE
    for state in ("before", "after"):
        assert found[state]["temperature 1"] < TOLERANCE


def test_with_a_nucleus_it_has_to_stay_off(differences):
    """Right as released, and wrong with it: so it waits until somebody asks for it."""
    found = differences("0.27.0")
    assert found["before"]["top_p 0.5"] < TOLERANCE
    assert found["after"]["top_p 0.5"] > 0.3
    assert PATCH.contested


@pytest.mark.exhaustive
def test_0_27_1_is_right(differences):
    found = differences("0.27.1")
    assert found["status"] == "unaffected"
    cases = {name for name in found["before"] if name.startswith("temperature")}
    assert max(found[state][case] for state in ("before", "after") for case in cases) < TOLERANCE
