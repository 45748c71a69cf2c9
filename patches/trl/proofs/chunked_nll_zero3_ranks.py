"""TRL's losses in chunks, of a head that real DeepSpeed ZeRO-3 has partitioned: ``--out FOLDER nll|divergence``.

On each of two ranks that have as many tokens, where a release raises; with unlike numbers it would wait forever. Before
apply() of trl-chunked-nll-zero3 or trl-chunked-divergence-zero3, after it, and after revert(): the gradients, and by
the definition in float64.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

BATCH, LENGTH, HIDDEN, VOCABULARY, CHUNK, TOKENS = 2, 33, 16, 99, 8, 40
BETA, SCALE, TEMPERATURE = 0.3, 0.5, 1.5


def make_head(seed: int) -> torch.nn.Linear:
    """The same on both ranks."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.3)
    return head


def partitioned(head: torch.nn.Linear) -> torch.nn.Linear:
    """As ZeRO-3 keeps it."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=head, config_dict_or_path=config, dtype=head.weight.dtype)
    return head


def make_inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and labels of this rank's tokens that count, which are scattered; the first column has none."""
    generator = torch.Generator().manual_seed(100 + rank)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator)
    values = torch.full((BATCH * (LENGTH - 1),), -100)
    where = torch.randperm(len(values), generator=generator)[:TOKENS]
    values[where] = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels = torch.full((BATCH, LENGTH), -100)
    labels[:, 1:] = values.view(BATCH, LENGTH - 1)
    return hidden, labels


def likelihood(hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    """SFT's loss, by TRL."""
    trainer: Any = importlib.import_module("trl.trainer.sft_trainer")
    loss: torch.Tensor = trainer._chunked_cross_entropy_loss(hidden, head.weight, CHUNK, labels=labels)[0]
    return loss


def exact_likelihood(hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens, of all logits at once."""
    counted = labels[:, 1:] != -100
    found = head(hidden)[:, :-1].log_softmax(-1)
    return -found.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0][counted].mean()


def divergence(hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    """Distillation's loss, by TRL."""
    trainer: Any = importlib.import_module("trl.trainer.distillation_trainer")
    teacher = partitioned(make_head(8).requires_grad_(False))
    loss: torch.Tensor = trainer._chunked_divergence_loss(
        hidden,
        hidden.detach(),
        head.weight,
        teacher.weight,
        labels != -100,
        BETA,
        CHUNK,
        student_logit_scale=SCALE,
        temperature=TEMPERATURE,
    )[0]
    return loss


def exact_divergence(hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    """The Jensen-Shannon divergence of student and teacher, the mean over the tokens."""
    ours = (head(hidden) * SCALE / TEMPERATURE).softmax(-1)
    theirs = (make_head(8).double()(hidden.detach()) / TEMPERATURE).softmax(-1).detach()
    middle = (1 - BETA) * ours + BETA * theirs
    terms = BETA * theirs * (theirs / middle).log() + (1 - BETA) * ours * (ours / middle).log()
    return terms.sum(-1)[labels != -100].mean()


Loss = Callable[[torch.Tensor, torch.nn.Linear, torch.Tensor], torch.Tensor]
LOSSES: dict[str, tuple[str, Loss, Loss]] = {
    "nll": ("trl-chunked-nll-zero3", likelihood, exact_likelihood),
    "divergence": ("trl-chunked-divergence-zero3", divergence, exact_divergence),
}


def gradients(
    loss: Loss, head: torch.nn.Linear, hidden: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the head and of the hidden states."""
    hidden = hidden.clone().requires_grad_()
    loss(hidden, head, labels).backward()
    assert head.weight.grad is not None
    assert hidden.grad is not None
    return head.weight.grad, hidden.grad


def observe(rank: int, loss: Loss, exact: Loss) -> dict[str, Any]:
    """How far the gradients are off, or what was raised."""
    from transformers.integrations import deepspeed as integration

    config = integration.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    hidden, labels = make_inputs(rank)
    try:
        found = gradients(loss, partitioned(make_head(7)), hidden, labels)
    except RuntimeError as error:
        return {"raised": str(error)}
    finally:
        integration.unset_hf_deepspeed_config()
        del config
    wanted = gradients(exact, make_head(7).double(), hidden.double(), labels)
    return {
        "raised": None,
        "error": max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)),
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("loss", choices=LOSSES)
    options = parser.parse_args()
    rank = on_cpu.start()
    name, loss, exact = LOSSES[options.loss]
    states.report(name, lambda: observe(rank, loss, exact), options.out)
