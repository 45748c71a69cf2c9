"""slime's fully asynchronous rollout: groups that are finished before they are asked for wait for the next step."""

from __future__ import annotations

import queue
import sys
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "slime-async-dropped-groups"
_MODULE = "slime.rollout.fully_async_rollout"
_ROLLOUT = "generate_rollout_fully_async"
_STEP = "_generate_rollout_async"
_QUEUE = ("get_completed_groups", "_loop", "_make_done_cb")
_ROOM = "self.output_queue.qsize() < max_concurrent"
_RELEASED_ROOM = 1000


def at_most(worker: Any, count: int) -> list[tuple[int, list[Any]]]:
    """Up to ``count`` of the worker's finished groups, those that were finished first; the others stay with it.

    What a function of the user's own, in place of slime's, says that is finished, it says itself; and the queue of one
    that fills it in a way of his own is emptied, as released.
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
            break
    return taken


def _own(worker: Any) -> str:
    """What of that which fills and empties the queue is a user's; empty where all is slime's."""
    # known: slime's own, by what no decorator copies
    return next((name for name in _QUEUE if _released.written_in(getattr(worker, name, None)) != _MODULE), "")


def size(worker: Any) -> int:
    """Of the queue: without a bound; the released one for a worker that fills or empties it in a way of its own."""
    return _RELEASED_ROOM if _own(worker) else 0


def has_room(worker: Any, at_once: int) -> bool:
    """Whether another prompt is to be sampled: not while as many groups wait as are sampled ``at_once``.

    Who takes them by a rollout of his own, or calls slime's from it, may wait for more: there as many may wait as
    released. So it is where a buffer of his own cannot be asked.
    """
    if not _taken_by_slimes(worker):
        at_once = max(at_once, _RELEASED_ROOM)
    try:
        waiting: int = worker.output_queue.qsize()
    except Exception:
        return True
    return waiting < at_once


def _taken_by_slimes(worker: Any) -> bool:
    """Whether slime itself calls its own rollout: of another one it is not known for how many it waits."""
    # known: slime loads the function by this name, and what that calls and takes from the worker is slime's own
    return (
        getattr(getattr(worker, "args", None), "rollout_function_path", None) == f"{_MODULE}.{_ROLLOUT}"
        and all(
            _released.written_in(getattr(sys.modules.get(_MODULE), name, None)) == _MODULE for name in (_ROLLOUT, _STEP)
        )
        and not _own(worker)
    )


PATCH = Patch(
    name=_NAME,
    summary="the fully asynchronous rollout trains on every group that it has sampled",
    harm="wrong data",
    affects_rollouts=True,
    bug="the fully asynchronous rollout throws away groups that are finished, and their prompts with them",
    when="`--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async`",
    symptom="""\
With `slime.rollout.fully_async_rollout.generate_rollout_fully_async` most of what is sampled is never trained on: an
epoch is over after far fewer steps than it has prompts for, engines are busy and training waits for them. Of the groups
that were ready, those of the earliest prompts are kept. No error; `queue_left` in the log is near 0 after each
rollout. It is the more, the more groups are sampled at once: `--sglang-server-concurrency` (512) times the engines,
against `--rollout-batch-size`.""",
    cause="""\
`_generate_rollout_async` empties the worker's queue, which has all groups that were finished since the last step,
returns the first `rollout_batch_size` of them by index, and lets go of the others. Their prompts have been taken from
the data source, and do not come again in the epoch. The worker goes on sampling, whatever waits, and where 1000 groups
do, its next one blocks the event loop of all that are being sampled.""",
    repair="""\
A step takes as many groups as it is short of, those that were finished first; the others stay in the queue for the next
one. As in upstream's repair (PR 2238) the queue has no bound of its own, and the worker takes no new prompt while as
many groups wait as it samples at once: at most twice that many wait. So, within one process, each prompt of the data
source is trained on once, but for those of groups that fail. Where never more groups are finished than are asked for,
nothing changes. A rollout of yours that takes them from slime's worker, or calls slime's, may wait for 1000, as
released.

Not repaired: a run that is resumed. Groups that wait or are sampled when a process ends are lost: checkpoints have none
of them, and slime's data source goes on after their prompts.

Left alone, with one line: a worker of yours with a `get_completed_groups`, a `_loop` or a `_make_done_cb` of its own,
all of whose groups a step takes and may drop, and whose queue holds 1000, as released. Left alone as well: the rollout
of the examples' folder up to 0.2.4, which is no module of slime's. main has been repaired since, and calls itself 0.3.1
all the same: there the patch is refused, because the code is not that of 0.3.1, and is not needed.""",
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
    obsolete_when="when the oldest slime in use has it: main since August 2026, which still calls itself 0.3.1",
    changes_numbers="""\
0.3.0 and 0.3.1 trained on a choice of what was ready, those of the earliest prompts, and lost the others. With the
patch a run takes more steps for an epoch, each sooner, and on groups that have waited in the queue: where far more are
sampled at once than a step takes (`--sglang-server-concurrency` times the engines against `--rollout-batch-size`), they
were sampled by the weights of as many steps before as it holds batches. Lower `--sglang-server-concurrency` where that
is too many. Checkpoints can be trained on.""",
)
