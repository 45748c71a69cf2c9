"""The fuzzer's first programs; ``nox -s fuzz`` runs as many as fit into a minute."""

from __future__ import annotations

import pytest

from tests.patches.vocab_parallel import fuzz_ownership as fuzz_ownership
from tests.patches.vocab_parallel.fuzz_ownership import search

pytestmark = pytest.mark.filterwarnings("ignore")  # of programs that nobody would write


def test_random_programs():
    found, seen = search(seed=1, seconds=60, programs=80)
    assert found is None, str(found)
    assert seen["run"] >= 40


def test_with_the_check_disabled_they_show_corruption():
    with fuzz_ownership.deciding(lambda ctx: ctx.refusal):
        found, seen = search(seed=1, seconds=60, programs=20)
    assert found is not None
    assert seen["run"] <= 20


def test_a_wrong_gradient_fails_too(monkeypatch, capsys):
    """In place or not: float64 says so. How to run the program again is printed, at the end, where logs are kept."""
    original = fuzz_ownership.token_logprobs
    monkeypatch.setattr(fuzz_ownership, "token_logprobs", lambda *args, **kwargs: original(*args, **kwargs) * 1.001)
    assert fuzz_ownership.main(["--seed", "1", "--seconds", "60"]) == 1
    first = capsys.readouterr().out
    assert first.startswith("seed 1\n")
    assert "off float64" in first
    *_, program, _, again = first.splitlines()
    assert program == "    other.backward()"
    assert "losses.append(logprobs(x" in first.rpartition("\nprogram ")[2]
    assert fuzz_ownership.main(again.split()) == 1
    assert capsys.readouterr().out.partition("off float64")[2] == first.partition("off float64")[2]
