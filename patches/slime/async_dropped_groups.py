"""slime's fully asynchronous rollout: surplus finished groups wait for the next step."""

from __future__ import annotations

import queue
import sys
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "slime-async-dropped-groups"
_MODULE = "slime.rollout.fully_async_rollout"
_ROLLOUT = "generate_rollout_fully_async"
_STEP = "_generate_rollout_async"
_WORKER = "_get_global_worker"
_ROOM = "self.output_queue.qsize() < max_concurrent"
_RELEASED_ROOM = 1000


def at_most(worker: Any, count: int) -> list[tuple[int, list[Any]]]:
    """Up to ``count`` of the worker's finished groups, in the order they finished; others stay with the worker.

    A user's function in place of slime's decides itself which groups are finished. The queue of a worker with another
    function of a user's is emptied, as released.
    """
    other = _own(worker)
    if other:
        _released.stays(_NAME, f"{other} is not slime's own", "what a step takes")
        found: list[tuple[int, list[Any]]] = worker.get_completed_groups()
        return found
    taken: list[tuple[int, list[Any]]] = []
    while len(taken) < count:
        try:
            taken.append(worker.output_queue.get_nowait())
        except queue.Empty:
            return taken
    # As released, a step takes all of the queue and drops what it does not need; this call is the step's last.
    rlhf_patches.decided(_NAME, not worker.output_queue.empty())
    return taken


def _own(worker: Any) -> str:
    """The first of a worker's functions that is a user's, which may fill the queue or wait for it; empty if none is."""
    methods = [name for kind in type(worker).__mro__[:-1] for name, found in vars(kind).items() if callable(found)]
    # known: slime's own, from attributes that no decorator copies
    for name in ("get_completed_groups", *methods):
        if _released.written_in(getattr(worker, name, None)) != _MODULE:
            return name
    return ""


def size(worker: Any) -> int:
    """The size of the queue: unbounded; the released size for a worker with a function of a user's."""
    return _RELEASED_ROOM if _own(worker) else 0


def has_room(worker: Any, at_once: int) -> bool:
    """Whether to sample another prompt: not while as many groups wait as are sampled ``at_once``.

    A user's rollout that takes the groups, or calls slime's, may wait for more: as many may wait as released. The same
    holds if a user's buffer cannot be queried.
    """
    if not _taken_by_slimes(worker):
        at_once = max(at_once, _RELEASED_ROOM)
    try:
        waiting: int = worker.output_queue.qsize()
    except Exception:
        return True
    return waiting < at_once


def _taken_by_slimes(worker: Any) -> bool:
    """Whether slime itself calls its own rollout; the number that another rollout waits for is unknown."""
    # known: slime loads the function by this name, and its callees and the worker's functions are slime's own
    return (
        getattr(getattr(worker, "args", None), "rollout_function_path", None) == f"{_MODULE}.{_ROLLOUT}"
        and all(
            _released.written_in(getattr(sys.modules.get(_MODULE), name, None)) == _MODULE
            for name in (_ROLLOUT, _STEP, _WORKER)
        )
        and not _own(worker)
    )


PATCH = Patch(
    name=_NAME,
    summary="the fully asynchronous rollout trains on every sampled group",
    harm="wrong data",
    affects_rollouts=True,
    bug="the fully asynchronous rollout discards finished groups, and their prompts with them",
    when="`--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async`",
    symptom="""\
With `slime.rollout.fully_async_rollout.generate_rollout_fully_async`, most sampled groups are never trained on. An
epoch ends after far fewer steps than it has prompts for, engines are busy, and training waits for them. Of the finished
groups, those of the earliest prompts are kept. No error is raised; `queue_left` in the log is near 0 after each
rollout. More groups are lost if more are sampled at once: `--sglang-server-concurrency` (512) times the engines,
relative to `--rollout-batch-size`.""",
    cause="""\
`_generate_rollout_async` empties the worker's queue, which has all groups that finished since the last step, returns
the first `rollout_batch_size` of them by index, and discards the others. Their prompts were taken from the data source
and do not come again in the epoch. The worker samples on, however many groups wait. When 1000 groups wait, the next one
blocks the event loop of all groups that are being sampled.""",
    repair="""\
A step takes as many groups as it still needs, in the order in which they finished. The others stay in the queue for the
next step. As in upstream's repair (PR 2238), the queue has no bound of its own, and the worker takes no new prompt
while as many groups wait as it samples at once: at most twice that many wait. Within one process, each prompt of the
data source is trained on once, except for those of groups that fail. If there are never more finished groups than a
step needs, nothing changes. Your own rollout that takes groups from slime's worker, or calls slime's rollout, lets up
to 1000 groups wait, as released. So does your own function in place of slime's `_get_global_worker`.

The patch does not repair a resumed run. Groups that wait or are being sampled when a process ends are lost: checkpoints
do not contain them, and slime's data source continues after their prompts.

The patch does not change a worker of yours with any function of its own, and logs one warning: as released, a step may
drop some of its groups, and its queue holds 1000. The patch does not repair the rollout of the examples' folder up to
0.2.4, which is not a module of slime. slime's main branch has the repair and still has version 0.3.1. The patch is
refused there, and not needed.""",
    references=("https://github.com/THUDM/slime/pull/2238", "https://github.com/THUDM/slime/pull/1920"),
    variants=(
        Variant(
            Guard("slime", ">=0.3.0,<=0.3.1"),
            (
                Rewrite(
                    target=f"{_MODULE}:{_STEP}",
                    pattern="worker.get_completed_groups()",
                    alongside=("while len(collected) < target: $$$", "sorted(collected.values(), key=_key)[:target]"),
                    replacement="$AT_MOST(worker, target - len(collected))",
                    uses={"AT_MOST": f"{__name__}:{at_most.__name__}"},
                ),
                Rewrite(
                    target=f"{_MODULE}:AsyncRolloutWorker.__init__",
                    pattern="queue.Queue(maxsize=1000)",
                    replacement="queue.Queue(maxsize=$SIZE(self))",
                    uses={"SIZE": f"{__name__}:{size.__name__}"},
                ),
                Rewrite(
                    target=f"{_MODULE}:AsyncRolloutWorker._loop",
                    pattern="len(active_tasks) < max_concurrent",
                    alongside=("self.data_buffer.get_samples(1)",),
                    unless=(_ROOM,),
                    replacement="len(active_tasks) < max_concurrent and $HAS_ROOM(self, max_concurrent)",
                    uses={"HAS_ROOM": f"{__name__}:{has_room.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest slime in use has the repair: main since August 2026, still with version 0.3.1",
    changes_numbers="""\
0.3.0 and 0.3.1 trained on a selection of the finished groups, those of the earliest prompts, and lost the others. With
the patch, an epoch has more steps, each step starts sooner, and it trains on groups that have waited in the queue. If
far more groups are sampled at once than a step takes (`--sglang-server-concurrency` times the engines, relative to
`--rollout-batch-size`), the groups are as many steps old as the queue holds batches. Lower
`--sglang-server-concurrency` if that is too many. Training can continue from checkpoints.""",
    conditions=(Condition(f"{_MODULE}:{_STEP}"),),
)
