"""DeepSpeed's engine on two ranks: the workers of the tests, with an older release side by side."""

from __future__ import annotations

from functools import partial

from cases import proved

from tests.harness.forkserver import beside

NEWER, OLDER = (partial(beside, f"deepspeed-{release}", "deepspeed") for release in ("0.18.9", "0.18.2"))

GROUPS = (
    proved("deepspeed.offload_accumulation", NEWER),
    proved("deepspeed.topk_drops", NEWER),
    proved("deepspeed.pipeline_accumulation", NEWER),
    proved("deepspeed.unscaled_accumulation", OLDER),
)
