"""slime's own fully asynchronous rollout of one tag: before, after, and reverted.

``--out FOLDER`` on one rank, with slime's files on sys.path. The worker, its thread, its loop and the rollout are
slime's; what stands for the engines answers at once.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rlhf_patches.proving import states
from tests.harness import slime_clone

slime_clone.install()

NAME = "slime-async-dropped-groups"
AT_ONCE, A_STEP, STEPS, PROMPTS = 8, 3, 5, 60
MANY = 1100
"""More than the released queue has room for."""
TIMEOUT = 20.0

slime: Any = importlib.import_module("slime.rollout.fully_async_rollout")
Sample: Any = importlib.import_module("slime.utils.types").Sample


class Prompts:
    """A data source: each prompt once."""

    def __init__(self, count: int):
        self.left = list(range(count))
        self.taken: list[int] = []
        self.given_back: list[int] = []

    def get_samples(self, number: int) -> list[list[Any]]:
        taken, self.left = self.left[:number], self.left[number:]
        self.taken += taken
        return [[Sample(index=2 * one), Sample(index=2 * one + 1)] for one in taken]

    def add_samples(self, groups: list[list[Any]]) -> None:
        self.given_back += [prompt_of(group) for group in groups]


def prompt_of(group: list[Any]) -> int:
    return int(group[0].index) // 2


class Engines:
    """In place of ``generate_and_rm_group``: who is sampled, of whom some are aborted, and some fail."""

    def __init__(self, aborted: tuple[int, ...] = (), failing: tuple[int, ...] = (), reverse: bool = False):
        self.aborted, self.failing, self.reverse = aborted, failing, reverse

    async def __call__(self, args: Any, group: list[Any], sampling_params: Any, evaluation: bool) -> list[Any]:
        prompt = prompt_of(group)
        if self.reverse:  # the last of those that are sampled at once is finished first
            await asyncio.sleep(0.02 * (AT_ONCE - prompt % AT_ONCE))
        if prompt in self.failing:
            raise RuntimeError("of the engine")
        status = Sample.Status.ABORTED if prompt in self.aborted else Sample.Status.COMPLETED
        for sample in group:
            sample.status = status
        return group


def until(true: Callable[[], bool], limit: float = TIMEOUT) -> bool:
    end = time.monotonic() + limit
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


class Run:
    """A worker of slime's with its thread, as its ``_get_global_worker`` starts it."""

    def __init__(self, at_once: int, prompts: int, **engines: Any):
        quick = types.ModuleType("asyncio")
        quick.__dict__.update(vars(asyncio))
        quick.sleep = lambda delay: asyncio.sleep(delay / 50)  # type: ignore[attr-defined]
        slime.asyncio, slime.generate_and_rm_group = quick, Engines(**engines)
        slime.GenerateState = lambda args: SimpleNamespace(sampling_params={})
        slime.get_rollout_num_engines = lambda args: 1
        slime._global_worker = None
        self.args = SimpleNamespace(
            rollout_function_path="slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            rollout_global_dataset=True,
            rollout_batch_size=A_STEP,
            sglang_server_concurrency=at_once,
            rollout_num_gpus=1,
            rollout_num_gpus_per_engine=1,
        )
        self.source = Prompts(prompts)
        self.worker = slime._get_global_worker(self.args, self.source)

    def step(self, number: int) -> list[int]:
        groups = slime.generate_rollout_fully_async(self.args, number, self.source)
        assert all(sample.status == Sample.Status.COMPLETED for group in groups for sample in group)
        return [prompt_of(group) for group in groups]

    def end(self) -> list[int]:
        """What waits when all that was taken is finished."""
        self.worker.running = False
        left: list[int] = []
        while self.worker.worker_thread.is_alive():
            left += [prompt_of(group) for _, group in self.worker.get_completed_groups()]
            time.sleep(0.01)
        return left + [prompt_of(group) for _, group in self.worker.get_completed_groups()]


def steps(**engines: Any) -> dict[str, Any]:
    """Training that takes long: before each step, as many groups wait as are sampled at once."""
    run = Run(AT_ONCE, PROMPTS, **engines)
    trained = []
    for number in range(STEPS):
        assert until(lambda: run.worker.queue_size() >= AT_ONCE or not run.source.left)
        trained.append(run.step(number))
    waiting = run.end()
    kept = [*itertools.chain(*trained), *waiting, *run.source.given_back]
    return {
        "trained": trained,
        "waiting": waiting,
        "given back": run.source.given_back,
        "lost": sorted(set(run.source.taken) - set(kept)),
        "twice": len(kept) - len(set(kept)),
    }


def unasked() -> dict[str, Any]:
    """Nobody takes anything after the first step."""
    run = Run(AT_ONCE, PROMPTS)
    taken = run.step(0)
    until(lambda: run.worker.queue_size() > 2 * AT_ONCE, limit=1)
    waiting = run.worker.queue_size()
    return {"waiting": waiting, "all the same": sorted([*taken, *run.end()]) == run.source.taken}


def awaited() -> int:
    """A rollout of a user's waits until more are finished than are sampled at once."""
    run = Run(AT_ONCE, PROMPTS)
    run.args.rollout_function_path = "users.rollout"
    until(lambda: run.worker.queue_size() >= 3 * AT_ONCE, limit=2)
    return len(run.end())


def awaited_then_taken() -> list[bool]:
    """A rollout of a user's which does so, and then calls slime's own."""
    run = Run(AT_ONCE, PROMPTS)
    run.args.rollout_function_path = "users.rollout"
    found = []
    for number in range(2):
        found.append(until(lambda: run.worker.queue_size() >= 2 * AT_ONCE, limit=2))
        run.step(number)
    run.end()
    return found


def awaited_by_its_own_step() -> list[int]:
    """A user's in the place of what slime's rollout calls: of three times as many as are sampled at once."""
    real = slime._generate_rollout_async

    async def own(args: Any, rollout_id: int, data_buffer: Any) -> list[list[Any]]:
        worker = slime._get_global_worker(args, data_buffer)
        end = time.monotonic() + 2
        while worker.queue_size() < 3 * AT_ONCE and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return [group for _, group in worker.get_completed_groups()][: 3 * AT_ONCE]

    slime._generate_rollout_async = own
    try:
        run = Run(AT_ONCE, PROMPTS)
        found = run.step(0)
        run.end()
    finally:
        slime._generate_rollout_async = real
    return found


def full() -> dict[str, int]:
    """A user's worker gives back what the queue has no room for."""
    real = slime.AsyncRolloutWorker

    class Own(real):  # type: ignore[misc, valid-type]
        def _make_done_cb(self, gid: int) -> Any:
            def done(task: Any) -> None:
                if self.output_queue.full():
                    self.data_buffer.add_samples([task.result()])
                else:
                    self.output_queue.put((gid, task.result()))

            return done

    slime.AsyncRolloutWorker = Own
    try:
        run = Run(MANY, MANY)
        until(lambda: run.worker.queue_size() + len(run.source.given_back) == MANY)
        found = {"waiting": run.worker.queue_size(), "given back": len(run.source.given_back)}
        run.end()
    finally:
        slime.AsyncRolloutWorker = real
    return found


def many() -> dict[str, Any]:
    """More are finished at once than the released queue holds: does the loop of the worker's thread go on?"""
    run = Run(MANY, MANY)
    full = until(lambda: run.worker.queue_size() >= 1000)
    goes_on = until(lambda: run.worker.queue_size() == MANY, limit=1)
    return {"full": full, "goes on": goes_on, "in all": len(run.end())}


def few() -> list[int]:
    """As many as a step takes."""
    run = Run(A_STEP, A_STEP)
    found = run.step(0)
    assert run.end() == []
    return found


def filtered() -> list[list[int]]:
    """With a worker of a user's, which gives the groups of odd prompts alone."""
    real = slime.AsyncRolloutWorker

    class Own(real):  # type: ignore[misc, valid-type]
        def get_completed_groups(self) -> Any:
            return [each for each in super().get_completed_groups() if prompt_of(each[1]) % 2]

    slime.AsyncRolloutWorker = Own
    try:
        run = Run(AT_ONCE, PROMPTS)
        assert until(lambda: run.worker.queue_size() >= AT_ONCE)
        found = [run.step(number) for number in range(2)]
        run.end()
    finally:
        slime.AsyncRolloutWorker = real
    return found


def observe() -> dict[str, Any]:
    return {
        "steps": steps(),
        "others": steps(aborted=(1, 4, 9), failing=(2,)),
        "reversed": steps(reverse=True),
        "unasked": unasked(),
        "awaited": awaited(),
        "awaited then taken": awaited_then_taken(),
        "awaited by its own step": awaited_by_its_own_step(),
        "full": full(),
        "many": many(),
        "few": few(),
        "filtered": filtered(),
    }


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
