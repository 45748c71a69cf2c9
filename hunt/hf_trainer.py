"""Steps of transformers' Trainer, and of those that stand on it (TRL): rows, arguments, and the outcome of a run.

An adapter builds a trainer from `rows` and `arguments`, and returns `outcome` of it.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hunt import objects, sharded
from hunt.outcomes import Outcome

VOCABULARY = 32
#: Of the micro-batches' samples: no two lengths in a row are the same.
LENGTHS = (7, 4, 6, 5, 8, 3, 6, 5, 7, 4, 8, 6)
PAD, IGNORED = 0, -100
CLIPPED = "clip_ratio/region_mean"
"""The metric of GRPO and RLOO: the share of ratios that are further from 1 than epsilon."""

ARGUMENTS = frozenset(
    {"micro_batch", "accumulation", "ranks", "steps", "resume_at", "checkpointing", "compiled", "sharding"}
)
"""Settings that tell `arguments` what to do."""
GIVEN = ARGUMENTS | {"dtype", "liger", "bf16"}
"""All that it takes."""
ROWS = frozenset({"rows", "order", "others"})
"""Settings that `rows` takes."""
MODEL = frozenset({"attention", "dtype", "lora", "dropout"})
"""Settings that `prepared` takes, or that a model's configuration does."""


LIGER = {**dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False), "fused_linear_cross_entropy": True}
"""Of Liger's kernels the one that Triton 3.3.1 can interpret, and that has a trainer's scale in it."""


def chosen(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Of the settings those with these names, as far as they are given."""
    return {name: settings[name] for name in names if name in settings}


def rows(*, rows: int = 8, order: str = "given", others: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Any]:
    """Lists of token ids: ``others`` is a seed for all but the first row, which then is the only one with labels."""
    made = []
    for index in range(rows):
        seed = 100 + index if not (others and index) else 100 + index + 1000 * others
        tokens = random.Random(seed).choices(range(3, VOCABULARY), k=lengths[index % len(lengths)])
        made.append({"input_ids": tokens, "counts": not (others and index)})
    return made if order == "given" else made[::-1]


def arguments(
    folder: str,
    *,
    micro_batch: int = 8,
    accumulation: int = 1,
    ranks: int = 1,
    steps: int = 1,
    resume_at: int | None = None,
    checkpointing: bool | str = False,
    compiled: bool = False,
    sharding: str | None = None,
    dtype: str = "float32",
    liger: bool = False,
    bf16: bool = False,
) -> dict[str, Any]:
    """Those of TrainingArguments; nothing is clipped, and a checkpoint is written only to be resumed from."""
    if fsdp := bf16 and (sharding or "").startswith("fsdp"):
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # bf16=True wants a GPU, since sharding is not told use_cpu
    sharded.prepare(sharding)
    return {
        "output_dir": folder,
        "per_device_train_batch_size": micro_batch,
        "per_device_eval_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no" if resume_at is None else "steps",
        "save_steps": resume_at or 500,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "gradient_checkpointing": bool(checkpointing),
        "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing == "reentrant"} if checkpointing else None,
        "torch_compile": compiled,
        "torch_compile_backend": "eager" if compiled else None,
        **({"use_liger_kernel": True, "liger_kernel_config": LIGER} if liger else {}),
        **({"ddp_backend": "gloo"} if ranks > 1 else {}),
        "bf16": bf16 and not fsdp,
        **sharded.arguments(sharding, "bfloat16" if bf16 else dtype),
    }


def prepared(model: Any, *, dtype: str = "float32", lora: bool = False) -> Any:
    """The model in that dtype, or with an adapter, all of whose weights are random."""
    import torch

    for parameter in model.parameters():  # as from_pretrained does, which leaves buffers in float32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


_instead: Callable[[Any], Outcome] | None = None


@contextlib.contextmanager
def handed_to(use: Callable[[Any], Outcome]) -> Iterator[None]:
    """Meanwhile `outcome` hands a trainer over, in place of training it."""
    global _instead
    _instead = use
    try:
        yield
    finally:
        _instead = None


def outcome(
    build: Callable[[], Any],
    *,
    resume_at: int | None = None,
    evaluated: int = 0,
    steps: int = 1,
    frequencies: bool = False,
    **_: Any,
) -> Outcome:
    """Train, or evaluate where rows are given for that.

    Args:
        build: makes a trainer, anew where one is resumed.
        resume_at: the step after which it is saved, and another one goes on from there.
        evaluated: how many rows the trainer has to evaluate; none to train.
        steps: of the optimizer.
        frequencies: hand over the rotary frequencies, too.
    """
    import torch

    torch.manual_seed(7)
    trainer = build()
    if _instead is not None:
        return _instead(trainer)
    if evaluated:
        found = trainer.evaluate()
        return {
            "metrics": {
                name: value
                for name, value in found.items()
                if name.endswith(("_loss", "_accuracy", "accuracies", "margins"))
            }
        }
    seen: list[Any] = []
    if resume_at is not None:
        trainer.add_callback(_stop_after(resume_at))
        _train(trainer, {}, seen)
        torch.manual_seed(11)  # what is not restored differs
        trainer, again = build(), f"{trainer.args.output_dir}/checkpoint-{resume_at}"
    else:
        again = None
    gradients: dict[str, Any] = {}
    held = _held(trainer)
    _train(trainer, gradients, seen if steps > 1 else None, resume_from_checkpoint=again)
    losses = {
        f"step {entry['step']}": entry["loss"]
        for entry in trainer.state.log_history
        if "loss" in entry and entry["step"] > (resume_at or 0)
    }
    clipped = [entry[CLIPPED] for entry in trainer.state.log_history if CLIPPED in entry]
    saved = _saved(trainer)  # first: a state dict after FSDP1's parameters were gathered ends the process
    found = {
        "loss": {name: losses[name] for name in [*losses][-1:]},
        "gradient": gradients,
        "state": _state(trainer),
        "saved": saved,
        "objects": {**objects.described(_held(trainer)), **objects.identities(held, _held(trainer))},
    }
    if frequencies:
        buffers = {sharded.name_of(name): each for name, each in trainer.model.named_buffers() if "inv_freq" in name}
        found["frequencies"] = {name: each.detach().clone() for name, each in buffers.items()}
    if clipped:
        found["ratios of 1"] = {"share": 1 - clipped[0]}
    if steps > 1:
        found["all losses"] = losses
        found["samples"] = {f"batch {index}": value for index, value in enumerate(seen)}
    return found


def _train(trainer: Any, gradients: dict[str, Any], seen: list[Any] | None, **options: Any) -> None:
    """Train, and keep the gradients before each step, and the micro-batches, where that is asked for."""
    from transformers import TrainerCallback

    class Keep(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if trainer.is_deepspeed_enabled:
                sharded.watch(trainer, gradients)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not trainer.is_deepspeed_enabled:
                found = sharded.gradients(trainer)
                gradients.update({f"step {state.global_step} {name}": value for name, value in found.items()})

    callback = Keep()
    trainer.add_callback(callback)
    if seen is not None:
        released = trainer.get_batch_samples

        def noted(*arguments: Any, **named: Any) -> Any:
            batches, items = released(*arguments, **named)
            seen.extend(map(_sample, batches))
            return batches, items

        # Not by a hook of the model: patches leave a model with somebody's hook as released.
        trainer.get_batch_samples = noted
    trainer.train(**options)
    trainer.remove_callback(callback)
    if seen is not None:
        del trainer.get_batch_samples


def _sample(batch: Any) -> Any:
    """The numbers of a micro-batch: its tokens, or those of its text."""
    import torch

    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)] if hasattr(batch, "values") else []
    if tensors:
        return torch.cat([value.detach().flatten().double() for value in tensors])
    return torch.tensor([ord(character) for character in repr(batch)])


def _stop_after(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return Stop()


def _held(trainer: Any) -> dict[str, Any]:
    """What a user may hold of a trainer."""
    return {
        "trainer": trainer,
        "model": trainer.model,
        "wrapped": trainer.model_wrapped,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
        "callbacks": list(trainer.callback_handler.callbacks),
        "accelerator": trainer.accelerator,
        "arguments": trainer.args,
        "collator": trainer.data_collator,
    }


def _saved(trainer: Any) -> dict[str, Any]:
    """What a user finds on disk; of FSDP1 what would be written, since on the CPU accelerate's way of it crashes."""
    from safetensors.torch import load_file

    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return {sharded.name_of(name): sharded.full(value) for name, value in trainer.model.state_dict().items()}
    folder = Path(trainer.args.output_dir) / "saved"
    trainer.save_model(str(folder))
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        found |= {f"{file.name} {name}": value for name, value in load_file(file).items()}
    return found


def _state(trainer: Any) -> dict[str, Any]:
    """Parameters and buffers, and the optimizer's."""
    with sharded.gathered(trainer):
        named = {**dict(trainer.model.named_parameters()), **dict(trainer.model.named_buffers())}
        found = {f"model {sharded.name_of(name)}": sharded.full(value) for name, value in named.items()}
    # ZeRO's is of this rank's share, without names.
    of_optimizer = {} if trainer.is_deepspeed_enabled else trainer.optimizer.state_dict()["state"]
    for index, state in of_optimizer.items():
        found |= {f"optimizer {index} {name}": sharded.full(value) for name, value in state.items()}
    found["learning rate"] = trainer.lr_scheduler.get_last_lr()
    return found
