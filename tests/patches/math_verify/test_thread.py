"""``math-verify-thread``: what the main thread finds is found in other threads, too (thread_ranks.py)."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import beside, with_rewards
from tests.harness.logs import diagnosed

WORKER = "tests.patches.math_verify.thread_ranks"
NAME = "math-verify-thread"
RIGHT = [1, 1, 1, 0, 0, 1]
"""By hand: 2/4 is 0.5; 3; {1, 2}; 1/3 is not 0.5; no answer; the root of 8."""
THREADED = "doesn't support threaded environment due to usage of signal.alarm()"

RULE_COVERAGE = {
    "minimal scope": "test_the_main_thread_finds_the_same_as_before",
    "no side effects": "because it returns a function in place of another, and holds no object of the user's",
    "backward compatible": ("test_the_main_thread_finds_the_same_as_before", "test_a_limit_within_a_limit"),
    "no new blocking": (
        "test_nobody_waits_for_a_turn_longer_than_its_own_seconds",
        "test_a_function_that_waits_for_threads_of_its_own_ends",
    ),
    "it stays so": "test_what_is_switched_off_stays_so",
    "does not change Math-Verify before 0.6.1": "because its range begins there, which the contract holds it to",
    "nothing changes": "test_the_main_thread_finds_the_same_as_before",
    "with the results of the main thread": "test_with_it_a_thread_finds_what_the_main_thread_does",
    "a sleep, a lock": "test_a_lock_is_not_interrupted_in_a_thread",
    "hold others up once": "test_nobody_waits_for_a_turn_longer_than_its_own_seconds",
}


@pytest.fixture(scope="module")
def report(run_ranks):
    (report,) = run_ranks(WORKER, levels=with_rewards("0.9", "0.7"), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("who", ["math-verify", "verl", "trl"])
def test_the_main_thread_finds_the_same_as_before(report, who):
    for state in ("before", "after", "reverted"):
        assert report[state][who]["main"] == RIGHT


def test_without_it_every_reward_of_verl_is_0(report):
    assert report["before"]["verl"]["thread"] == [0] * len(RIGHT)
    assert report["before"]["reward loop"] == [0] * len(RIGHT)


def test_without_it_trl_raises(report):
    for who in ("trl", "math-verify"):
        failed = report["before"][who]["thread"]
        assert THREADED in failed["error"]
        assert (NAME, True) in diagnosed(failed["log"])


@pytest.mark.parametrize("who", ["math-verify", "verl", "trl"])
def test_with_it_a_thread_finds_what_the_main_thread_does(report, who):
    assert report["after"][who]["thread"] == RIGHT


def test_with_it_verl_s_reward_loop_has_the_rewards(report):
    assert report["after"]["reward loop"] == RIGHT


def test_timeouts_hold_in_a_thread(report):
    """Without one this parse takes half a minute."""
    found = report["after"]["endless"]
    assert found["thread"]["parsed"] == found["main"]["parsed"] == []
    assert 0.9 < found["thread"]["seconds"] < 8, "one second, and what a machine with other work needs"


def test_a_timeout_that_comes_late_disturbs_nothing_else(report):
    found = report["after"]["disturbed"]
    assert found["late"] == 0
    assert min(found["ended"], found["expired"]) > 0, "else the two have never been close"
    assert found["ended"] + found["expired"] == 300


def test_one_thread_at_a_time_so_that_each_has_its_seconds(report):
    assert report["after"]["at once"] == {"most": 1, "found": [0, 1, 2, 3]}


def test_a_function_that_waits_for_threads_of_its_own_ends(report):
    """They wait for its turn until its time is over; what they find is right."""
    found = report["after"]["with a pool"]
    assert found["expired"]
    assert len(found["parsed"]) in (0, len(RIGHT))


def test_a_lock_is_not_interrupted_in_a_thread(report):
    """As the page says: an alarm interrupts it, and the timer is late."""
    assert report["after"]["waiting"] == {"main": True, "thread": False}


def test_nobody_waits_for_a_turn_longer_than_its_own_seconds(report):
    found = report["after"]["never ending"]
    assert found["ended"] == ["TimeoutException"] * 3
    assert found["most"] > 1, "the second and the third waited for a second each, not for one another"


def test_a_limit_within_a_limit(report):
    assert report["after"]["nested"] == {"inner": "inner, and on", "outer": "outer", "neither": "1.5 x, and on"}


def test_what_is_switched_off_stays_so(report):
    """The function itself, without a thread or a turn."""
    for state in ("before", "after", "reverted"):
        assert report[state]["switched off"] == [True, True]


def test_reverted_it_is_math_verify_s_own_again(report):
    assert report["reverted"]["verl"]["thread"] == [0] * len(RIGHT)
    assert THREADED in report["reverted"]["trl"]["thread"]["error"]


@pytest.mark.exhaustive
def test_an_older_release(run_ranks):
    (report,) = run_ranks(WORKER, "alone", levels=beside("math-verify-0.7", "math_verify"), ranks=1)
    assert (report["version"], report["status"]) == ("0.7.0", "applied")
    assert not any(report["before"]["math-verify"]["thread"]), "it finds nothing, and says nothing"
    for state in ("before", "after", "reverted"):
        assert report[state]["math-verify"]["main"] == RIGHT
    assert report["after"]["math-verify"]["thread"] == RIGHT
    found = report["after"]["endless"]
    assert found["thread"]["parsed"] == found["main"]["parsed"]
    assert found["thread"]["seconds"] < 20
    assert report["after"]["disturbed"]["late"] == 0
