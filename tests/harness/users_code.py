"""What users put between a trainer and its loss, rollouts or steps, on the hunt's tiny trainers.

``--out FOLDER``: all cells as released; ``--patches EXCLUDED``: with every patch but those, separated by commas.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness.forkserver_process import launcher_variables

STEP = {"accumulation": 4, "micro_batch": 2}
AGAIN = {"accumulation": 2, "micro_batch": 2, "steps": 2, "resume_at": 1}
EVALUATED = {"micro_batch": 2, "evaluated": 3}
Own = Callable[[type], type]
"""Makes of a trainer's class the user's own."""


def overridden(**methods: Any) -> Own:
    """A subclass with these methods; each is called with the class above it first."""

    def own(base: type) -> type:
        def bound(method: Any) -> Any:
            return lambda self, *given, **named: method(functools.partial(super, made, self), self, *given, **named)

        made: type = type(f"Own{base.__name__}", (base,), {name: bound(each) for name, each in methods.items()})
        return made

    return own


def made_with(
    model: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None, **given: Any
) -> Own:
    """A subclass whose model is changed before, or which is changed after it is made, or is given more."""

    def init(above: Any, self: Any, *args: Any, **named: Any) -> None:
        if model is not None:
            model(named["model"])
        above().__init__(*args, **named, **given)
        if after is not None:
            after(self)

    return overridden(__init__=init)


# ------------------------------------------------------------------------------------------------ losses


def scores(outputs: Any, labels: Any, model: Any) -> tuple[Any, Any]:
    """Logits and what they predict."""
    from transformers import T5ForConditionalGeneration

    shifted = not isinstance(model, T5ForConditionalGeneration) and "Token" not in type(model).__name__
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
    return (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)


def entropy(logits: Any, labels: Any, reduction: str) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction=reduction
    )


def handed_on(above: Any, _: Any, *given: Any, **named: Any) -> Any:
    return above().compute_loss(*given, **named)


def changed(how: Callable[[Any, Any, Any], Any]) -> Own:
    """What `compute_loss` returns, changed: a function of trainer, model and loss."""

    def compute_loss(above: Any, self: Any, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        found = above().compute_loss(model, inputs, *given, **named)
        if isinstance(found, tuple):
            return (how(self, model, found[0]), *found[1:])
        return how(self, model, found)

    return overridden(compute_loss=compute_loss)


def with_a_term(_: Any, model: Any, loss: Any) -> Any:
    return loss + 0.01 * sum(each.square().sum() for each in model.parameters() if each.requires_grad)


def divided(self: Any, _: Any, loss: Any) -> Any:
    """The obvious workaround for a gradient that is as many times too large as there are micro-batches and ranks."""
    return loss / (self.args.gradient_accumulation_steps * self.args.world_size)


def own_loss(how: Callable[[Any, Any, Any], Any]) -> Any:
    """Of summed entropy, labels and the number that the trainer has counted."""

    def compute_loss(
        _: Any, self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        logits, labels = scores(outputs, inputs["labels"], self.accelerator.unwrap_model(model))
        loss = how(entropy(logits, labels, "sum"), labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def mean(total: Any, labels: Any, _: Any) -> Any:
    return total / (labels != -100).sum()


def share(total: Any, labels: Any, number: Any) -> Any:
    return mean(total, labels, number) if number is None else total / number


def share_as_float(total: Any, labels: Any, number: Any) -> Any:
    return mean(total, labels, number) if number is None else total / number.double()


def share_over_ranks(total: Any, labels: Any, number: Any) -> Any:
    from torch import distributed

    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    return share(total, labels, number) * (1 if number is None else ranks)


def weighted(total: Any, labels: Any, number: Any) -> Any:
    loss = mean(total, labels, number)
    return loss if number is None else loss * (int((labels != -100).sum()) / int(number))


def of_function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A `compute_loss_func` that shifts."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
    return share(entropy(logits[:, :-1], labels[:, 1:], "sum"), labels[:, 1:], num_items_in_batch)


def of_aligned(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """One on labels that are aligned with what predicts them."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
    return share(entropy(logits, labels, "sum"), labels, num_items_in_batch)


@dataclasses.dataclass
class Loss:
    """One that has no hash."""

    weight: float = 0.5

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return self.weight * of_function(outputs, labels, num_items_in_batch)


def of_model(logits: Any = None, labels: Any = None, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
    """A model's `loss_function`."""
    return share(entropy(logits[:, :-1], labels[:, 1:], "sum"), labels[:, 1:], num_items_in_batch)


def of_model_clamped(logits: Any = None, labels: Any = None, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
    total = entropy(logits[:, :-1], labels[:, 1:], "sum")
    return mean(total, labels[:, 1:], None) if num_items_in_batch is None else total / num_items_in_batch.clamp(min=1)


def loss_of_model(function: Any) -> Own:
    def give(model: Any) -> None:
        model.loss_function = function

    return made_with(model=give)


def own_forward(model: Any) -> None:
    """A subclass of the model whose forward makes its own loss."""
    base = type(model)

    def forward(self: Any, input_ids: Any, labels: Any = None, num_items_in_batch: Any = None, **named: Any) -> Any:
        found = base.forward(self, input_ids=input_ids, **named)
        found.loss = of_function(found, labels, num_items_in_batch)
        return found

    model.__class__ = type(f"Own{base.__name__}", (base,), {"forward": forward})


def smoother(model_output: Any, labels: Any, shift_labels: bool = False, **_: Any) -> Any:
    """A function in place of transformers' LabelSmoother."""
    return 0.9 * of_function(model_output, labels)


# ------------------------------------------------------------------------------------------------ steps, norms, samples


def own_step(above: Any, self: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
    """Looks at the inputs, and clips what there is."""
    import torch

    found = above().training_step(model, dict(inputs) if isinstance(inputs, Mapping) else inputs, *more, **named)
    torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.grad is not None], 0.5)
    return found


def own_count(above: Any, self: Any, epoch_iterator: Any, num_batches: int, *more: Any) -> Any:
    """Counts tokens of the answers, one more for each row."""
    found, number = above().get_batch_samples(epoch_iterator, num_batches, *more)
    if number is not None and all("labels" in each for each in found):
        number = sum((each["labels"] != -100).sum() + len(each["labels"]) for each in found)
    return found, number


def own_order(above: Any, self: Any, *_: Any) -> Any:
    """Samples in their own order."""
    import torch

    return torch.utils.data.SequentialSampler(self.train_dataset)


def own_loader(above: Any, self: Any) -> Any:
    """A loader that accelerate prepares, as the documentation shows."""
    import torch

    loader = torch.utils.data.DataLoader(
        self.train_dataset,
        batch_size=self.args.per_device_train_batch_size,
        shuffle=True,
        collate_fn=self.data_collator,
    )
    return self.accelerator.prepare(loader)


def own_optimizer(above: Any, self: Any, *_: Any) -> Any:
    import torch

    self.optimizer = torch.optim.SGD([each for each in self.model.parameters() if each.requires_grad], lr=0.1)
    return self.optimizer


def own_prediction(_: Any, self: Any, model: Any, inputs: Any, *__: Any, **___: Any) -> Any:
    """Evaluates by its own loss."""
    import torch

    inputs = self._prepare_inputs(inputs)
    with torch.no_grad():
        outputs = model(**inputs)
        logits, labels = scores(outputs, inputs["labels"], self.accelerator.unwrap_model(model))
        return entropy(logits, labels, "mean").mean().detach(), None, None


# ------------------------------------------------------------------------------------------------ TRL's


def own_group(above: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Of what a generation gives, the number of tokens of each step: the workaround for dapo's scale."""
    found = above()._generate_and_score_completions(*given, **named)
    if "num_items_in_batch" in found:
        found["num_items_in_batch"] = found["num_items_in_batch"] / self.args.steps_per_generation
    return found


def own_policy_loss(above: Any, self: Any, model: Any, inputs: Any) -> Any:
    """A policy gradient of its own on what the trainer has generated."""
    import torch

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    kept = inputs["completion_mask"]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -kept.size(1) - 1 : -1]
    own = logits.float().log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    return -(own * inputs["advantages"][:, None] * kept).sum() / kept.sum()


def own_rollouts(above: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Looks at what was generated, and hands on."""
    return above()._generate_and_score_completions(*given, **named)


def own_divergence(above: Any, self: Any, *given: Any, **named: Any) -> Any:
    return 2 * above().generalized_jsd_loss(*given, **named)


SUBCLASS = {
    "nothing": overridden(),
    "handed on": overridden(compute_loss=handed_on),
    "one more term": changed(with_a_term),
    "divided": changed(divided),
    "own step": overridden(training_step=own_step),
}
"""For every trainer."""
LABELED = {
    "a constant": changed(lambda _, __, loss: loss + 1.0),
    "own mean": overridden(compute_loss=own_loss(mean)),
    "own share": overridden(compute_loss=own_loss(share)),
    "own share, ranks": overridden(compute_loss=own_loss(share_over_ranks)),
    "own share in double": overridden(compute_loss=own_loss(share_as_float)),
    "own weighted mean": overridden(compute_loss=own_loss(weighted)),
    "own count": overridden(get_batch_samples=own_count),
    "own order": overridden(_get_train_sampler=own_order),
    "own loader": overridden(get_train_dataloader=own_loader),
    "own optimizer": overridden(create_optimizer=own_optimizer),
}
"""For those whose batches have labels."""
CAUSAL = {
    "function": made_with(compute_loss_func=of_function),
    "function of aligned labels": made_with(compute_loss_func=of_aligned),
    "object without a hash": made_with(compute_loss_func=Loss()),
    "partial": made_with(compute_loss_func=functools.partial(of_function)),
    "loss of the model": loss_of_model(of_model),
    "clamped loss of the model": loss_of_model(of_model_clamped),
    "own forward": made_with(model=own_forward),
    "own smoother": made_with(after=lambda trainer: setattr(trainer, "label_smoother", smoother)),
}
PREFERENCES = ("trl/dpo", "trl/kto", "trl/reward", "trl/orpo", "trl/cpo", "trl_prm/prm", "trl/gkd", "trl/gold")
ROLLOUTS = ("trl/grpo", "trl/rloo", "trl/online_dpo")
SCORED = "_generate_and_score_completions"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A trainer of the hunt, with settings, and the user's class of it."""

    trainer: str
    custom: str
    own: Own
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        more = [f", {name} {value}" for name, value in self.settings.items() if name not in STEP]
        return f"{self.trainer}: {self.custom}{''.join(more)}"


def cells(ranks: int) -> Iterator[Cell]:
    """All of them."""

    def each(trainers: Iterable[str], owns: Mapping[str, Own], settings: Mapping[str, Any] = STEP) -> Iterator[Cell]:
        more = {"ranks": ranks} if ranks > 1 else {}
        return (Cell(name, custom, own, {**settings, **more}) for name in trainers for custom, own in owns.items())

    def some(owns: Mapping[str, Own], *names: str) -> dict[str, Own]:
        return {name: owns[name] for name in names}

    predicted = {"own prediction": overridden(prediction_step=own_prediction)}
    shares = some(LABELED, "own mean", "own share", "own share, ranks")
    if ranks > 1:
        few = {**SUBCLASS, **shares}
        yield from each(("transformers/llama", "transformers/t5"), few)
        yield from each(
            ("transformers/llama", "transformers/t5", "trl/sft"),
            {**some(SUBCLASS, "nothing", "handed on", "divided"), **shares, **predicted},
            EVALUATED,
        )
        yield from each(("trl/gkd", "trl/online_dpo"), some(SUBCLASS, "nothing", "divided"))
        return
    yield from each(("transformers/llama", "transformers/gpt2", "trl/sft"), {**SUBCLASS, **LABELED, **CAUSAL})
    yield from each(("transformers/t5", "transformers/bert-tokens"), {**SUBCLASS, **LABELED})
    owns = {**SUBCLASS, **shares, **some(LABELED, "own count", "own weighted mean")}
    yield from each(("transformers/mixtral",), owns)
    yield from each(("transformers/smoothed", "transformers/bert-classes", *PREFERENCES, *ROLLOUTS), SUBCLASS)
    yield from each(("trl/gkd", "trl/gold"), {"own divergence": overridden(generalized_jsd_loss=own_divergence)})
    for more in ({}, {"steps_per_generation": 8}):
        scored = {"own rollouts": own_rollouts, "own scale": own_group}
        yield from each(("trl/grpo",), {name: overridden(**{SCORED: own}) for name, own in scored.items()}, STEP | more)
        yield from each(("trl/grpo",), {"own loss": overridden(_compute_loss=own_policy_loss)}, STEP | more)
    owns = some(SUBCLASS, "nothing", "handed on", "divided")
    yield from each(("trl/dpo", "trl/kto"), owns, STEP | {"lora": True})
    yield from each(("trl/sft",), owns, STEP | {"chunked": True})
    yield from each(("trl/sft-gpt_oss",), {**owns, **shares})
    owns = some(LABELED, "own order", "own loader")
    yield from each(("transformers/llama", "trl/sft", "trl/grpo"), owns, AGAIN)


# ------------------------------------------------------------------------------------------------ the worker


@contextlib.contextmanager
def users(own: Own) -> Iterator[None]:
    """Trainers of the hunt are made of the user's class, and nothing is saved at the end."""
    import transformers

    from hunt import hf_trainer, trl_trainer

    base, classes, saved = transformers.Trainer, trl_trainer.classes, hf_trainer._saved

    def own_classes(kind: str) -> tuple[Any, Any]:
        config, trainer = classes(kind)
        return config, own(trainer)

    transformers.Trainer, trl_trainer.classes, hf_trainer._saved = own(base), own_classes, lambda trainer: {}
    try:
        yield
    finally:
        transformers.Trainer, trl_trainer.classes, hf_trainer._saved = base, classes, saved


def outcome(cell: Cell) -> dict[str, Any]:
    """Each number of it, as text that is the same for the same bits."""
    import numpy as np

    from hunt import trainers

    trainer = trainers.every()[cell.trainer]
    try:
        with users(cell.own):
            found = trainer.run(**trainer.fixed, **cell.settings)
    except trainers.CannotRun as error:
        return {"cannot": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"raised": f"{type(error).__name__}: {error}"}
    said = {}
    for part, values in found.items():
        for name, value in values.items():
            if not isinstance(value, str):
                array = np.asarray(value.detach().double() if hasattr(value, "detach") else value, dtype=np.float64)
                norm = float(np.sqrt(np.square(array).sum()))
                value = f"{norm!r} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
            said[f"{part} {name}"] = value
    return said


def calls() -> dict[str, int]:
    """Of patched functions, so far."""
    import rlhf_patches

    return {row.name: row.reached.calls for row in rlhf_patches.report() if row.reached is not None}


def main() -> None:
    """Each cell's outcome, and which patches were reached in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--patches", metavar="EXCLUDED")
    parser.add_argument("--only", default="", help="a part of cells' names")
    options = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
    if ranks == 1:  # a process that nobody launched
        for name in launcher_variables(0, 1, 0):
            os.environ.pop(name, None)
    import transformers

    import rlhf_patches

    transformers.logging.set_verbosity_error()
    applied: list[str] = []
    if options.patches is not None:
        excluded = [name for name in options.patches.split(",") if name]
        applied = [row.name for row in rlhf_patches.apply(disable=excluded or None) if row.status == "applied"]
    gc.collect()
    gc.freeze()  # accelerate collects after each run: half a second for all that is imported
    found: dict[str, Any] = {}
    for cell in cells(ranks):
        if options.only in cell.name:
            before = calls() if options.patches is not None else {}
            said = outcome(cell)
            after = calls() if options.patches is not None else {}
            reached = [name for name in after if after[name] > before.get(name, 0)]
            found[cell.name] = {"outcome": said, "reached": reached}
    (options.out / f"rank{rank}.json").write_text(json.dumps({"applied": applied, "cells": found}))


if __name__ == "__main__":
    main()
