"""``skyrl-overlapped-reduction`` on two ranks: steps after one of two micro-batches (overlapped_reduction_ranks.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.skyrl._conditions import reduces_too_early
from tests.harness.forkserver import skyrl

RULE_COVERAGE = {
    "minimal scope": "because nothing is applied: an advice",
    "no side effects": "because nothing is applied: an advice",
    "backward compatible": "test_the_last_micro_batch_comes_too_late",
    "no new blocking": "because nothing is applied: an advice",
}
WORKER = "tests.patches.skyrl.overlapped_reduction_ranks"
RELEASES = ["0.4", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.1", "0.2", "0.3"))]


@pytest.mark.parametrize("release", RELEASES)
def test_the_last_micro_batch_comes_too_late(run_ranks, release):
    """The reference of each case is what is advised. What three give depends on when the reduction reads them."""
    loguru = ["0.3"] if release == "0.4" else []
    for report in run_ranks(WORKER, levels=skyrl(release, *loguru), ranks=2, TORCHDYNAMO_DISABLE="1"):
        assert (report["version"], report["status"]) == (f"{release}.0", "advice")
        for state in ("before", "after", "reverted"):
            found = report[state]
            assert "Communication call has not been issued" in found["1"]["failed"]
            assert found["2"]["error"] < 1e-6
            assert found["3"]["error"] > 0.1  # 0.38 to 0.76 were seen
        assert report["reached"]["held"] == 2  # one and three


def group(waits_for, overlap=True, **counted):
    return SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_grad_reduce=overlap),
        golden_per_param_grad_ready_counts=waits_for,
        per_param_grad_ready_counts=counted,
    )


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([group({"a": 2, "shared": 4})], False),
        ([group({"a": 2}), group({"a": 3})], True),
        ([group({"a": 3}, overlap=False)], False),
        ([group({})], None),  # the first step
        ([group({"a": 3}, a=1)], None),  # a part of a step
        ([], False),
    ],
)
def test_the_condition(groups, expected):
    wrapper = SimpleNamespace(actor_module=[SimpleNamespace(bucket_groups=groups)])
    assert reduces_too_early(wrapper, [1, 2]) is expected
