"""A step under reentrant checkpointing in real DeepSpeed ZeRO-3, on each of two ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks import REENTRANT, off


def step(proof: ModuleType, family: str) -> dict[str, Any]:
    """How far the step's gradient is from that of the proof's definition; the ranks have the same rows."""
    from deepspeed.utils import safe_get_full_grad

    model = proof.made(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = on_cpu.engine(model, zero, gradient_clipping=0.0)
    engine.backward(proof.loss_of(engine))
    wanted = proof.by_definition(family)
    found = {
        name: safe_get_full_grad(each).double() for name, each in engine.module.named_parameters() if name in wanted
    }
    engine.destroy()
    return {"gradient": off(found, wanted), "parameters": len(wanted)}
