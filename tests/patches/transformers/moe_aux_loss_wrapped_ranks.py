"""One step of small models that are sharded and compiled, on each of two ranks: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-moe-aux-loss and after it; beside it, in float64, the loss from its definition.
accelerate shards for accelerators only, so CPU ranks tell it that they are some.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainingArguments

import rlhf_patches
from rlhf_patches.patches.transformers import _router_loss
from rlhf_patches.patches.transformers.proofs import moe_aux_loss_ranks as small
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

PLAIN = {"sync_module_states": "false", "cpu_ram_efficient_loading": "false", "use_orig_params": "true"}
V5 = int(transformers.__version__.partition(".")[0]) >= 5
FSDP1 = {"fsdp": True, "fsdp_config": {**PLAIN, "version": 1}} if V5 else {"fsdp": "full_shard", "fsdp_config": PLAIN}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


class Held(TrainerCallback):
    """Of what modules the trainer's model consists when training begins and when it has ended."""

    def __init__(self) -> None:
        self.found: list[list[tuple[str, str, int]]] = []

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.found.append([(name, type(one).__qualname__, id(one)) for name, one in model.named_modules()])

    on_train_end = on_train_begin


@contextlib.contextmanager
def presented_as(kind: DistributedType) -> Iterator[None]:
    """CPU ranks under another name, in a process of which accelerate knows nothing yet."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if kind is not DistributedType.MULTI_CPU:
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state.update(distributed_type=kind, device=torch.device("cpu"))
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def step(model: Any, rows: list[dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """A step: this rank's loss, and the checkpoint that the trainer would write."""
    held = Held()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        trainer = small.Observed(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=small.ROWS,
                max_steps=1,
                max_grad_norm=0.0,
                optim="sgd",
                learning_rate=1.0,
                lr_scheduler_type="constant",
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
            train_dataset=rows,
            callbacks=[held],
        )
        trainer.train()
        touched = differences(trainer) if rlhf_patches.in_force(small.NAME) else ""
    begin, end = held.found
    return {
        "loss": trainer.loss,
        "modules": [(name, kind) for name, kind, _ in end],
        "the same objects": begin == end,
        "touched": touched,
        "checkpoint": {
            name.rpartition("_orig_mod.")[2]: [list(one.shape), float(one.double().norm())]
            for name, one in trainer.model.state_dict().items()
        },
    }


def differences(trainer: Any) -> str:
    """What the patch changes of the trainer and all that it holds, beside the loss that it is to multiply."""
    outputs, loss = {"aux_loss": torch.ones(())}, torch.zeros(())
    try:
        with untouched(trainer):
            _router_loss.multiplied(trainer, trainer.model_wrapped, outputs, loss, 2, None, torch.tensor(3))
    except AssertionError as found:
        return str(found)
    return ""


def sharded(make: Callable[[], Any]) -> dict[str, Any]:
    """With ``fsdp`` and ``torch_compile``."""
    with presented_as(DistributedType.MULTI_GPU):
        configured = {"accelerator_config": {"use_configured_state": True}}
        return {**step(small.made(make), ROWS, **FSDP1, **COMPILED, **configured), **wanted(make)}


def compiled(make: Callable[[], Any]) -> dict[str, Any]:
    """By the user, before the trainer sees it."""
    with presented_as(DistributedType.MULTI_CPU):
        model = torch.compile(small.made(make), backend="eager")
        return {**step(model, ROWS, use_cpu=True, remove_unused_columns=False), **wanted(make)}


ROWS = [row for rank in range(small.RANKS) for row in small.rows(rank)]


def wanted(make: Callable[[], Any]) -> dict[str, Any]:
    """In float64: this rank's loss, and each parameter's norm after the step."""
    loss, gradients = small.wanted(make, small.COEFFICIENT)
    start = dict(small.made(make).double().named_parameters())
    return {
        "wanted": loss,
        "wanted checkpoint": {name: float((start[name] - one).norm()) for name, one in gradients.items()},
    }


def musicgen() -> dict[str, Any]:
    """Its configuration has two texts, so it has no ``get_text_config()``."""
    text = transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    audio = transformers.EncodecConfig(
        hidden_size=16, codebook_size=16, codebook_dim=16, num_filters=4, num_lstm_layers=1, upsampling_ratios=[2, 2]
    )
    decoder = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "ffn_dim": 16, "num_attention_heads": 2}
    config = transformers.MusicgenConfig(
        text_encoder=text.to_dict(),
        audio_encoder=audio.to_dict(),
        decoder={**decoder, "num_codebooks": 2, "pad_token_id": 16, "bos_token_id": 16},
    )
    torch.manual_seed(0)
    model = transformers.MusicgenForConditionalGeneration(config)
    model.decoder.config.decoder_start_token_id = 16
    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            "input_ids": torch.randint(32, (4,), generator=generator),
            "labels": torch.randint(16, (6, 2), generator=generator),
        }
        for _ in range(small.RANKS * small.ROWS)
    ]
    with presented_as(DistributedType.MULTI_CPU):
        return step(model, rows, use_cpu=True, ddp_find_unused_parameters=True)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "dense, sharded and compiled": lambda: sharded(small.dense),
    "mixture, sharded and compiled": lambda: sharded(small.qwen3_moe),
    "mixture, compiled": lambda: compiled(small.qwen3_moe),
    "Musicgen": musicgen,
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    options = parser.parse_args()
    torch.compiler.set_stance("force_eager")  # what counts is the wrappers; tracing the model takes seconds
    states.report(small.NAME, lambda: {name: CASES[name]() for name in options.cases}, options.out, reverted=False)
