"""One step with label smoothing by the real ``Trainer``, with wrapped models: ``--out FOLDER [CASE ...]``.

As the proof of transformers-smoothed-labels: models that other things wrap, and models that are not causal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.trainer_pt_utils import LabelSmoother

from rlhf_patches.patches.transformers import _known_loss, _wrapped_names
from rlhf_patches.patches.transformers.proofs import smoothed_labels_ranks
from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import Collator
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import SIZES, dense, made
from rlhf_patches.patches.transformers.proofs.smoothed_labels_ranks import (
    COMPILED,
    Make,
    data,
    gradients,
    outcome,
    step,
    trainer_of,
)
from rlhf_patches.testing import untouched
from tests.patches.transformers.eval_loss_ranks import classifier, t5


class Another(transformers.Qwen3ForCausalLM):
    """A class of one's own, whose name is in no list."""


def another() -> Any:
    return Another(transformers.Qwen3Config(**SIZES))


def with_prefix() -> Any:
    model = get_peft_model(dense(), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    return model.eval()  # PEFT warns otherwise; no dropout is in either


def with_lora() -> Any:
    return get_peft_model(dense(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def sharded(model: Any) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def in_ddp_compiled(model: Any) -> Any:
    return compiled(torch.nn.parallel.DistributedDataParallel(model))


def loss_within(make: Make, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    """By compute_loss(), with a model that is wrapped as accelerate wraps it."""
    model = made(make)
    with trainer_of(model, "tokens") as trainer:
        wrapped = wrap(model)
        with mock.patch.object(_known_loss, "unwrapped", wraps=_known_loss.unwrapped) as asked:
            loss = trainer.compute_loss(wrapped, dict(Collator()(data("tokens"))))
        loss.backward()
        found = outcome(make, loss.item(), gradients(model), asked.call_count, causal=True)
    touched = ""
    fresh = wrap(made(make))
    try:
        with untouched(fresh):
            found["name"] = _wrapped_names.name_within(fresh)
    except AssertionError as error:
        touched = str(error)
    return {**found, "touched": touched}


class Shifting(LabelSmoother):
    """A user's own workaround: it shifts by itself."""

    def __call__(self, outputs: Any, labels: Any, shift_labels: bool = False, **others: Any) -> Any:
        logits = {"logits": outputs["logits"][:, :-1].contiguous()}
        return super().__call__(logits, labels[:, 1:].contiguous(), shift_labels=shift_labels, **others)


def with_shifting_smoother(trainer: Any) -> None:
    trainer.label_smoother = Shifting(trainer.label_smoother.epsilon)


def with_shifting_loss(trainer: Any) -> None:
    """Another one: the labels are shifted before the trainer's own function."""

    def compute_loss(model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        labels = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        return transformers.Trainer.compute_loss(trainer, model, {**inputs, "labels": labels}, *given, **options)

    trainer.compute_loss = compute_loss


def shifted_by_user(change: Callable[[Any], None]) -> dict[str, Any]:
    """By compute_loss(), with a compiled model, and a user's own code that shifts the labels."""
    model = made(dense)
    with trainer_of(model, "tokens") as trainer:
        change(trainer)
        loss = trainer.compute_loss(compiled(model), dict(Collator()(data("tokens"))))
    loss.backward()
    return outcome(dense, loss.item(), gradients(model), 0, causal=True)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **smoothed_labels_ranks.CASES,
    "compiled before": lambda: step(dense, before=compiled),
    "LoRA, compiled": lambda: step(with_lora, **COMPILED),
    "prefix tuning": lambda: step(with_prefix),
    "FSDP2": lambda: loss_within(dense, sharded),
    "DDP, compiled": lambda: loss_within(dense, in_ddp_compiled),
    "plain": lambda: step(dense),
    "LoRA": lambda: step(with_lora),
    "T5": lambda: step(t5, kind="seq2seq"),
    "T5, compiled": lambda: step(t5, kind="seq2seq", **COMPILED),
    "classifier, compiled": lambda: step(classifier, kind="classes", **COMPILED),
    "own class": lambda: step(another, causal=False),
    "own class, compiled": lambda: step(another, causal=False, **COMPILED),
    "shifted by a smoother": lambda: shifted_by_user(with_shifting_smoother),
    "shifted by compute_loss": lambda: shifted_by_user(with_shifting_loss),
    "not smoothed": lambda: step(dense, label_smoothing_factor=0, **COMPILED),
}


def main() -> None:
    torch.compiler.set_stance("force_eager")  # what counts is the wrapper; tracing the model takes seconds
    smoothed_labels_ranks.main(CASES)
