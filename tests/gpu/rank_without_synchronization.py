"""As `rlhf_patches/proving/rank.py`, where what waits for the GPU while a condition is told raises."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_patches.engine import reached
from rlhf_patches.proving import rank


def without_waiting(self: Any, *arguments: Any) -> None:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if self._probe.predicate is not None:
            self._probe.predicate(*arguments)
        ASK(self, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode(before)


ASK = reached._Asked.__call__

if __name__ == "__main__":
    assert torch.cuda.is_available()
    reached._Asked.__call__ = without_waiting  # type: ignore[method-assign]
    rank.main()
