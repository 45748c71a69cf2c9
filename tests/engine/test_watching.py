"""Figures of a run: the worst of each, and one line where it is out of its limit."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import math
import weakref

import pytest

import rlhf_patches
from rlhf_patches import SettingsError, settings, watching
from rlhf_patches.definitions.words import observed_text
from rlhf_patches.watching import Figure, Known, Runs


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.DEBUG, logger="rlhf_patches")
    return lambda level="WARNING": [each.getMessage() for each in caplog.records if each.levelname == level]


def figure(**more):
    return Figure("fw-watch", "log-probabilities", "they differ by {} nats", 0.1, **more)


def test_what_is_above_the_limit_is_said_once(said):
    made = figure()
    for step, value in enumerate([0.01, 0.1, 0.31, 0.2, 0.5]):
        made.note(value, f"step {step}")
    explain = "See `rlhf-patches explain fw-watch`"
    assert said() == [f"fw-watch: they differ by 0.31 nats at step 2 (limit 0.1). {explain}"]
    found = watching.observed(made)["log-probabilities"]
    warning = "they differ by 0.31 nats at step 2 (limit 0.1)"
    assert found == {"worst": 0.5, "at": "step 4", "values": 5, "warning": warning}
    assert observed_text(found) == f"0.5 at worst, at step 4, of 5; warning: {warning}"
    made.start_anew()
    assert watching.observed(made) == {}
    made.note(0.3)
    assert len(said()) == 2


def test_nan_is(said):
    made = figure()
    made.note(math.nan, "step 0")
    assert json.loads(json.dumps(watching.observed(made), allow_nan=False))["log-probabilities"]["worst"] == "nan"
    assert "they differ by nan nats at step 0 (limit 0.1)" in said()[0]


@pytest.mark.parametrize(("floor", "value", "warning"), [(0.0, 0.04, True), (0.05, 0.04, False), (0.0, 0.029, False)])
def test_what_is_unusual_in_this_run_is_said(said, floor, value, warning):
    """The median of the first ten is 0.01."""
    made = figure(times=3, floor=floor)
    for each in (0.01, 0.01, 0.09, 0.01, 0.01, 0.001, 0.01, 0.02, 0.01, 0.01):
        made.note(each)
    assert said() == []
    made.note(value)
    assert bool(said()) is warning
    assert not warning or "(0.01 is usual in this run)" in said()[0]


class Run:
    """A trainer."""


@dataclasses.dataclass
class Settings:
    """A run that cannot be hashed, and is equal to another one."""

    name: str = ""


@pytest.mark.parametrize("kind", [Run, Settings])
def test_each_run_has_its_own_usual_and_its_own_line(said, kind):
    made, first, second = figure(times=3), kind(), kind()
    for _ in range(10):
        made.note(0.01, run=first)
        made.note(0.09, run=second)
    made.note(0.09, run=kind())
    assert said() == []
    made.note(0.09, "step 10", first)
    made.note(0.095, "step 11", first)
    assert len(said()) == 1
    made.note(0.2, "step 12", second)
    assert len(said()) == 2
    assert watching.observed(made)["log-probabilities"]["warning"].startswith("they differ by 0.09 nats at step 10")


def test_what_is_unusual_is_said_again_where_it_is_above_the_limit(said):
    made = figure(times=3)
    for value in (*[0.01] * 10, 0.05, 0.06, 0.2, 0.3, math.nan):
        made.note(value)
    assert [line.split(" (")[1].split(")")[0] for line in said()] == ["0.01 is usual in this run", "limit 0.1"]


def test_no_run_is_kept(said):
    made, known, warning = figure(), [weakref.ref(run := Run())], Runs(list)
    run.itself = run
    made.note(1.0, run=run)
    warning.of(run).append(1)
    assert warning.of(run) == [1]
    del run
    gc.collect()
    assert known[0]() is None
    assert warning._known == made._runs._known == {}
    assert warning.of(Run()) == []


def test_what_cannot_be_referred_to_weakly_is_one_run():
    runs = Runs(list)
    assert runs.of(None) is runs.of((1,)) is not runs.of(Run)


LARGER, FROM_THE_START = Known("LoRA drops."), Known("The model drops.", usual=True)


@pytest.mark.parametrize(
    ("known", "first", "value", "limits", "warning"),
    [
        (None, 0.01, 0.05, "", "0.01 is usual in this run"),
        (LARGER, 0.01, 0.05, "", None),
        (LARGER, 0.01, 0.2, "", "limit 0.1"),
        (FROM_THE_START, 0.01, 0.05, "", None),
        (FROM_THE_START, 0.3, 0.8, "", None),
        (FROM_THE_START, 0.3, 1.0, "", "limit 0.1"),
        (FROM_THE_START, 0.3, math.nan, "", "limit 0.1"),
        (FROM_THE_START, 0.3, 0.8, "log-probabilities=0.5", "limit 0.5"),
        (FROM_THE_START, 0.3, 9.0, "log-probabilities=inf", None),
    ],
)
def test_what_is_known_to_make_it_larger(said, monkeypatch, known, first, value, limits, warning):
    """It is asked where a value is out of the limit, and said first where that is to be told all the same."""
    monkeypatch.setenv("RLHF_PATCHES_LIMITS", limits)
    made = figure(times=3)
    for each in (*[first] * 10, value):
        made.note(each, known=lambda: known)
    assert len(said()) == (warning is not None)
    if warning is not None:
        assert f"({warning}). {f'{known.says} ' if known else ''}See `rlhf-patches" in said()[0]


def test_it_is_asked_only_then(said):
    asked = []
    made = figure()
    made.note(0.1, known=lambda: asked.append(1))
    assert asked == []
    made.note(0.2, known=lambda: asked.append(1))
    assert (asked, len(said())) == ([1], 1)


def test_what_cannot_be_asked_makes_no_value_pass(said):
    def known():
        raise AttributeError("no model")

    figure().note(0.2, known=known)
    assert len(said()) == 1
    assert said("DEBUG") == ["fw-watch failed: AttributeError: no model"]


def test_without_ten_nothing_is_usual(said):
    made = figure(times=3)
    for each in (0.001, 0.001, 0.09):
        made.note(each)
    assert said() == []


@pytest.mark.parametrize(
    ("limits", "values", "warning"),
    [
        ("log-probabilities=0.5", [0.4], False),
        ("equal-completions=50, log-probabilities = 0.5", [0.4, 0.6], True),
        ("log-probabilities=inf", [*[0.001] * 10, 100.0], False),
        ("equal-completions=50", [0.2], True),
    ],
)
def test_limits_can_be_set(said, monkeypatch, limits, values, warning):
    monkeypatch.setenv("RLHF_PATCHES_LIMITS", limits)
    made = figure(times=3)
    for value in values:
        made.note(value)
    assert bool(said()) is warning


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            "log-probability=1",
            "LIMITS names 'log-probability', which no watch records; did you mean 'log-probabilities'?",
        ),
        ("log-probabilities", "LIMITS has 'log-probabilities': expected log-probabilities=NUMBER, 0 or more; inf for"),
        ("log-probabilities=much", "expected log-probabilities=NUMBER"),
        ("log-probabilities=-1", "expected log-probabilities=NUMBER"),
        ("log-probabilities=nan", "expected log-probabilities=NUMBER"),
    ],
)
def test_a_wrong_limit_is_an_error_before_anything_changes(limits, message):
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        settings.from_environment([], environment={"RLHF_PATCHES_LIMITS": limits})


def test_one_rank_says_what_all_have_and_each_its_own(said, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    figure().note(1.0)
    assert said() == []
    figure(local=True).note(1.0)
    assert len(said()) == 1


def test_known_bugs_that_are_not_repaired_here_are_named(said):
    figure(points_to=("trl-grpo-tool-turns", "no-such-patch")).note(1.0)
    assert "with this sign: trl-grpo-tool-turns; see `rlhf-patches" in said()[0]


def test_bugs_that_no_installed_release_has_are_not_named(said):
    """No framework is installed here."""
    rlhf_patches.apply(only="trl-grpo-tool-turns")
    figure(points_to=("trl-grpo-tool-turns",)).note(1.0)
    rlhf_patches.revert()
    assert "known bugs" not in said()[0]


def test_what_goes_wrong_in_looking_is_not_raised(said):
    with watching.looking("fw-watch"):
        raise KeyError("gone")
    assert said() == []
    assert said("DEBUG") == ["fw-watch failed: KeyError: 'gone'"]
    with pytest.raises(KeyboardInterrupt), watching.looking("fw-watch"):
        raise KeyboardInterrupt
