"""Windows of several micro-batches in DeepSpeed's engine, on each of two ranks: ``--out FOLDER STAGE ...``.

As released and with transformers-accumulation-scale and transformers-moe-aux-loss; beside it, in float64, the
same steps from the losses' definitions.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import rlhf_patches
from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.patches.transformers.proofs import accumulation_scale_ranks as small
from rlhf_patches.patches.transformers.proofs.accumulation_scale_ranks import Case
from rlhf_patches.proving import states
from tests.harness import zero3_on_cpu
from tests.patches.transformers import accumulation_scale_ranks as more
from tests.patches.transformers.accumulation_scale_wrapped_ranks import against

KINDS = {
    "T5": small.T5,
    "Llama regression": more.REGRESSION,
    "Llama": more.CAUSAL,
    "Mixtral": more.MIXTURE,
}


def settings(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "deepspeed": on_cpu.of_trainer(stage, small.ROWS),
        "accelerator_config": {"use_configured_state": True},
        "bf16": dtype == "bf16",
    }


def whole(model: Any) -> dict[str, torch.Tensor]:
    """All parameters, those that are partitioned gathered."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([one for one in model.parameters() if hasattr(one, "ds_id")]):
        return {name: one.detach().clone() for name, one in model.named_parameters()}


def step(case: Case) -> dict[str, Any]:
    """Two windows."""
    AcceleratorState._reset_state()  # there is one trainer in a process otherwise
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        unset_hf_deepspeed_config()  # ZeRO-3 would partition what is made
        small.wanted(case)
        model = case.made()
        start = whole(model)
        trainer = small.InOrder(model=model, args=small.arguments_of(case, folder), train_dataset=case.rows())
        trainer.train()
        end = whole(model)
    return {
        "logged": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        **against(case, start, end),
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("stages", nargs="+", metavar="STAGE", help="1, 2, 3 or with bf16: 3-bf16")
    options = parser.parse_args()
    zero3_on_cpu.start()
    cases = {
        f"{stage}: {name}": Case(kind, 3, 5, rate=0.1, arguments=settings(int(stage[0]), stage[2:]))
        for stage in options.stages
        for name, kind in KINDS.items()
        if not (name == "T5" and "bf16" in stage)  # whose weights are too large for what a step changes of them
    }
    gc.freeze()
    found: dict[str, Any] = {"before": {name: step(case) for name, case in cases.items()}}
    report = rlhf_patches.apply(only=(small.NAME, small.ROUTERS))
    found["status"] = {name: report[name].status.value for name in (small.NAME, small.ROUTERS)}
    found["after"] = {name: step(case) for name, case in cases.items()}
    (options.out / f"rank{small.RANK}.json").write_text(json.dumps(found, indent=1))
