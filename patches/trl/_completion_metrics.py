"""Online DPO's sums over completions, without the padding after their ends."""

from __future__ import annotations

from typing import Any

import rlhf_patches

_NAME = "trl-online-dpo-metrics"


def difference(values: Any, padding: Any) -> Any:
    """The policy's log-probabilities minus the reference's: 0 where there is padding."""
    rlhf_patches.decided(_NAME, bool(padding.any()))
    return without(values, padding)


def without(values: Any, padding: Any) -> Any:
    """Log-probabilities of completions: 0 where there is padding."""
    return values.masked_fill(padding, 0)
