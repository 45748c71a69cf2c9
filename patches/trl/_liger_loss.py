"""Whether GRPO's loss is Liger's own, called by TRL's own code: what another loss does with its mask is unknown."""

from __future__ import annotations

from typing import Any

from .. import _released

_LIGER = ("liger_kernel",)


def other(trainer: Any) -> str:
    """The first function in place of TRL's ``compute_liger_loss`` or of Liger's loss; empty if none is."""
    replaced = _released.others(trainer, "compute_liger_loss")
    if replaced:
        return replaced
    loss = trainer.liger_grpo_loss
    if not _released.is_released(loss, _LIGER):
        return f"{type(trainer).__name__}.liger_grpo_loss"
    return _released.others(loss, "forward", packages=_LIGER)
