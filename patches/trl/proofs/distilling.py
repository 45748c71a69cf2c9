"""What the proofs of GKD's and GOLD's trainers share: the teacher, a recorded run, and the divergence in float64."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.patches.trl.proofs import small

TEMPLATE = "{% for each in messages %}{{ each['content'] + ' ' }}{% endfor %}"


def teacher() -> Any:
    made = small.model()
    torch.manual_seed(3)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def recorded(trainer: Any) -> tuple[torch.Tensor, list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Train.

    Args:
        trainer: with `kept_gradient.Kept` for an optimizer.

    Returns:
        The gradient of its last step, flattened; this rank's batches as its loss got them, and those of each rank.
    """
    mine: list[dict[str, Any]] = []
    prepare_inputs = trainer._prepare_inputs

    def recording(batch: Any) -> Any:
        """In place of what is called right before the loss, which has what was generated."""
        inputs = prepare_inputs(batch)
        mine.append({name: value.clone() if hasattr(value, "clone") else value for name, value in inputs.items()})
        return inputs

    trainer._prepare_inputs = recording
    random.seed(1)  # by which GKD chooses what is generated
    torch.manual_seed(1)
    trainer.train()
    got = torch.cat([each.flatten() for each in trainer.optimizer.optimizer.found]).double()
    everywhere: list[Any] = [mine]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
    return got, mine, everywhere


def divergences(model: Any, batches: list[dict[str, Any]]) -> tuple[list[torch.Tensor], list[int]]:
    """Jensen and Shannon's, with weight one half, in float64: of each batch the sum over its labels, and their number.

    Args:
        model: the student, in float64.
        batches: as `recorded` has them.
    """
    other, sums, tokens = teacher().double(), [], []
    for batch in batches:
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        counts = batch["labels"][:, 1:] != -100
        ours, theirs = (each(**inputs).logits[:, :-1][counts].softmax(-1) for each in (model, other))
        middle = (ours + theirs) / 2
        sums.append(((ours * (ours / middle).log() + theirs * (theirs / middle).log()) / 2).sum())
        tokens.append(int(counts.sum()))
    return sums, tokens
