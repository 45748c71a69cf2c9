"""Evaluations of small models by ``Trainer``, on each of one or two ranks: ``--out FOLDER [CASE ...]``.

As the proof of transformers-eval-loss: more models, losses and Trainers, those included that count by themselves.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, Trainer

import rlhf_patches
from rlhf_patches.patches.transformers import _batch_counts
from rlhf_patches.patches.transformers.proofs import eval_loss_ranks
from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import (
    NAME,
    SMOOTHING,
    VOCABULARY,
    Collator,
    bits,
    of_shifted,
    one,
    rows,
    smoothed,
    trainer,
    wanted,
)
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import COEFFICIENT, dense, qwen3_moe
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import NAME as MIXTURES
from rlhf_patches.testing import untouched


def t5() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


def classifier() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=16, num_labels=3)
    )


def of_tokens(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def of_classes(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits, labels)


def with_router(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return of_shifted(outputs, labels) + COEFFICIENT * outputs.aux_loss


def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of one's own, of the logits of each token that is to be predicted."""
    kept = labels[:, 1:] != -100
    each = outputs["logits"][:, :-1].square().mean(-1)[kept]
    return each.mean() if num_items_in_batch is None else each.sum() / num_items_in_batch


class PassesOn(Trainer):
    """As TRL's SFTTrainer does."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class ByItself(Trainer):
    """With a loss that it scales itself, by the count over all ranks."""

    counts: list[float]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.counts = [*getattr(self, "counts", []), float(num_items_in_batch)]
        outputs = model(**inputs)
        loss = squared(outputs, inputs["labels"], num_items_in_batch) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Weighs(Trainer):
    """Multiplies by the count over all ranks what was divided by it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not model.training:
            loss = loss * num_items_in_batch / self.args.world_size / 10
        return (loss, outputs) if return_outputs else loss


class Divides(Trainer):
    """A way round the bug, where the model does not use the count."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss / self.args.world_size, logits, labels


class WithoutCount(Trainer):
    """As trainers do that were written before there was one."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


class OfAnother(Trainer):
    """With another count than it was given."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch * 2)


class CountsOthers(Trainer):
    """Has the trainer count what it has made of the batches."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return super()._get_num_items_in_batch([dict(batch) for batch in batch_samples], device)


class CountsItself(Trainer):
    """Over all ranks."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return self.accelerator.gather(sum(batch["labels"].ne(-100).sum() for batch in batch_samples)).sum()


class Raises(Trainer):
    """Out of the second evaluation step."""

    steps = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps > 1:
            raise ValueError("no loss")
        return super().compute_loss(*args, **kwargs)


class InParallel(Trainer):
    """The ranks have a model in common, and so the same batches."""

    def get_tp_size(self) -> int:
        return int(self.args.world_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return torch.utils.data.DataLoader(self.eval_dataset, 2, collate_fn=self.data_collator)


def predicting() -> dict[str, Any]:
    """A prediction; 3 of 4 samples count in the last step."""
    with trainer(t5, [], 1) as evaluating:
        found = evaluating.predict(rows(3, "tokens"))
    return {"loss": found.metrics["test_loss"], "predictions": bits([found.predictions[0], found.label_ids])}


def training() -> dict[str, Any]:
    """Four steps of two micro-batches, with an evaluation after each."""
    data = rows(7, "tokens")
    between = {"max_steps": 4, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    with trainer(
        dense, data, 1, arguments={**between, "optim": "sgd", "learning_rate": 0.1, "logging_steps": 1}
    ) as evaluating:
        evaluating.train()
        logged = evaluating.state.log_history
        return {
            "parameters": bits(p.detach() for p in evaluating.model.parameters()),
            "losses": [float(each["loss"]).hex() for each in logged if "loss" in each],
            "gradients": [float(each["grad_norm"]).hex() for each in logged if "grad_norm" in each],
            "evaluated": [each["eval_loss"] for each in logged if "eval_loss" in each],
        }


def asked() -> dict[str, Any]:
    """``compute_loss`` asked for by somebody else, with the count over all ranks: also between evaluation steps."""
    data = rows(4, "tokens")
    with trainer(dense, data, 2) as evaluating, torch.no_grad():
        inputs = Collator()(data[:2])
        count = evaluating._get_num_items_in_batch([inputs], evaluating.args.device)
        of_count = evaluating.compute_loss(evaluating.model, dict(inputs), num_items_in_batch=count)
        of_another = evaluating.compute_loss(evaluating.model, dict(inputs), num_items_in_batch=torch.tensor(7))
        of_number = evaluating.compute_loss(evaluating.model, dict(inputs), num_items_in_batch=7)
        of_none = evaluating.compute_loss(evaluating.model, dict(inputs))
        touched = ""
        try:
            with untouched(evaluating):
                evaluating.prediction_step(evaluating.model, dict(inputs), True)
        except AssertionError as found:
            touched = str(found)
    return {"losses": [float(each).hex() for each in (of_count, of_another, of_number, of_none)], "touched": touched}


def raising() -> dict[str, Any]:
    """An evaluation that ends with an exception, on every rank; then one that does not."""
    with contextlib.suppress(ValueError):
        one(dense, of_shifted, 4, 1, of=Raises)
    return one(dense, of_shifted, 3, 1)


def in_parallel() -> dict[str, Any]:
    """Of tensor-parallel ranks; every loss is there twice."""
    data = rows(4, "tokens")
    with trainer(dense, data, 2, of=InParallel) as evaluating:
        loss = evaluating.evaluate()["eval_loss"]
    return {"loss": loss, "wanted": wanted(dense, data, of_shifted, [[[0, 1]], [[2, 3]]], 2)}


def of_parts() -> dict[str, Any]:
    """As of context-parallel ranks, as far as the count goes: nobody has whole sequences."""
    plan = types.SimpleNamespace(
        tp_size=1, cp_size=2, sp_size=1, non_data_parallel_size=2, sp_backend=None, sp_enabled=False, cp_enabled=False
    )
    data = rows(4, "tokens")
    with (
        trainer(dense, data, 2) as evaluating,
        mock.patch.object(type(evaluating.accelerator), "parallelism_config", plan),
    ):
        loss, _, _ = evaluating.prediction_step(evaluating.model, Collator()(data[:2]), True)
    return {"loss": float(loss), "left": len(_batch_counts._own)}


def composed() -> dict[str, Any]:
    """With transformers-moe-aux-loss beside it, where it is in force."""
    if rlhf_patches.in_force(NAME):
        assert rlhf_patches.apply(only=[NAME, MIXTURES])[MIXTURES].status == "applied"
    return one(qwen3_moe, with_router, 5, 2)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **eval_loss_ranks.CASES,
    "causal, even": lambda: one(dense, of_shifted, 8, 2),
    "causal, 13": lambda: one(dense, of_shifted, 13, 2),
    "T5": lambda: one(t5, of_tokens, 5, 1),
    "classifier": lambda: one(classifier, of_classes, 5, 1, "classes"),
    "Qwen3-MoE": lambda: one(qwen3_moe, with_router, 5, 1),
    "label smoothing": lambda: one(dense, smoothed, 5, 1, arguments={"label_smoothing_factor": SMOOTHING}),
    "own loss": lambda: one(dense, squared, 5, 1, compute_loss_func=squared),
    "passes on": lambda: one(dense, of_shifted, 5, 1, of=PassesOn),
    "counts others": lambda: one(dense, of_shifted, 5, 1, of=CountsOthers),
    "after an exception": raising,
    "beside the other patch": composed,
    "one has no labels": lambda: one(dense, of_shifted, 4, 1, "one has no labels"),
    "the same, unfiltered": lambda: one(
        dense, of_shifted, 4, 1, "one has no labels", arguments={"logging_nan_inf_filter": False}
    ),
    "not averaged": lambda: one(dense, of_shifted, 5, 1, arguments={"average_tokens_across_devices": False}),
    "weighs": lambda: one(dense, of_shifted, 5, 1, of=Weighs),
    "divides": lambda: one(t5, of_tokens, 5, 1, of=Divides),
    "by itself": lambda: one(dense, squared, 5, 1, of=ByItself),
    "without count": lambda: one(dense, of_shifted, 5, 1, of=WithoutCount),
    "of another count": lambda: one(dense, of_shifted, 5, 1, of=OfAnother),
    "counts itself": lambda: one(dense, of_shifted, 5, 1, of=CountsItself),
    "tensor parallel": in_parallel,
    "context parallel": of_parts,
    "prediction": predicting,
    "training": training,
    "asked by others": asked,
}


AFTERWARDS = ("causal", "T5")


def main() -> None:
    eval_loss_ranks.main(CASES, AFTERWARDS)
