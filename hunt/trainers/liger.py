"""Trainers with Liger's fused last layer and loss, interpreted by Triton."""

from __future__ import annotations

from typing import Any

from hunt.outcomes import Outcome
from hunt.trainers import trainer, transformers, trl_sft

TAKES = {"micro_batch", "accumulation", "rows", "steps"}


@trainer("liger/llama", "liger/mixtral", "liger/sft", takes=TAKES)
def fused(*, name: str, liger: bool = True, **settings: Any) -> Outcome:
    run = trl_sft.sft if name == "sft" else transformers.heads
    return run(name=name, liger=liger, **settings)
