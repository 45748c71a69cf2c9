"""One step of small mixtures of experts by ``Trainer``, on each of two ranks: ``--out FOLDER``.

Each case before apply() of transformers-moe-aux-loss, after it, and after revert(). The reference is the loss from its
definition, in float64.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from rlhf_patches.proving import states

NAME = "transformers-moe-aux-loss"
RANKS, ROWS, LENGTH, COEFFICIENT = 2, 2, 8, 0.5
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "attn_implementation": "eager",
}
MIXTURE = {"num_experts_per_tok": 2, "output_router_logits": True, "experts_implementation": "eager"}


def qwen3_moe() -> Any:
    config = Qwen3MoeConfig(
        **SIZES, **MIXTURE, num_experts=4, moe_intermediate_size=8, router_aux_loss_coef=COEFFICIENT
    )
    return Qwen3MoeForCausalLM(config)


def dense() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def rows(rank: int) -> list[dict[str, torch.Tensor]]:
    """A rank's batch; the ranks have different numbers of predicted tokens."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for row in range(ROWS):
        ids = torch.randint(32, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: 1 + row + 3 * rank] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


class Observed(Trainer):
    """Runs the ranks in order, and records its losses, as a subclass would."""

    loss = 0.0
    outputs_loss = 0.0

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(range(RANKS * ROWS))

    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)
        self.loss, self.outputs_loss = loss.item(), outputs.get("loss", loss).item()
        return (loss, outputs) if return_outputs else loss


class Gradients(TrainerCallback):
    """The gradients that the optimizer receives."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.found = {
            name.removeprefix("module."): p.grad.double().cpu()
            for name, p in model.named_parameters()
            if p.grad is not None
        }


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def wanted(make: Callable[[], Any], coefficient: float) -> tuple[float, dict[str, torch.Tensor]]:
    """In float64, not sharded: this rank's part of the loss, and the gradients of the mean over the ranks."""
    model = made(make).double()
    model.train()
    batches = [torch.utils.data.default_collate(rows(rank)) for rank in range(RANKS)]
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    parts = []
    for batch in batches:
        given = {key: batch[key] for key in ("input_ids", "attention_mask")}
        outputs = model(**given)
        cross_entropy = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        auxiliary = outputs.get("aux_loss")
        parts.append(RANKS * cross_entropy / tokens + (0 if auxiliary is None else coefficient * auxiliary))
    torch.stack(parts).mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(parts[torch.distributed.get_rank()]), gradients


def one(
    make: Callable[[], Any], arguments: dict[str, Any] | None = None, evaluate: bool = False, **more: Any
) -> dict[str, Any]:
    """A step, compared with the reference."""
    gradients = Gradients()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        trainer = Observed(
            model=made(make),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=not torch.cuda.is_available(),
                ddp_backend="gloo",
                per_device_train_batch_size=ROWS,
                per_device_eval_batch_size=ROWS,
                max_steps=1,
                max_grad_norm=0.0,
                optim="sgd",
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                **(arguments or {}),
            ),
            train_dataset=[row for rank in range(RANKS) for row in rows(rank)],
            eval_dataset=[row for rank in range(RANKS) for row in rows(rank)],
            callbacks=[gradients],
            **more,
        )
        logged = trainer.evaluate()["eval_loss"] if evaluate else None
        if not evaluate:
            trainer.train()
    loss, right = wanted(make, COEFFICIENT)
    routers = {name for name in right if "gate.weight" in name or "router" in name}
    return {
        "loss": trainer.loss,
        "outputs' loss": trainer.outputs_loss,
        "wanted": loss,
        "logged": logged,
        "routers": len(routers),
        "off by": {
            name: float((gradients.found[name] - right[name]).norm() / right[name].norm())
            for name in sorted(right)
            if name in gradients.found and float(right[name].norm()) > 0
        },
        "bits": {name: float(gradient.norm()).hex() for name, gradient in gradients.found.items()},
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {"Qwen3-MoE": lambda: one(qwen3_moe)}


def main(cases: dict[str, Callable[[], dict[str, Any]]] = CASES) -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(cases))
    options = parser.parse_args()
    states.report_cases(NAME, lambda names: {name: cases[name]() for name in names}, options.cases, options.out)
