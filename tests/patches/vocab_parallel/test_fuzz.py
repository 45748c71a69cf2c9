"""The fuzzer's first programs; ``nox -s fuzz`` runs as many as fit into a minute."""

from __future__ import annotations

import pytest

from tests.patches.vocab_parallel import fuzz_ownership as fuzz_ownership
from tests.patches.vocab_parallel.fuzz_ownership import failure, search, text

pytestmark = pytest.mark.filterwarnings("ignore")  # of programs that nobody would write


def test_random_programs():
    program, seen = search(seed=1, seconds=60, programs=80)
    assert program is None, f"{failure(program)}\n\n{text(program)}"
    assert seen["run"] >= 40


def test_with_the_check_disabled_they_show_corruption():
    with fuzz_ownership.deciding(lambda ctx: ctx.refusal):
        program, seen = search(seed=1, seconds=60, programs=20)
    assert program is not None
    assert seen["run"] <= 20


def test_a_wrong_gradient_fails_too(monkeypatch, capsys):
    """In place or not: float64 says so. And the program is printed, to be run by itself."""
    original = fuzz_ownership.token_logprobs
    monkeypatch.setattr(fuzz_ownership, "token_logprobs", lambda *args, **kwargs: original(*args, **kwargs) * 1.001)
    assert fuzz_ownership.main(["--seed", "1", "--seconds", "60"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("seed 1\n")
    assert "off float64" in printed
    assert "losses.append(logprobs(x" in printed
