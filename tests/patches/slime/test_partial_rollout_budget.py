"""slime-partial-rollout-budget: what slime's own functions ask an engine for, and how long responses become."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.slime.partial_rollout_budget import asks_for_too_much, left
from tests.harness import slime_clone
from tests.harness.forkserver import TORCH, Level
from tests.harness.slime_clone import with_clone

RULE_COVERAGE = {
    "minimal scope": "test_the_rest_is_as_released",
    "no side effects": "test_a_dictionary_of_the_callers",
    "backward compatible": ("test_the_rest_is_as_released", "test_what_is_left"),
    "no new blocking": "because it is arithmetic on one sample",
    "as it was until 0.2.4": "test_a_response_in_parts_is_no_longer_than_one_in_one",
    "as released": "test_the_rest_is_as_released",
    "no request is sent": "test_nothing_is_left",
    "does not write to the caller's dictionary": "test_a_dictionary_of_the_callers",
}
WORKER = "tests.patches.slime.partial_rollout_budget_ranks"
FILES = tuple(
    f"slime/{name}.py"
    for name in (
        *("rollout/sglang_rollout", "rollout/sglang_streaming_rollout", "rollout/filter_hub/base_types"),
        *("utils/async_utils", "utils/misc", "utils/trace_utils", "utils/types"),
    )
)
PROMPT, LIMIT = 3, 20
AS_RELEASED = (
    *("before its first token", "never aborted", "never aborted, streaming"),
    *("turns", "a turn's own limit", "longer already"),
)


@pytest.fixture(scope="module", params=["v0.3.1", pytest.param("v0.3.0", marks=pytest.mark.exhaustive)])
def report(request, run_ranks, tmp_path_factory):
    folder = slime_clone.write(tmp_path_factory.mktemp("slime"), request.param, request.param[1:], FILES)
    levels = (*TORCH, Level("tests.harness.loading:torch", str(folder)))
    (found,) = run_ranks(WORKER, levels=levels, ranks=1)
    assert found["status"] == "applied"
    return found


@with_clone
@pytest.mark.parametrize(("case", "parts"), [("once", [6]), ("twice", [6, 5]), ("streaming", [6, 5]), ("masked", [6])])
def test_a_response_in_parts_is_no_longer_than_one_in_one(report, case, parts):
    had = [sum(parts[:number]) for number in range(len(parts) + 1)]
    after = report["after"][case]
    assert after["asked"] == [[PROMPT + tokens, LIMIT - tokens] for tokens in had]
    assert (after["response"], after["tokens"], after["log-probabilities"]) == (LIMIT, PROMPT + LIMIT, LIMIT)
    assert after["status"] == "truncated"
    for state in ("before", "reverted"):
        assert report[state][case]["response"] == sum(parts) + LIMIT
    if case == "masked":
        assert after["mask"] == [0] * 6 + [1] * (LIMIT - 6)


@with_clone
def test_nothing_is_left(report):
    assert report["after"]["at the limit"]["asked"] == [[PROMPT, LIMIT]]
    assert report["after"]["at the limit"]["response"] == LIMIT
    assert report["after"]["at the limit"]["status"] == "truncated"
    assert report["before"]["at the limit"]["response"] == 2 * LIMIT


@with_clone
@pytest.mark.parametrize("case", AS_RELEASED)
def test_the_rest_is_as_released(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]


@with_clone
def test_a_dictionary_of_the_callers(report):
    """Two calls with one: upstream's repair takes the response off it twice."""
    found = report["after"]["more than the limit"]
    assert found["theirs"] == {"max_new_tokens": 2 * LIMIT}
    assert found["asked"] == [[PROMPT + 6, 2 * LIMIT - 6]]
    assert found["response"] == 2 * LIMIT


@with_clone
def test_its_condition_holds_for_what_is_resumed(report):
    """Never for a first part; nothing is said of the one that is longer already."""
    reached = report["reached"]
    resumed = {"once": 1, "twice": 2, "streaming": 2, "masked": 1, "at the limit": 1, "more than the limit": 2}
    assert reached["held"] == sum(resumed.values())
    assert reached["asked"] == reached["calls"] - 1


class Status(enum.Enum):
    PENDING, ABORTED = "pending", "aborted"


class Own:
    Status = Status

    def __init__(self, response_length, status=Status.ABORTED):
        self.response_length, self.status = response_length, status


def test_what_is_left():
    """In one process, without slime."""
    args, asked = SimpleNamespace(rollout_max_response_len=20), {"max_new_tokens": 20, "top_p": 1.0}
    assert left(args, Own(6), asked) == {"max_new_tokens": 14, "top_p": 1.0}
    assert left(args, Own(20), asked)["max_new_tokens"] == 0
    for sample in (Own(0), Own(6, Status.PENDING), Own(21)):
        assert left(args, sample, asked) is asked
    assert asked == {"max_new_tokens": 20, "top_p": 1.0}
    assert left(args, Own(6), {"max_new_tokens": 16})["max_new_tokens"] == 14
    for nothing in (SimpleNamespace(), SimpleNamespace(rollout_max_response_len=None)):
        assert left(nothing, Own(6), {"max_new_tokens": 16})["max_new_tokens"] == 10


def test_what_the_condition_says():
    args, asked = SimpleNamespace(rollout_max_response_len=20), {"max_new_tokens": 20}
    assert asks_for_too_much(args, Own(6), asked) is asks_for_too_much(args, Own(6), {"max_new_tokens": 16}) is True
    for sample in (Own(0), Own(6, Status.PENDING)):
        assert asks_for_too_much(args, sample, asked) is False
    assert asks_for_too_much(args, Own(6), {"max_new_tokens": 4}) is False, "a turn's own limit"
    for arguments in (
        (args, Own(21), asked),
        (args, SimpleNamespace(), asked),
        (args, Own(6), {}),
        (args, Own(6), None),
    ):
        assert asks_for_too_much(*arguments) is None
