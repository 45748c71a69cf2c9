"""Evaluations of small models by ``Trainer``, on each of one or two ranks: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-eval-loss-ranks, after it, and after revert(); beside it, in float64 and from
the logits, the mean over samples of their batch's mean: of the batches that the ranks had, and of those of one rank.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch.nn.functional import cross_entropy, log_softmax
from transformers import PreTrainedModel, Trainer, TrainingArguments

import rlhf_patches
from rlhf_patches.patches.transformers import batch_counts
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import COEFFICIENT, dense, made, qwen3_moe
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import NAME as MIXTURES
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "transformers-eval-loss-ranks"
VOCABULARY, LENGTH, SMOOTHING = 32, 10, 0.1
Row = dict[str, Any]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


# ------------------------------------------------------------------------------------------------- models, data


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


def rows(number: int, kind: str) -> list[Row]:
    """Sequences of which very different numbers of tokens are to be predicted; the first never is."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for i in range(number):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: LENGTH - 1 - (4 * i) % (LENGTH - 1)] = -100
        if kind == "one has no labels" and i == 1:
            labels[:] = -100
        found.append(
            {
                "id": i,
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": torch.tensor(i % 3) if kind == "classes" else labels,
            }
        )
    return found


class Collator:
    """Keeps which samples were in each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, samples: list[Row]) -> Row:
        self.batches.append([sample["id"] for sample in samples])
        kept = [{name: one for name, one in sample.items() if name != "id"} for sample in samples]
        collated: Row = torch.utils.data.default_collate(kept)
        return collated


# ------------------------------------------------------------------------------------------------- the definition


def of_shifted(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_tokens(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def of_classes(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits, labels)


def with_router(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return of_shifted(outputs, labels) + COEFFICIENT * outputs.aux_loss


def smoothed(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Szegedy et al., 2015: the targets' part, and that of all of the vocabulary."""
    kept = labels[:, 1:] != -100
    of_all = -log_softmax(outputs.logits[:, :-1], -1)[kept]
    nll = of_all.gather(1, labels[:, 1:][kept][:, None]).mean()
    return (1 - SMOOTHING) * nll + SMOOTHING * of_all.mean()


def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of one's own, of the logits of each token that is to be predicted."""
    kept = labels[:, 1:] != -100
    each = outputs["logits"][:, :-1].square().mean(-1)[kept]
    return each.mean() if num_items_in_batch is None else each.sum() / num_items_in_batch


def wanted(
    make: Callable[[], Any], data: list[Row], loss: Loss, steps: Iterable[Iterable[list[int]]], size: int
) -> list[float]:
    """In float64, by sample, its batch's mean, without what fills up the last step.

    Args:
        make: makes the model.
        data: all rows.
        loss: of a batch.
        steps: of each step, the samples of each rank's batch.
        size: of a batch.
    """
    model = made(make).double().eval()
    found = []
    for batch in [batch for step in steps for batch in step]:
        given = Collator()([data[i] for i in batch])
        with torch.no_grad():
            found += [float(loss(model(**given), given["labels"]))] * size
    return found[: len(data)]


# ---------------------------------------------------------------------------------------------------- trainers


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


# ------------------------------------------------------------------------------------------------- evaluations


def bits(of: Any) -> str:
    return hashlib.sha256(b"".join(torch.as_tensor(one).contiguous().numpy().tobytes() for one in of)).hexdigest()


@contextlib.contextmanager
def trainer(
    make: Callable[[], Any], data: list[Row], size: int, of: type[Trainer] = Trainer, **more: Any
) -> Iterator[Any]:
    arguments = more.pop("arguments", {})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        yield of(
            model=made(make),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                per_device_eval_batch_size=size,
                per_device_train_batch_size=size,
                remove_unused_columns=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
            eval_dataset=data,
            train_dataset=data,
            data_collator=Collator(),
            **more,
        )


def of_all_ranks(mine: Any) -> list[Any]:
    if not torch.distributed.is_initialized():
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


def one(
    make: Callable[[], Any], loss: Loss, number: int, size: int, kind: str = "tokens", **more: Any
) -> dict[str, Any]:
    """An evaluation, and what it is to say: with the batches that the ranks had, and with those of one rank."""
    data, seen = rows(number, kind), []

    def compute_metrics(found: Any) -> dict[str, float]:
        predictions = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        seen.append(bits([predictions, found.label_ids]))
        return {}

    with trainer(make, data, size, compute_metrics=compute_metrics, **more) as evaluating:
        evaluated = evaluating.evaluate()["eval_loss"]
        batches = list(evaluating.data_collator.batches)
        counts = getattr(evaluating, "counts", [])
    gc.collect()
    alone = [[list(range(i, min(i + size, number)))] for i in range(0, number, size)]
    return {
        "loss": evaluated,
        "metrics": seen,
        "counts": counts,
        "left": len(batch_counts._own),
        "wanted": wanted(make, data, loss, zip(*of_all_ranks(batches), strict=True), size),
        "wanted of one rank": wanted(make, data, loss, alone, size),
    }


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
    return {"loss": float(loss), "left": len(batch_counts._own)}


def composed() -> dict[str, Any]:
    """With transformers-moe-aux-loss beside it, where it is in force."""
    if rlhf_patches.in_force(NAME):
        assert rlhf_patches.apply(only=[NAME, MIXTURES])[MIXTURES].status == "applied"
    return one(qwen3_moe, with_router, 5, 2)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: one(dense, of_shifted, 3, 1),
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
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    options = parser.parse_args()
    of_states = iter((options.cases, options.cases, [case for case in AFTERWARDS if case in options.cases]))
    states.report(NAME, lambda: {name: CASES[name]() for name in next(of_states)}, options.out)
