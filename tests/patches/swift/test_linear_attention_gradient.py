"""swift-linear-attention-gradient: ms-swift's own layer on ranks, against transformers' on one in float64.

transformers computes the delta rule in float32, also in a layer of float64: some 1e-6 of a gradient's norm, and 20
times that is allowed. Qwen3.5's layer is not run: it wants transformers 5.2, and ms-swift 4.0's environment has 4.57.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType

import pytest

from rlhf_patches.patches.swift.linear_attention_gradient import gathered
from tests.harness.forkserver import swift

WORKER = "tests.patches.swift.linear_attention_gradient_ranks"
OWN_WEIGHTS, ROUNDING = 7, 2e-5
RULE_COVERAGE = {
    "minimal scope": "test_without_sequence_parallelism_nothing_changes",
    "no side effects": "because it gathers and scatters the tensors that ms-swift gathers and scatters",
    "backward compatible": "test_without_sequence_parallelism_nothing_changes",
    "no new blocking": "because all ranks of the group gather where they did",
    "bitwise identical": ("test_what_goes_back", "test_the_layers_own_weights"),
    "with TP of 1, nothing changes": "test_without_sequence_parallelism_nothing_changes",
    "known": ("test_the_layers_own_weights", "test_a_scatter_of_ones_own"),
    "does not change these, and rank 0 logs": "test_the_layers_own_weights",  # the marked ones
}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def start(run_ranks):
    def run(release, ranks, *sequence):
        found = run_ranks(WORKER, *sequence, levels=swift(release, "swift_megatron"), ranks=ranks)
        for report in found:
            assert report["status"] == "applied"
            assert report["reverted"] == {name: report["before"][name] for name in ("off", "output", "bits")}
            assert len(report["after"]["off"]) == 1 + OWN_WEIGHTS
            assert max(report["after"]["off"].values()) <= ROUNDING
            assert report["after"]["output"] == report["before"]["output"]
            # Repairs of a user's own are right as released.
            for state in ("before", "after") if sequence else ():
                users = report[state]["users"]
                assert {"forward", "mappings", "hooks", "transformers"} <= set(users)
                assert [name for name, one in users.items() if one > ROUNDING] == []
        return found

    return run


@pytest.mark.parametrize("release", ["swift-3.12", pytest.param("swift-3.9", marks=exhaustive)])
def test_what_goes_back(start, release):
    """To 3.12.3: twice on two ranks. The weights are right."""
    for report in start(release, 2, "SP"):
        # The layer as it is, with masks, and with marks, which do no harm here; a user's repairs are unknown.
        assert report["reached"]["held"] == report["reached"]["asked"] == 3 < report["reached"]["calls"]
        off = report["before"]["off"]
        assert off.pop("states") == pytest.approx(1.0, abs=ROUNDING)
        assert max(off.values()) <= ROUNDING


def test_the_layers_own_weights(start):
    """4.0.4: half of their gradient on two ranks. What goes back is right, also with dropouts that differ."""
    for report in start("swift-4.0", 2, "SP"):
        assert report["reached"]["held"] == report["reached"]["asked"] == 2 < report["reached"]["calls"]
        off = report["before"]["off"]
        assert off.pop("states") <= ROUNDING
        assert all(one == pytest.approx(0.5, abs=ROUNDING) for one in off.values())
        assert report["after"]["bits"] == report["before"]["bits"]
        assert max(report["before"]["masks"]["off"]) <= ROUNDING
        assert report["after"]["masks"] == report["before"]["masks"]
        # Whose own gradients a user lets Megatron add up, is right as released.
        assert report["after"]["marked"] == report["before"]["marked"] <= ROUNDING


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=exhaustive)])
@pytest.mark.parametrize("release", ["swift-3.12", pytest.param("swift-4.0", marks=exhaustive)])
def test_without_sequence_parallelism_nothing_changes(start, release, ranks):
    for report in start(release, ranks):
        assert report["after"] == report["before"]
        assert (report["reached"].get("held", 0), report["reached"]["asked"]) == (0, report["reached"]["calls"])


def test_a_scatter_of_ones_own(monkeypatch):
    """To 3.12.3, with which the gradient is divided as from 3.12.4 on: the gathering is as released."""
    module = ModuleType("swift.megatron.model.gpt.qwen3_next")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    released = FunctionType((lambda states, **asked: asked).__code__, {"__name__": "megatron.core.tensor_parallel"})
    module.scatter_to_sequence_parallel_region = released
    exec("class Layer:\n    def forward(self, states): ...", vars(module))
    assert gathered(module.Layer(), released, None) == {"tensor_parallel_output_grad": False}
    module.scatter_to_sequence_parallel_region = lambda states: states
    assert gathered(module.Layer(), released, None) == {}
