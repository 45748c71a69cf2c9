"""``megatron-core-reshardable-buckets``: checkpoints of two ranks, loaded by others (reshardable_buckets_ranks.py)."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.megatron_core._conditions import saves_shifted_states
from rlhf_patches.patches.megatron_core.reshardable_buckets import PATCH, padding_before
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import megatron

RULE_COVERAGE = {
    "minimal scope": "test_one_bucket_is_as_before",
    "no side effects": "because it chooses which part of gathered tensors is saved, and writes to none",
    "backward compatible": ("test_one_bucket_is_as_before", "test_what_was_saved_before_is_loaded_as_before"),
    "no new blocking": "because a rank looks at its own buckets; no lock, no collective",
    "Loading is as before": "test_what_was_saved_before_is_loaded_as_before",
    "checkpoints are bitwise identical": "test_one_bucket_is_as_before",
    "The format is the same": "test_a_resumed_run_is_the_one_that_was_not_interrupted",  # released code loads it
    "does not repair a checkpoint that was saved without it": "test_what_was_saved_before_is_loaded_as_before",
}
WORKER = "tests.patches.megatron_core.reshardable_buckets_ranks"
SHIFTED = ["buckets", "buckets, on one rank", "shared embeddings"]
CORE = ("buckets", "one bucket")
exhaustive = pytest.mark.exhaustive
pytestmark = pytest.mark.xdist_group("checkpoints of buckets")  # saved once, by the worker that has them all


def levels(release):
    return megatron(None if release == "newest" else release)


def cases_of(release):
    return () if release else CORE


@pytest.fixture(scope="module")
def saved(run_ranks, of_the_session):
    """A folder with what a release has saved on two ranks, and the first rank's report."""

    @functools.cache
    def saved(release=None):
        at = of_the_session / f"checkpoints of {release}"
        reports = run_ranks(WORKER, "--folder", str(at), "save", *cases_of(release), levels=levels(release))
        assert [one["status"] for one in reports] == ["applied"] * 2
        return at, reports[0]

    return saved


@pytest.fixture(scope="module")
def loaded(run_ranks, saved):
    @functools.cache
    def loaded(release=None, ranks=1):
        at, _ = saved(release)
        arguments = ("--folder", str(at), "load", *cases_of(release))
        return run_ranks(WORKER, *arguments, levels=levels(release), ranks=ranks)

    return loaded


RELEASES = pytest.mark.parametrize("release", exhaustive_but((None, "newest", "megatron-0.15", "megatron-0.19"), None))


def skip_unless(there):
    if not there:
        pytest.skip("of the newest release as `newest`")


RANKS = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=exhaustive), pytest.param(4, marks=exhaustive)])


@RELEASES
@pytest.mark.parametrize("case", exhaustive_but(SHIFTED, "buckets", "shared embeddings"))
def test_each_parameter_has_its_own_state(saved, release, case):
    """Element by element, against what each rank's optimizer has of a parameter by its own ranges."""
    _, report = saved(release)
    skip_unless(case in report["after"])
    for state in ("before", "reverted") if case in report["reverted"] else ("before",):
        found = report[state][case]
        assert found["padding"][0] > 0
        for names in found["wrong"].values():
            least = 0 if case == "shared embeddings" else 8
            assert len(names) > least, "all in the buckets after the first that is padded"
        assert found == report["before"][case]
    assert report["after"][case]["wrong"] == {"param": [], "exp_avg": [], "exp_avg_sq": []}


@RELEASES
def test_a_run_is_told_whether_it_was_affected(saved, release):
    """Once in each case that is saved shifted, and in no other; nor while a checkpoint is loaded."""
    _, report = saved(release)
    reached, shifted = report["reached"], [case for case in SHIFTED if case in report["after"]]
    assert reached["held"] == len(shifted) < reached["asked"] == reached["calls"] == len(report["after"])


@RELEASES
def test_a_run_that_loads_is_not_told_that_it_was_affected(loaded, release):
    for report in loaded(release):
        reached = report["reached"]
        assert reached["held"] == 0 < reached["asked"] == reached["calls"]


@RELEASES
def test_one_bucket_is_as_before(saved, loaded, release):
    _, report = saved(release)
    assert not any(report["before"]["one bucket"]["wrong"].values())
    assert report["after"]["one bucket"] == report["before"]["one bucket"]
    for one in loaded(release):
        assert one["after"]["before"]["one bucket"] == one["after"]["after"]["one bucket"]


@RELEASES
@RANKS
@pytest.mark.parametrize("case", exhaustive_but((*SHIFTED, "one bucket"), *CORE))
def test_a_resumed_run_is_the_one_that_was_not_interrupted(loaded, release, ranks, case):
    """Saved on two ranks with the patch, loaded without it and with it: bit for bit, and so two steps later."""
    for report in loaded(release, ranks):
        skip_unless(case in report["after"]["after"])
        for state in ("before", "after"):
            for when in ("loaded", "later"):
                assert not any(report[state]["after"][case][when].values())
        if case in SHIFTED:
            assert all(report["before"]["before"][case]["later"].values())


@RELEASES
@RANKS
def test_what_was_saved_before_is_loaded_as_before(loaded, release, ranks):
    for report in loaded(release, ranks):
        assert report["after"]["before"] == report["before"]["before"]
        for case in SHIFTED if release else ["buckets"]:
            assert all(report["after"]["before"][case]["loaded"].values()), "what was never saved cannot be loaded"


def test_a_run_that_does_not_overlap_is_not_excluded():
    """Embeddings that pipeline stages share have a bucket of their own."""
    assert not PATCH.excluded_by


def test_the_padding_of_the_buckets_before_a_parameter():
    buckets = [
        SimpleNamespace(grad_data=torch.empty(size), numel_unpadded=size - padding)
        for size, padding in ((128, 3), (256, 0), (128, 5))
    ]
    places = {name: (0, 0, bucket) for bucket, name in enumerate("abc")}
    buffer = SimpleNamespace(buckets=buckets, param_index_map=places)
    assert [padding_before(buffer, name) for name in "abc"] == [0, 3, 3]


def test_what_is_told_of_a_checkpoint():
    def told(*paddings, loading=False):
        buckets = [SimpleNamespace(grad_data=torch.empty(128), numel_unpadded=128 - each) for each in paddings]
        return saves_shifted_states(SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets)]), loading)

    assert told(3, 0) is told(0, 3, 0) is True
    assert told(3) is told(0, 3) is told() is told(3, 0, loading=True) is False
    assert saves_shifted_states(SimpleNamespace(), False) is None
    assert saves_shifted_states(SimpleNamespace(buffers=[SimpleNamespace()]), False) is None
    bucket = SimpleNamespace(numel_unpadded=1)
    assert saves_shifted_states(SimpleNamespace(buffers=[SimpleNamespace(buckets=[bucket] * 2)]), False) is None
