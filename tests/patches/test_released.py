"""What is said where a patch leaves code as released, since code of the user's own stands in between."""

from __future__ import annotations

import pytest

from rlhf_patches.patches import _released


@pytest.fixture(autouse=True)
def not_said_yet():
    _released.stays.cache_clear()
    yield
    _released.stays.cache_clear()


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_it_is_said_once_on_rank_0(caplog, monkeypatch, rank, lines):
    monkeypatch.setenv("RANK", rank)
    for _ in range(3):
        _released.left("a-patch", "Mine.compute_loss")
    said = ["a-patch: Mine.compute_loss is not the release's own: the gradient stays as released"]
    assert caplog.messages == said * lines


def test_another_reason_is_another_line(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    _released.stays("a-patch", "one", "the mask")
    _released.stays("a-patch", "other", "the mask")
    assert len(caplog.messages) == 2
