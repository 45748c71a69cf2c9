"""The proof's worker of trl-sft-label-smoothing with all that a loss from logits, or not from them, may be."""

from __future__ import annotations

import functools
from typing import Any

import peft
import torch
from transformers import Qwen2ForCausalLM

from rlhf_patches.patches.trl.proofs import sft_label_smoothing_ranks as worker
from rlhf_patches.patches.trl.proofs import small

step = worker.step


class Own(Qwen2ForCausalLM):
    """Whose labels transformers smooths without a shift."""


def mine() -> Any:
    model = small.model()
    model.__class__ = Own
    return model


def virtual() -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(small.model(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def adapted() -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(small.model(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))


def compiled() -> dict[str, Any]:
    return step(torch_compile=True, torch_compile_backend="eager")


CASES = {
    "smoothed": step,
    "own function": functools.partial(step, smoothing=0.0, function=worker.own),
    "LoRA": functools.partial(step, adapted),
    "smoothed, nll": functools.partial(step, loss_type="nll"),
    "own function, nll": functools.partial(step, smoothing=0.0, function=worker.own, loss_type="nll"),
    "LoRA, nll": functools.partial(step, adapted, loss_type="nll"),
    "chunked": functools.partial(step, smoothing=0.0),
    "own class": functools.partial(step, mine),
    "prefix tuning": functools.partial(step, virtual),
    "compiled": compiled,
}


def main() -> None:
    worker.main(CASES)
