"""A loop with accelerate that is resumed in its second epoch, on an older release."""

from __future__ import annotations

from cases import proved

from tests.harness.side_by_side import folder
from tests.harness.warm import TORCH, Level

GROUPS = (
    proved(
        "accelerate.resume_order",
        lambda: (*TORCH, Level("tests.harness.loading:accelerate", str(folder("accelerate-1.13")))),
    ),
)
