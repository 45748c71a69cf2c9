"""The router's loss under real DeepSpeed ZeRO-3, on each of two ranks: ``--out FOLDER``."""

from __future__ import annotations

import importlib
from typing import Any

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.patches.transformers.proofs.router_loss_reentrant_ranks import (
    NAME,
    REENTRANT,
    by_definition,
    loss_of,
    made,
    off,
)
from rlhf_patches.proving import states


def step(family: str) -> dict[str, Any]:
    """The gradient of a step; the ranks have the same rows."""
    from deepspeed.utils import safe_get_full_grad

    model = made(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = on_cpu.engine(model, zero, gradient_clipping=0.0)
    engine.backward(loss_of(engine))
    wanted = by_definition(family)
    found = {
        name: safe_get_full_grad(each).double() for name, each in engine.module.named_parameters() if name in wanted
    }
    engine.destroy()
    return {"gradient": off(found, wanted), "parameters": len(wanted)}


def main() -> None:
    importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    options = states.parser().parse_args()
    on_cpu.start()
    states.report_cases(NAME, lambda names: {name: step(name) for name in names}, ["Mixtral"], options.out)
