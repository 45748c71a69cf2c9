"""``megatron-core-offloaded-weights`` on megatron-core's own optimizers, two ranks (offloaded_weights_ranks.py)."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.megatron_core._conditions import loads_without_copies
from tests.harness.forkserver import megatron

RULE_COVERAGE = {
    "minimal scope": "test_where_nothing_was_lost_all_is_the_same",
    "no side effects": "because it writes where Megatron does: to the optimizer's own copies of what was loaded",
    "backward compatible": "test_where_nothing_was_lost_all_is_the_same",
    "no new blocking": "because a rank copies its own tensors; no lock, no collective",
    "results are bitwise identical": "test_where_nothing_was_lost_all_is_the_same",
    "does not change anything without": (
        "because FP32Optimizer and Float16OptimizerWithFloat16Params have a function of their own"
    ),
    "does nothing before": "because each of its changes is in a function that reload_model_params alone calls",
}
WORKER = "tests.patches.megatron_core.offloaded_weights_ranks"
# One rounding of a weight to bf16 is 2**-9 of it at most; the rest is float32's.
EXACT = 2**-8
LOST = ["bf16", "bf16, half of it", "bf16, overlapped"]


@pytest.fixture(scope="module")
def run(run_ranks):
    @functools.cache
    def run(release=None):
        reports = run_ranks(WORKER, levels=megatron(release))
        assert [one["status"] for one in reports] == ["applied"] * 2
        return reports

    return run


RELEASES = pytest.mark.parametrize(
    "release",
    [None, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("megatron-0.15", "megatron-0.19"))],
)


@RELEASES
@pytest.mark.parametrize("case", LOST)
def test_the_first_step_begins_at_the_loaded_weights(run, release, case):
    """Each weight against float64, and bit for bit that of an optimizer which was built after the loading."""
    for report in run(release):
        before, after = report["before"][case], report["after"][case]
        assert sorted(before["wrong"]) == sorted(before["weights"]), "all were lost"
        assert min(before["errors"].values()) > 0.1
        assert after["wrong"] == []
        assert max(after["errors"].values()) < EXACT
        assert report["reverted"].get(case, before) == before
        assert [*report["reverted"]] == LOST[:1]


@RELEASES
@pytest.mark.parametrize("case", ["precision-aware", "bf16, not offloaded", "fp32, not offloaded"])
def test_where_nothing_was_lost_all_is_the_same(run, release, case):
    for report in run(release):
        assert report["before"][case]["wrong"] == []
        assert report["after"][case] == report["before"][case]


@RELEASES
def test_a_run_is_told_whether_it_was_affected(run, release):
    """Once in each case that lost its weights, and in no other."""
    for report in run(release):
        reached = report["reached"]
        assert reached["held"] == len(LOST) < reached["asked"] == reached["calls"] == len(report["after"])


def test_what_is_told_of_an_optimizer(monkeypatch):
    class Offloading(SimpleNamespace):
        """Megatron's, by the name under which it is looked up."""

    def told(copies, updated, kind=Offloading):
        optimizer = kind(gpu_params_map_cpu_copy=copies, param_to_fp32_param=updated)
        return loads_without_copies(SimpleNamespace(optimizer=optimizer))

    one, other = "one", "other"
    module = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(HybridDeviceOptimizer=Offloading))
    assert told({one: 1}, {}) is told({one: 1, other: 2}, {one: 1}) is True
    assert told({one: 1}, {one: 1, other: 2}) is told({one: 1}, {}, SimpleNamespace) is False
    assert told({}, {}) is loads_without_copies(SimpleNamespace()) is None
    assert loads_without_copies(SimpleNamespace(optimizer=Offloading())) is None
    monkeypatch.delitem(sys.modules, module)
    assert told({one: 1}, {}) is None
