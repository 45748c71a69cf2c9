"""`rehearse` on training loops of one's own, plain and accelerate's: right ones hold, wrong ones deviate by name."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import PACKAGES
from tests.patches.accelerate import rehearsal_loops_ranks as loops

WORKER = loops.__name__
CPU = {"ACCELERATE_USE_CPU": "true"}
SOME = ("plain_sgd", "accumulated_by_hand", "gan", "accelerate_loop", "surgery_of_two_tasks", "adversarial_inputs")
exhaustive = pytest.mark.exhaustive


def checked(found):
    """What deviates by loop, and loops whose gradients were not followed."""
    deviating = {
        name: [(each["relation"], each["text"]) for each in rows if each["verdict"] == "deviates"]
        for name, rows in found.items()
    }
    assert {name: each for name, each in deviating.items() if each} == {}
    noted = {"passes_for_a_log"} & {*found}
    assert {name: rows[0]["verdict"] for name, rows in found.items() if rows[0]["verdict"] != "holds"} == (
        dict.fromkeys(noted, "note")
    )


def test_right_loops_hold(run_ranks):
    (found,) = run_ranks(WORKER, "right", *SOME, levels=PACKAGES, ranks=1, **CPU)
    checked(found)
    assert {each["relation"]: each["measured"] for each in found["accelerate_loop"]}["gradient used"] == (
        "2 windows of 4, 4"
    )


@exhaustive
def test_all_right_loops_hold(run_ranks):
    (found,) = run_ranks(WORKER, "right", levels=PACKAGES, ranks=1, **CPU)
    assert len(found) >= 55
    checked(found)


@exhaustive
def test_right_loops_on_two_ranks(run_ranks):
    for found in run_ranks(WORKER, "on-ranks", levels=PACKAGES, ranks=2, **CPU):
        assert len(found) >= 10
        checked(found)


@pytest.mark.parametrize("name", ["never_cleared", pytest.param(None, marks=exhaustive)])
def test_wrong_loops_deviate(run_ranks, name):
    (found,) = run_ranks(WORKER, "wrong", *([name] if name else []), levels=PACKAGES, ranks=1, **CPU)
    for each, rows in found.items():
        _, relation, says = loops.WRONG[each]
        texts = {row["relation"]: row["text"] for row in rows if row["verdict"] == "deviates"}
        assert says in texts.get(relation, ""), (each, rows)


@pytest.mark.parametrize("name", ["ddp_bypassed", pytest.param(None, marks=exhaustive)])
def test_wrong_loops_on_two_ranks_deviate(run_ranks, name):
    of_ranks = run_ranks(WORKER, "wrong-on-ranks", *([name] if name else []), levels=PACKAGES, ranks=2, **CPU)
    for found in of_ranks:
        for each, rows in found.items():
            _, relation, says = loops.WRONG_ON_RANKS[each]
            texts = {row["relation"]: row["text"] for row in rows if row["verdict"] == "deviates"}
            assert says in texts.get(relation, ""), (each, rows)


@pytest.mark.parametrize(
    ("what", "loops_of", "ranks"),
    [
        ("not-followed", loops.NOT_FOLLOWED, 1),
        pytest.param("not-followed-on-ranks", loops.NOT_FOLLOWED_ON_RANKS, 2, marks=exhaustive),
    ],
)
def test_loops_that_cannot_be_followed_say_why(run_ranks, what, loops_of, ranks):
    for found in run_ranks(WORKER, what, levels=PACKAGES, ranks=ranks, **CPU):
        assert len(found) >= 3
        for name, rows in found.items():
            assert rows[0]["verdict"] == "not checked", name
            assert loops_of[name][1] in rows[0]["text"], name
            assert not [each for each in rows if each["verdict"] == "deviates"], name


@pytest.mark.parametrize("names", [("plain_sgd", "accelerate_loop"), pytest.param((), marks=exhaustive)])
def test_a_loop_that_goes_on_is_the_same(run_ranks, names):
    of_ranks = run_ranks(WORKER, "go-on", *names, levels=PACKAGES, ranks=1 if names else 2, **CPU)
    for found in of_ranks:
        for name, (alone, rehearsed) in found.items():
            assert alone == rehearsed, name
