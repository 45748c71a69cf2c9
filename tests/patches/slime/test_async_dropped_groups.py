"""slime-async-dropped-groups: which prompts slime's own worker samples, and which of them its rollout returns."""

from __future__ import annotations

import functools
import itertools
import queue
import sys
import types
from types import SimpleNamespace

import pytest

import rlhf_patches
from rlhf_patches.patches import _released
from rlhf_patches.patches.slime import async_dropped_groups
from rlhf_patches.patches.slime.async_dropped_groups import at_most, has_room
from tests.harness import slime_clone
from tests.harness.forkserver import TORCH, Level
from tests.harness.slime_clone import with_clone

RULE_COVERAGE = {
    "minimal scope": "test_where_no_more_are_finished_than_asked_for_nothing_changes",
    "no side effects": "because it takes groups from the worker's queue, as slime does",
    "known": ("test_a_worker_of_one_s_own_says_itself_what_is_finished", "test_a_worker_that_filters_is_not_bypassed"),
    "holds 1000": "test_a_callback_of_one_s_own_finds_the_queue_full",
    "backward compatible": (
        "test_groups_that_are_aborted_or_fail_are_slimes_affair",
        "test_a_worker_that_filters_is_not_bypassed",
    ),
    "no new blocking": "test_the_loop_that_samples_is_never_blocked",
    "at most twice that many wait": (
        "test_the_worker_stops_where_nobody_takes",
        "test_there_is_room_for_as_many_as_are_sampled_at_once",
    ),
    "lets up to 1000 groups wait": "test_a_rollout_of_one_s_own_gets_as_many_as_it_waits_for",
    "each prompt of the data source is trained on": "test_every_group_is_trained_on_once",
    "once": "test_every_group_is_trained_on_once",
    "nothing changes": "test_where_no_more_are_finished_than_asked_for_nothing_changes",
    "does not change a worker of yours": "test_a_worker_that_filters_is_not_bypassed",
    "The others stay in the queue": "test_what_a_step_takes",
}
WORKER = "tests.patches.slime.async_dropped_groups_ranks"
FILES = tuple(f"slime/{name}.py" for name in ("rollout/fully_async_rollout", "utils/async_utils", "utils/types"))
AT_ONCE, A_STEP, STEPS = 8, 3, 5


@pytest.fixture(scope="module", params=["v0.3.1", pytest.param("v0.3.0", marks=pytest.mark.exhaustive)])
def report(request, run_ranks, tmp_path_factory):
    tag = request.param
    more = ("slime/utils/misc.py",) if tag == "v0.3.1" else ()
    folder = slime_clone.write(tmp_path_factory.mktemp("slime"), tag, tag[1:], (*FILES, *more))
    levels = (*TORCH, Level("tests.harness.loading:torch", str(folder)))
    (found,) = run_ranks(WORKER, levels=levels, ranks=1)
    assert found["status"] == "applied"
    return found


@with_clone
@pytest.mark.parametrize("case", ["steps", "reversed", "others"])
def test_every_group_is_trained_on_once(report, case):
    failing = [2] if case == "others" else []
    assert report["after"][case]["lost"] == failing
    for state in ("before", "reverted"):
        found = report[state][case]
        assert len(found["lost"]) >= STEPS * (AT_ONCE - A_STEP)
        assert all(step == sorted(step) for step in found["trained"])
    for found in (report["before"][case], report["after"][case]):
        assert found["twice"] == 0
        assert [len(step) for step in found["trained"]] == [A_STEP] * STEPS


@with_clone
def test_the_condition(report):
    """Not where a step takes all that are finished; unknown with a worker of a user's."""
    reached = report["reached"]
    assert 0 < reached["held"] < reached["asked"] < reached["calls"]


@with_clone
def test_those_that_were_finished_first(report):
    trained = report["after"]["steps"]["trained"]
    assert list(itertools.chain(*trained)) == list(range(STEPS * A_STEP))
    reverse = report["after"]["reversed"]["trained"]
    assert reverse[:2] == [[5, 6, 7], [2, 3, 4]], "a step's groups are in the order of their prompts, as released"


@with_clone
def test_groups_that_are_aborted_or_fail_are_slimes_affair(report):
    for state in ("before", "after", "reverted"):
        assert sorted(report[state]["others"]["given back"]) == [1, 4, 9]
        assert not {1, 2, 4, 9} & set(itertools.chain(*report[state]["others"]["trained"]))


@with_clone
def test_the_worker_stops_where_nobody_takes(report):
    assert 0 < report["after"]["unasked"]["waiting"] <= 2 * AT_ONCE < report["before"]["unasked"]["waiting"]
    assert report["after"]["unasked"]["all the same"]


@with_clone
def test_a_rollout_of_one_s_own_gets_as_many_as_it_waits_for(report):
    """From slime's worker: as released."""
    for state in ("before", "after", "reverted"):
        assert report[state]["awaited"] >= 3 * AT_ONCE
        assert report[state]["awaited then taken"] == [True, True]
        assert report[state]["awaited by its own step"] == list(range(3 * AT_ONCE))


@with_clone
def test_a_callback_of_one_s_own_finds_the_queue_full(report):
    """And gives back what has no room, as released."""
    for state in ("before", "after", "reverted"):
        assert report[state]["full"] == {"waiting": 1000, "given back": 100}


@with_clone
def test_the_loop_that_samples_is_never_blocked(report):
    assert report["before"]["many"] == {"full": True, "goes on": False, "in all": 1100}
    assert report["after"]["many"] == {"full": True, "goes on": True, "in all": 1100}


@with_clone
def test_where_no_more_are_finished_than_asked_for_nothing_changes(report):
    assert report["before"]["few"] == report["after"]["few"] == report["reverted"]["few"] == [0, 1, 2]


class Own:
    """A worker of a user's, or slime's where its function is taken for that of slime's module."""

    def __init__(self):
        self.output_queue = queue.Queue()

    def get_completed_groups(self):
        return "its own"


def slimes_worker(**own):
    names = {"__name__": "slime.rollout.fully_async_rollout", "queue": queue}
    found = {name: types.FunctionType(vars(Own)[name].__code__, names) for name in ("__init__", "get_completed_groups")}
    more = dict.fromkeys(("start", "_loop", "_make_done_cb"), found["get_completed_groups"])
    kind = type("AsyncRolloutWorker", (), {**found, **more})
    return type("Subclass", (kind,), own)()


@pytest.mark.parametrize(
    "worker",
    [
        Own(),
        SimpleNamespace(get_completed_groups=lambda: "its own"),  # which has no queue
        type("Decorated", (Own,), {"get_completed_groups": functools.wraps(slimes_worker)(lambda self: "its own")})(),
    ],
)
def test_a_worker_of_one_s_own_says_itself_what_is_finished(worker, caplog):
    _released.stays.cache_clear()
    assert [at_most(worker, 2) for _ in range(2)] == ["its own"] * 2
    (said,) = caplog.messages
    assert "get_completed_groups is not slime's own: what a step takes stays as released" in said
    assert async_dropped_groups.size(worker) == 1000


@pytest.mark.parametrize("name", ["_loop", "_make_done_cb", "_thread_main", "start", "filled"])
def test_a_worker_that_fills_the_queue_itself_stays_as_released(name, caplog):
    """It may ask whether the queue is full, or wait for room in it, or until it is warm."""
    _released.stays.cache_clear()
    worker = slimes_worker(**{name: lambda self: None})
    worker.get_completed_groups = types.FunctionType(
        (lambda: "all").__code__, {"__name__": async_dropped_groups._MODULE}
    )
    assert at_most(worker, 2) == "all"
    assert f"{name} is not slime's own" in caplog.text
    assert (async_dropped_groups.size(worker), async_dropped_groups.size(slimes_worker())) == (1000, 0)


def test_there_is_room_for_as_many_as_are_sampled_at_once(monkeypatch):
    """Where slime calls its own rollout; of another one it is not known for how many it waits."""
    module = types.ModuleType("slime.rollout.fully_async_rollout")
    names = ("generate_rollout_fully_async", "_generate_rollout_async", "_get_global_worker")
    exec("".join(f"def {name}(): ...\n" for name in names), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    worker, own = slimes_worker(), Own()
    for each in (worker, own):
        each.args = SimpleNamespace(rollout_function_path=f"{module.__name__}.generate_rollout_fully_async")
        for number in range(2):
            each.output_queue.put((number, []))
    assert [has_room(worker, at_once) for at_once in (2, 3)] == [False, True]
    assert has_room(own, 2)
    for name in names:
        with monkeypatch.context() as within:
            within.setattr(module, name, lambda: None)  # somebody else's
            assert has_room(worker, 2)
        assert not has_room(worker, 2)
    monkeypatch.undo()
    assert has_room(worker, 2)


def test_a_buffer_of_one_s_own_that_cannot_be_asked_has_room():
    """It needs no more than what slime's worker puts into it, and what its own functions take from it."""
    assert has_room(SimpleNamespace(output_queue=object(), get_completed_groups=Own().get_completed_groups), 1)


@with_clone
def test_a_worker_that_filters_is_not_bypassed(report):
    """Whose groups are those of odd prompts: a subclass, which is in force as released."""
    for state in ("before", "after", "reverted"):
        assert all(prompt % 2 for step in report[state]["filtered"] for prompt in step)
        assert report[state]["filtered"]


def test_the_condition_is_of_the_groups_that_a_step_leaves(monkeypatch):
    """Nothing is known of a step that waits for more."""
    decisions = []
    monkeypatch.setattr(rlhf_patches, "decided", lambda patch, found: decisions.append(found))
    worker = slimes_worker()
    for number in range(5):
        worker.output_queue.put((number, [f"group {number}"]))
    assert [len(at_most(worker, count)) for count in (2, 3, 1)] == [2, 3, 0]
    assert decisions == [True, False]


def test_what_a_step_takes():
    """In one process, without slime."""
    worker = slimes_worker()
    for number in range(5):
        worker.output_queue.put((number, [f"group {number}"]))
    assert at_most(worker, 2) == [(0, ["group 0"]), (1, ["group 1"])]
    assert at_most(worker, 7) == [(2, ["group 2"]), (3, ["group 3"]), (4, ["group 4"])]
    assert at_most(worker, 1) == at_most(worker, 0) == []
