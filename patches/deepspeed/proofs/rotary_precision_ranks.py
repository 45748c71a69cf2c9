"""A step on a long sequence through DeepSpeed's engine, on one rank: ``--out FOLDER [CASE ...]``."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_patches.patches import _rotary_model
from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

NAME = "deepspeed-rotary-precision"
CASES: dict[str, dict[str, Any]] = {
    **{f"bf16, ZeRO-{stage}": {"bf16": True, "stage": stage} for stage in range(4)},
    "fp16, ZeRO-1": {"fp16": True, "stage": 1},
    "float32": {"stage": 1},
    "own code": {"bf16": True, "stage": 1, "remote": True},
}


def outcome(case: dict[str, Any], exact: _rotary_model.Exact) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_grad

    model = _rotary_model.model(case.get("remote", False))
    model.register_buffer("user", torch.full((1,), 0.1), persistent=False)
    precisions: dict[str, Any] = {name: {"enabled": True} for name in ("bf16", "fp16") if case.get(name)}
    if "fp16" in precisions:
        precisions["fp16"]["loss_scale"] = 1.0
    with states.heard() as messages:
        engine = on_cpu.engine(model, {"stage": case["stage"]}, **precisions)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        engine.backward(loss)
        weight = model.model.embed_tokens.weight
        found: torch.Tensor = (
            weight.grad if case["stage"] == 0 and weight.grad is not None else safe_get_full_grad(weight)
        )
        return found

    return {
        **exact.compared(engine, gradient),
        "buffers": _rotary_model.kinds(model),
        "messages": [each for each in messages if NAME in each],
    }


def main() -> None:
    import deepspeed

    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    on_cpu.start()
    # DeepSpeed refuses fp16 on CPUs, where torch computes it.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    exact = _rotary_model.Exact()
    states.report_cases(
        NAME,
        lambda cases: {case: outcome(CASES[case], exact) for case in cases},
        options.cases,
        options.out,
        reverted=options.cases,
    )
