"""verl's value loss in a loss of a user's own, who has met the bug: ``--out FOLDER``, on one rank."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

from rlhf_patches.patches.verl.proofs import critic_loss_scale_ranks as worker
from rlhf_patches.proving import states

SHARE = 0.5
"""Of the mini-batch, what a micro-batch has."""


def observe() -> dict[str, Any]:
    from verl.utils.profiler import performance
    from verl.workers.utils import losses

    released = losses.value_loss

    def own(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        loss, metrics = released(*args, **kwargs)
        return loss * SHARE, metrics

    logged = performance.GPUMemoryLogger("critic", logging.getLogger(__name__))(released)

    def around_a_decorator(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        loss, metrics = logged(*args, **kwargs)
        return loss * SHARE, metrics

    rows = len(worker.PROMPTS)
    tokens = int(worker.make_rows(worker.CASES["four"])["response_mask"].sum())
    numbers = {"dp_size": 1, "batch_num_tokens": int(tokens / SHARE), "global_batch_size": int(rows / SHARE)}
    found = {}
    for loss in (own, around_a_decorator):
        with mock.patch.object(losses, "value_loss", loss):
            found[loss.__name__] = worker.by_hand("token-mean", **numbers)
    return found


def main() -> None:
    worker.on_cpu()
    states.report(worker.PATCH, observe, states.parser().parse_args().out)
