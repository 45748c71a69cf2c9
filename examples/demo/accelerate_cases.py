"""A loop with accelerate that is resumed in its second epoch, on an older release."""

from __future__ import annotations

from cases import proved

from tests.harness.forkserver import TORCH, Level
from tests.harness.side_by_side import folder

GROUPS = (
    proved(
        "accelerate.resume_order",
        lambda: (*TORCH, Level("tests.harness.loading:accelerate", str(folder("accelerate-1.13")))),
    ),
)
