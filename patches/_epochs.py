"""The epoch in which a resumed trainer's loop continues."""

from __future__ import annotations

import sys
from typing import Any

import rlhf_patches

_SAMPLERS = ("torch.utils.data.sampler", "torch.utils.data.distributed", "torchdata.stateful_dataloader.sampler")


def to_continue(patch: str, epoch: int, step: int, loader: Any, *, finished: bool) -> int:
    """The epoch whose batches the loader yields next: the one before ``epoch`` if the loader is at its end.

    A checkpoint that is written in the loop's last step of an epoch has a loader that has yielded all batches of the
    epoch, and has not been asked for another one. The loader's next iteration ends that epoch.

    Args:
        patch: the patch's name.
        epoch: the number of epochs in ``step``, as the release computes it.
        step: the number of steps so far, each of one batch.
        loader: of the training data.
        finished: whether the run has no step left.
    """
    if finished or epoch < 1 or step != epoch * len(loader):
        rlhf_patches.decided(patch, False)
        return epoch
    left = _left(loader)
    if left is None:
        return epoch
    rlhf_patches.decided(patch, left == 0)
    return epoch - 1 if left == 0 else epoch


def _left(loader: Any) -> int | None:
    """How many batches of its epoch a loader has left, by the state that its next iteration continues from.

    None if that is unknown: for another loader, or another state. All, if the next iteration begins an epoch.
    """
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    if torchdata is None or type(loader) is not torchdata.StatefulDataLoader:
        return None
    if not (_is_known(loader.sampler) and _is_known(loader.batch_sampler)):
        return None
    state = vars(loader).get("next_iter_state")
    if state is None or (isinstance(state, dict) and state.get("_iterator_finished")):
        return len(loader)
    if not isinstance(state, dict):
        return None
    snapshot = state.get("_snapshot")
    if isinstance(snapshot, dict):  # with worker processes: the batches before a snapshot, and since then
        yielded, since = snapshot.get("_snapshot_step"), state.get("_steps_since_snapshot")
    else:
        yielded, since = state.get("_num_yielded"), 0
    return len(loader) - yielded - since if isinstance(yielded, int) and isinstance(since, int) else None


def _is_known(sampler: Any) -> bool:
    """Whether a sampler is torch's or torchdata's own, and those that it draws from are.

    Another one may begin a new order in the iteration that continues from the state.
    """
    kind = type(sampler)
    # known: the name only finds the class in torch's module, which has to be this very object
    if not any(getattr(sys.modules.get(name), kind.__name__, None) is kind for name in _SAMPLERS):
        return False
    inner = vars(sampler).get("sampler")
    return inner is None or _is_known(inner)
