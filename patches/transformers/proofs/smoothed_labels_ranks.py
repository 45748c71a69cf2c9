"""One step with label smoothing by the real ``Trainer``, with wrapped models: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-smoothed-labels, after it, and after revert(): how far loss and gradient are
from those of the definition, in float64 and from the logits of the model that is not wrapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainerCallback, TrainingArguments

from rlhf_patches.patches.transformers import router_loss, wrapped_names
from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import SMOOTHING, Collator, classifier, rows, smoothed, t5
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import SIZES, dense, made
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "transformers-smoothed-labels"
Make = Callable[[], Any]
Found = dict[str, torch.Tensor]
COMPILED: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}


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


def data(kind: str) -> list[Any]:
    found = rows(4, kind)
    return [{**row, "decoder_input_ids": row["input_ids"]} for row in found] if kind == "seq2seq" else found


def gradients(model: Any) -> Found:
    """Of each parameter, whole, under the name that it has in the model itself."""
    return {
        name.replace("_orig_mod.", "").replace("module.", ""): getattr(grad, "full_tensor", lambda grad=grad: grad)()
        for name, parameter in model.named_parameters()
        if (grad := parameter.grad) is not None
    }


class Keep(TrainerCallback):
    """The gradients before the step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found = {name: grad.clone() for name, grad in gradients(model).items()}


@contextlib.contextmanager
def trainer_of(model: Any, kind: str, **arguments: Any) -> Iterator[Trainer]:
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(None),
        mock.patch.dict(os.environ),  # where 4.57 leaves torch_compile for the next one
    ):
        given = TrainingArguments(
            output_dir=folder,
            **{"label_smoothing_factor": SMOOTHING, **arguments},
            use_cpu=True,
            per_device_train_batch_size=4,
            max_steps=1,
            max_grad_norm=0.0,
            save_strategy="no",
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
            ddp_backend="gloo",
        )
        yield Trainer(model=model, args=given, train_dataset=data(kind), data_collator=Collator())


def by_definition(make: Make) -> tuple[float, Found]:
    model = made(make).double()
    batch = Collator()(data("tokens"))
    loss = smoothed(model(**{name: each for name, each in batch.items() if name != "labels"}), batch["labels"])
    loss.backward()
    return float(loss), gradients(model)


def outcome(make: Make, loss: float, found: Found, asked: int, *, causal: bool) -> dict[str, Any]:
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + found[name].contiguous().numpy().tobytes())
    result: dict[str, Any] = {"bits": digest.hexdigest(), "loss": loss, "asked": asked}
    if causal:
        wanted, gradient = by_definition(make)
        assert found.keys() == gradient.keys()
        far = sum(float((found[name].double() - gradient[name]).square().sum()) for name in found)
        result["loss off"] = abs(loss - wanted) / wanted
        result["gradient off"] = (far / sum(float(each.square().sum()) for each in gradient.values())) ** 0.5
    return result


def step(
    make: Make, *, kind: str = "tokens", before: Callable[[Any], Any] = lambda model: model, **more: Any
) -> dict[str, Any]:
    """By train(), with a model that may be wrapped ``before``."""
    with (
        trainer_of(before(made(make)), kind, **more) as trainer,
        mock.patch.object(router_loss, "unwrapped", wraps=router_loss.unwrapped) as asked,
    ):
        trainer.add_callback(keep := Keep())
        loss = trainer.train().training_loss
        causal = kind == "tokens" and more.get("label_smoothing_factor") != 0 and make not in (t5, another)
        return outcome(make, loss, keep.found, asked.call_count, causal=causal)


def loss_within(make: Make, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    """By compute_loss(), with a model that is wrapped as accelerate wraps it."""
    model = made(make)
    with trainer_of(model, "tokens") as trainer:
        wrapped = wrap(model)
        with mock.patch.object(router_loss, "unwrapped", wraps=router_loss.unwrapped) as asked:
            loss = trainer.compute_loss(wrapped, dict(Collator()(data("tokens"))))
        loss.backward()
        found = outcome(make, loss.item(), gradients(model), asked.call_count, causal=True)
    touched = ""
    fresh = wrap(made(make))
    try:
        with untouched(fresh):
            found["name"] = wrapped_names.name_within(fresh)
    except AssertionError as error:
        touched = str(error)
    return {**found, "touched": touched}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "compiled": lambda: step(dense, **COMPILED),
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
    "own class": lambda: step(another),
    "own class, compiled": lambda: step(another, **COMPILED),
    "not smoothed": lambda: step(dense, label_smoothing_factor=0, **COMPILED),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    options = parser.parse_args()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    of_states = iter((options.cases, options.cases, options.cases[:1]))
    states.report(NAME, lambda: {name: CASES[name]() for name in next(of_states)}, options.out)
