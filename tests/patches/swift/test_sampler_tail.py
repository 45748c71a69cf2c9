"""``swift-sampler-tail``: what all ranks draw from ms-swift's data loader, against torch's DistributedSampler.

What is observed is in sampler_tail_ranks.py: as released, patched and reverted, in one process on each rank.
"""

from __future__ import annotations

from types import SimpleNamespace as Has

import pytest

from rlhf_patches.patches.swift.sampler_tail import leaves_some_out
from tests.harness.forkserver import swift

WORKER = "rlhf_patches.patches.swift.proofs.sampler_tail_ranks"
RULE_COVERAGE = {
    "minimal scope": "test_where_the_ranks_divide_the_data_nothing_changes",
    "no side effects": (
        "because all it keeps is the data set's size, on the sampler that the trainer has made for itself"
    ),
    "backward compatible": (
        "test_where_the_ranks_divide_the_data_nothing_changes",
        "test_a_number_of_samples_that_was_set_since_is_kept_to",
    ),
    "no new blocking": "test_every_sample_is_drawn_and_ranks_draw_alike",
    "nothing changes": "test_where_the_ranks_divide_the_data_nothing_changes",
    "does not change a sampler that was made before": "test_a_sampler_that_was_made_before_draws_as_it_did",
}

RANKS = 3
KEPT = [f"{size}, {order}, kept" for size in (1, 6, 10, 11) for order in ("shuffled", "in order")]
DROPPED = [each.replace("kept", "dropped") for each in KEPT]


@pytest.fixture(
    scope="module",
    params=[None, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("swift-3.8", "swift-3.12"))],
)
def reports(request, run_ranks):
    found = run_ranks(WORKER, levels=swift(request.param, "swift_transformers"), ranks=RANKS)
    assert all(report["status"] == "applied" for report in found)
    return found


def epochs(reports, state, case):
    """Of each epoch, the samples of each rank."""
    return list(zip(*(report[state][case]["samples"] for report in reports), strict=True))


def size_of(case):
    return int(case.partition(",")[0])


@pytest.mark.parametrize("case", KEPT)
def test_every_sample_is_drawn_and_ranks_draw_alike(reports, case):
    size = size_of(case)
    left = size % RANKS
    for state in ("before", "reverted"):
        for ranks in epochs(reports, state, case):
            never = set(range(size)) - {sample for rank in ranks for sample in rank}
            assert never == set(range(size - left, size)), "the last ones, in each epoch"
    for ranks in epochs(reports, "after", case):
        everything = [sample for rank in ranks for sample in rank]
        assert set(everything) == set(range(size))
        assert len(everything) == size + -size % RANKS, "and no more again than ranks need"
        assert len({len(rank) for rank in ranks}) == 1


@pytest.mark.parametrize("case", DROPPED)
def test_what_is_dropped_is_cut_from_the_shuffled_order(reports, case):
    size = size_of(case)
    of_each = size // RANKS // 2 * 2  # whole batches of two
    for ranks in epochs(reports, "after", case):
        assert [len(rank) for rank in ranks] == [of_each] * RANKS
        everything = [sample for rank in ranks for sample in rank]
        assert len(set(everything)) == len(everything)
    if case.startswith("11, shuffled"):
        dropped = [
            set(range(size)) - {sample for rank in ranks for sample in rank} for ranks in epochs(reports, "after", case)
        ]
        assert dropped[0] != dropped[1], "others in another epoch"
        for ranks in epochs(reports, "before", case):
            assert not {9, 10} & {sample for rank in ranks for sample in rank}


def test_it_is_what_torchs_sampler_draws(reports, request):
    """Since 3.12.0, which takes samples in turns as torch does."""
    if "swift-3.8" in request.node.callspec.id:
        pytest.skip("each rank has one part after the other")
    for report in reports:
        for case in (*KEPT, *DROPPED):
            assert all(report["after"][case]["as torch"]), case


def test_there_are_as_many_batches_as_the_loader_says(reports):
    for report in reports:
        for case, after in report["after"].items():
            assert all(after["as many batches as said"]), case


def test_grouped_by_length_ranks_draw_alike(reports, request):
    if "swift-3.8" in request.node.callspec.id:
        pytest.skip("before 3.12.0 there is no such option")
    assert {len(rank) for rank in epochs(reports, "before", "by length")[0]} == {3, 4}
    for ranks in epochs(reports, "after", "by length"):
        assert {len(rank) for rank in ranks} == {4}
        assert {sample for rank in ranks for sample in rank} == set(range(3 * RANKS + 1))


def test_where_the_ranks_divide_the_data_nothing_changes(reports):
    for report in reports:
        for case in ("6, shuffled, kept", "6, in order, kept", "6, shuffled, dropped", "6, in order, dropped"):
            assert report["after"][case] == report["before"][case]


def test_its_condition_holds_where_samples_are_left_out(reports):
    """Of sizes 1, 10 and 11, not of 6; nor where as many are dropped with the repair."""
    kept = [each for each in KEPT if size_of(each) % RANKS]
    dropped = [each for each in DROPPED if size_of(each) % RANKS and "shuffled" in each and size_of(each) > 2 * RANKS]
    for report in reports:
        reached = report["reached"]
        assert reached["asked"] == reached["calls"] == len(report["after"]) - 1, "not of the one that was made before"
        grouped_and_limited = len(set(report["after"]) & {"by length", "limited"})
        assert reached["held"] == len(kept) + len(dropped) + grouped_and_limited


def test_what_the_condition_says(monkeypatch):
    import sys

    def told(size, shuffle=True, drop_last=False, batch=2, tp_size=1, ranks=6):
        group = Has(is_available=lambda: True, is_initialized=lambda: ranks > 1, get_world_size=lambda: ranks)
        monkeypatch.setitem(sys.modules, "torch.distributed", group)
        return leaves_some_out(size, batch, shuffle, drop_last, tp_size)

    assert told(10) is told(10, shuffle=False) is told(20, drop_last=True) is told(10, tp_size=2) is True
    assert told(12) is told(9, tp_size=2) is told(10, ranks=1) is False
    assert told(10, shuffle=False, drop_last=True) is told(10, drop_last=True) is False
    assert told(None) is told(10, batch=0) is told(10, tp_size=None) is told(10, tp_size=8) is None


def test_a_sampler_that_was_made_before_draws_as_it_did(reports):
    for report in reports:
        assert report["after"]["made before"] == report["before"]["made before"]
        assert report["after"]["made before"]["samples"] != report["after"]["10, shuffled, kept"]["samples"]


def test_a_number_of_samples_that_was_set_since_is_kept_to(reports):
    """A user's limit: how many samples a rank draws, of how many, and how many batches there are."""
    for report in reports:
        assert report["after"]["limited"] == report["before"]["limited"]
        assert [len(samples) for samples in report["after"]["limited"]["samples"]] == [2, 2]
        assert all(report["after"]["limited"]["as many batches as said"])
