"""``transformers-resume-dispatched``: what a resumed Trainer gets of an epoch is what is left of it.

resume_dispatched_ranks.py stops and resumes the real Trainer in each of four epochs.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.transformers.resume_dispatched import in_its_epoch
from tests.harness import forkserver

RULE_COVERAGE = {
    "minimal scope": "test_only_a_dispatcher_with_a_sampler_is_told",
    "no side effects": "test_only_a_dispatcher_with_a_sampler_is_told",
    "backward compatible": ("test_another_loader_is_the_same", "test_only_a_dispatcher_with_a_sampler_is_told"),
    "no new blocking": "because set_epoch assigns one number on each rank; no lock, no collective",
    "The order of every other loader is unchanged": "test_another_loader_is_the_same",
    "`accelerate-resume-dispatched` is needed too": "test_on_two_ranks",
}
WORKER = "rlhf_patches.patches.transformers.proofs.resume_dispatched_ranks"


@pytest.fixture(scope="module")
def trained(run_ranks):
    def run(ranks):
        reports = run_ranks(WORKER, levels=forkserver.beside(None, "trainer"), ranks=ranks)
        assert all(report["transformers-resume-dispatched"] == ["5.23.0", "applied"] for report in reports)
        return reports

    return run


@pytest.fixture(scope="module")
def alone(trained):
    (report,) = trained(1)
    return report


def goes_on(found):
    return [one == other for one, other in zip(found["left"], found["resumed"], strict=True)]


def test_a_resumed_epoch_goes_on_in_its_order(alone):
    for state in ("before", "reverted"):
        assert goes_on(alone[state]["dispatched"]) == [True, False, False, False]
        resumed, left = alone[state]["dispatched"]["resumed"][2], alone[state]["dispatched"]["left"]
        assert resumed[:4] == left[0][:4], "the first epoch's order"
    for state in ("after", "both"):
        assert goes_on(alone[state]["dispatched"]) == [True] * 4
        assert alone[state]["dispatched"]["left"] == alone["before"]["dispatched"]["left"]


def test_the_condition(alone):
    """Three of the resumed runs; not one that resumes in the first epoch, nor with another loader."""
    reached = alone["reached"]
    assert (reached["held"], reached["asked"]) == (3, reached["calls"])


def test_another_loader_is_the_same(alone):
    assert goes_on(alone["before"]["others"]) == [True] * 4
    for state in ("after", "both", "reverted"):
        assert alone[state]["others"] == alone["before"]["others"]


@pytest.mark.exhaustive
def test_on_two_ranks(trained):
    for report in trained(2):
        for state in ("before", "after", "reverted"):
            assert goes_on(report[state]["dispatched"]) == [False] * 4, "too few batches are skipped"
        assert goes_on(report["both"]["dispatched"]) == [True] * 4
        assert report["both"]["others"] == report["before"]["others"]


def test_only_a_dispatcher_with_a_sampler_is_told(monkeypatch):
    class Dispatcher(SimpleNamespace):
        def set_epoch(self, epoch):
            self.epoch = epoch

    def told(loader):
        before = vars(loader).copy()
        assert in_its_epoch(loader, 3) is loader
        return {name: value for name, value in vars(loader).items() if name not in before}

    monkeypatch.setitem(sys.modules, "accelerate.data_loader", SimpleNamespace(DataLoaderDispatcher=Dispatcher))
    assert told(Dispatcher(batch_sampler=object())) == {"epoch": 3}
    assert told(Dispatcher(batch_sampler=None)) == {}, "an iterable data set"
    assert told(SimpleNamespace(batch_sampler=object())) == {}
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", None)
    assert told(Dispatcher(batch_sampler=object())) == {}
