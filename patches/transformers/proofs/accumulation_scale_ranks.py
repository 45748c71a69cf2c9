"""Steps of small models by ``Trainer`` over several micro-batches, on each of one or two ranks: ``--out FOLDER``.

Each case as released, with transformers-accumulation-scale, some with transformers-moe-aux-loss as well, and after
revert(). The reference is the same steps in float64 from the losses' definitions: without a Trainer, and without a
number of items.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.nn import functional
from torch.utils.data import SequentialSampler, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

import rlhf_patches
from rlhf_patches.proving import states

NAME, ROUTERS = "transformers-accumulation-scale", "transformers-moe-aux-loss"
RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
ROWS, WORDS, LENGTH, LABELS = 2, 32, 8, 3

Batch = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "attn_implementation": "eager"}


def t5() -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def llama_classifier(problem: str) -> Any:
    labels = 1 if problem == "regression" else LABELS
    config = transformers.LlamaConfig(**LLAMA, num_labels=labels, problem_type=problem)
    return transformers.LlamaForSequenceClassification(config)


# -- the data: rows of different lengths


def class_of(number: int, *_: Any) -> torch.Tensor:
    return torch.tensor(number % LABELS)


def words_of(number: int, ids: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    words = ids.clone()
    words[: 1 + (number * 3) % (LENGTH - 2)] = -100
    return words


def row(number: int, labels: Callable[[int, torch.Tensor, torch.Generator], torch.Tensor]) -> Batch:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, WORDS, (LENGTH,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels(number, ids, generator)}


# -- the losses, by their definitions


@dataclass(frozen=True)
class Terms:
    """The part of a micro-batch: a sum over a number of items, and a part that is a mean already."""

    total: torch.Tensor
    items: int
    part: torch.Tensor | float = 0.0


def flat(logits: torch.Tensor, labels: torch.Tensor) -> Terms:
    total = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return Terms(total, int((labels != -100).sum()))


def aligned(outputs: Any, labels: torch.Tensor) -> Terms:
    return flat(outputs.logits, labels)


def of_means(window: Sequence[Sequence[Terms]], _: Case) -> list[torch.Tensor]:
    """Each rank's part, whose mean is minimized: ``window`` has each rank's micro-batches."""
    return [torch.stack([each.total / each.items for each in own]).mean() for own in window]


@dataclass(frozen=True)
class Kind:
    """A model, its data and its loss: for a micro-batch, and for a window, by default its micro-batches' mean."""

    make: Callable[[], Any]
    labels: Callable[[int, torch.Tensor, torch.Generator], torch.Tensor]
    terms: Callable[[Any, torch.Tensor], Terms]
    loss: Callable[[Sequence[Sequence[Terms]], Case], list[torch.Tensor]] = of_means


T5 = Kind(t5, words_of, aligned)
LLAMA_CLASSIFIER = Kind(lambda: llama_classifier("single_label_classification"), class_of, aligned)


# -- a case


@dataclass(frozen=True, eq=False)
class Case:
    """A model to train, and the settings.

    Attributes:
        kind: the model.
        steps: ``gradient_accumulation_steps``.
        micro: micro-batches of each rank in the one epoch; the last window may be short.
        rate: the learning rate of plain SGD; 0 compares each window's gradient at the same weights.
        short: whether the last micro-batch has one row less.
        evaluate: whether to evaluate after each step, and to predict at the end.
        wrap: wraps the model.
        arguments: additional training arguments.
    """

    kind: Kind
    steps: int
    micro: int = 0
    rate: float = 0.0
    short: bool = False
    evaluate: bool = False
    wrap: Callable[[Any], Any] = field(default=lambda model: model)
    arguments: dict[str, Any] = field(default_factory=dict)

    def made(self) -> Any:
        torch.manual_seed(0)
        return self.wrap(self.kind.make())

    def rows(self) -> list[Batch]:
        number = RANKS * ROWS * (self.micro or self.steps) - self.short
        return [row(each, self.kind.labels) for each in range(number)]

    def windows(self) -> Iterator[list[list[Batch]]]:
        """Each rank's micro-batches of each step: batches alternate between the ranks."""
        rows = self.rows()
        batches = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        own = [batches[rank::RANKS] for rank in range(RANKS)]
        for start in range(0, len(own[0]), self.steps):
            yield [[default_collate(batch) for batch in one[start : start + self.steps]] for one in own]


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Gradients(TrainerCallback):
    """The gradients that the optimizer receives at each step."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.found.append(
            {
                name.removeprefix("module."): p.grad.cpu().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )


def arguments_of(case: Case, folder: str) -> TrainingArguments:
    defaults = {
        "use_cpu": not torch.cuda.is_available(),
        "ddp_backend": "gloo",
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "gradient_accumulation_steps": case.steps,
        "num_train_epochs": 1,
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "learning_rate": case.rate,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "eval_strategy": "steps" if case.evaluate else "no",
        "eval_steps": 1,
    }
    return TrainingArguments(output_dir=folder, **{**defaults, **copy.deepcopy(case.arguments)})


@functools.cache
def wanted(case: Case) -> tuple[list[dict[str, torch.Tensor]], list[float], dict[str, torch.Tensor]]:
    """In float64: the gradients of each step, its loss, and all trained weights after the last step."""
    model = copy.deepcopy(case.made()).double()
    model.train()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    gradients, losses = [], []
    for window in case.windows():
        terms: list[list[Terms]] = []
        for own in window:
            terms.append([])
            for batch in own:
                given = {key: batch[key] for key in ("input_ids", "attention_mask")}
                if case.kind.make is t5:
                    start = torch.zeros_like(batch["labels"][:, :1])
                    given["decoder_input_ids"] = torch.cat([start, batch["labels"][:, :-1].clamp(min=0)], 1)
                terms[-1].append(case.kind.terms(model(**given), batch["labels"]))
        loss = torch.stack(case.kind.loss(terms, case)).mean()
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        gradients.append({name: one for name, one in zip(trained, found, strict=True) if one is not None})
        losses.append(float(loss))
        with torch.no_grad():
            for name, one in gradients[-1].items():
                trained[name] -= case.rate * one
    return gradients, losses, {name: one.detach() for name, one in trained.items()}


def compared(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """The factor on the right gradient, and the relative distance from it: all parameters together, and the worst."""
    right = {name: one for name, one in right.items() if name in found or float(one.norm())}
    assert set(right) <= set(found), sorted(set(right) - set(found))
    a = torch.cat([found[name].double().flatten() for name in right])
    b = torch.cat([one.flatten() for one in right.values()])
    norms = {name: float(one.norm()) for name, one in right.items()}
    worst = max(
        float((found[name].double() - one).norm()) / norms[name]
        for name, one in right.items()
        if norms[name] > 1e-3 * float(b.norm())  # rounding alone gives 0 in float64 only
    )
    return {"times": float(a @ b / (b @ b)), "off by": float((a - b).norm() / b.norm()), "worst": worst}


def one(case: Case) -> dict[str, Any]:
    """A run, compared with the reference."""
    gradients = Gradients()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        model = case.made()
        start = {name: one.detach().clone() for name, one in model.named_parameters()}
        rows = case.rows()
        trainer = InOrder(
            model=model,
            args=arguments_of(case, folder),
            train_dataset=rows,
            eval_dataset=rows[: RANKS * ROWS],
            callbacks=[gradients],
        )
        ended = trainer.train()
        predicted = trainer.predict(rows[: RANKS * ROWS]).metrics if case.evaluate else {}
    right, losses, weights = wanted(case)
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert len(logged) == len(losses) == len(right) == len(gradients.found)
    report = {
        "micro-batches": [len(window[RANK]) for window in case.windows()],
        "gradients": [compared(*each) for each in zip(gradients.found, right, strict=True)],
        "logged": logged,
        "wanted": losses,
        "in all": ended.training_loss,
        "evaluated": [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each],
        "predicted": predicted.get("test_loss"),
        "bits": [float(one.double().norm()).hex() for each in gradients.found for one in each.values()],
    }
    if case.rate:
        end = dict(model.named_parameters())
        report["change"] = compared(
            {name: end[name].detach().cpu().double() - start[name].double() for name in weights},
            {name: one - start[name].double() for name, one in weights.items()},
        )
    return report


CASES = {"T5": Case(T5, 4), "Llama classifier": Case(LLAMA_CLASSIFIER, 4)}


def main(cases: Mapping[str, Case] = CASES, with_routers: Iterable[str] = ()) -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", help="by default all")
    options = parser.parse_args()
    gc.freeze()  # train() ends with a garbage collection, which would traverse all imported modules
    cases = {name: case for name, case in cases.items() if name in (options.cases or cases)}
    chosen = {"before": [*cases], "after": [*cases], "both": with_routers, "reverted": ["T5", "Llama", "Mixtral"]}
    found: dict[str, Any] = {"version": transformers.__version__}
    for state, patches in {"before": (), "after": (NAME,), "both": (NAME, ROUTERS), "reverted": ()}.items():
        report = rlhf_patches.apply(only=patches) if patches else rlhf_patches.revert()
        if patches:
            found["status"] = {name: report[name].status.value for name in patches}
        found[state] = {name: one(cases[name]) for name in chosen[state] if name in cases}
        if state == "after":
            reached = rlhf_patches.report()[NAME].reached
            found["reached"] = reached and reached.to_dict()
    (options.out / f"rank{RANK}.json").write_text(json.dumps(found, indent=1))
