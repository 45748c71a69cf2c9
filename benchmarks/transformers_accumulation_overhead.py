"""What the accumulation's patch costs a training step: ``python benchmarks/transformers_accumulation_overhead.py``.

`Trainer.training_step` is timed with and without the patch, in turns within each round, in the thread's own CPU time;
figures are lower quartiles of all calls, of tiny models. A micro-batch within a window, the first micro-batch of each
window, at which the patch checks the code, and reads of a tensor's value, which wait for a device, without the Python
numbers that autograd keeps as tensors.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf_patches
from rlhf_patches.proving import states

PATCH = "transformers-accumulation-scale"
WARM = 16
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


class Masked(torch.nn.Module):
    """Somebody's own: the code of its forward has to be looked through, since a mask could be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers.LlamaModel(transformers.LlamaConfig(**SMALL))
        self.head = torch.nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.inner(input_ids).last_hidden_state)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        mask = (labels.flatten() != -100).float()
        return {"loss": (losses * mask).sum() / mask.sum(), "logits": logits}


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "causal LM (Llama)": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)),
    "mixture (Mixtral)": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **EXPERTS)),
    "own masked mean": Masked,
}


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten._local_scalar_dense.default:
            return function(*args, **(kwargs or {}))
        if not isinstance(args[0], torch.Tensor):  # a Python number that autograd keeps
            return args[0]
        self.count += 1
        return function(*args)


def seconds(action: Callable[[], object], times: int) -> list[float]:
    """Of each call; the first calls of a code object, which Python has not specialized yet, are left out."""
    for _ in range(WARM):
        action()
    found = []
    for _ in range(times):
        start = time.thread_time()
        action()
        found.append(time.thread_time() - start)
    return found


def in_turns(action: Callable[[], object], rounds: int, times: int) -> tuple[float, float]:
    """Microseconds of a call, released and patched."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for patched in (False, True) if number % 2 else (True, False):
            _set(patched)
            found[patched] += seconds(action, times)
    _set(False)
    return lower_quartile(found[False]), lower_quartile(found[True])


def lower_quartile(found: list[float]) -> float:
    """In microseconds: other programs make calls longer, and never shorter."""
    return statistics.quantiles(found, n=4)[0] * 1e6


def _set(patched: bool) -> None:
    if patched:
        report = rlhf_patches.apply(only=PATCH)[PATCH]
        assert str(report.status) == "applied", report
    else:
        rlhf_patches.revert(only=PATCH)


def reads(action: Callable[[], object], patched: bool) -> int:
    _set(patched)
    action()
    with Reads() as counted:
        action()
    _set(False)
    return counted.count


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--times", type=int, default=40, help="each in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}; {options.rounds} rounds of {options.times}; microseconds")
    print("                     a micro-batch: released  patched  more   a window's first: more   reads of values")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        arguments = transformers.TrainingArguments(
            states.folder(), gradient_accumulation_steps=8, use_cpu=True, report_to="none"
        )
        trainer = transformers.Trainer(model=model, args=arguments)
        trainer.current_gradient_accumulation_steps = 8
        trainer.create_optimizer()
        batch = {"input_ids": torch.arange(3, 11)[None], "labels": torch.arange(3, 11)[None]}
        items = torch.tensor(56.0)
        step = functools.partial(trainer.training_step, model, batch, items)
        released, patched = in_turns(step, options.rounds, options.times)
        window = in_turns(functools.partial(_first_of_a_window, trainer, step), options.rounds, options.times)
        counts = [reads(step, state) for state in (False, True)]
        print(
            f"{name:20s}           {released:8.0f} {patched:8.0f} {patched - released:5.0f}"
            f"               {window[1] - window[0]:8.0f}   {counts[0]} {counts[1]}",
            flush=True,
        )
    loss = torch.ones((), requires_grad=True) * 2
    alone = lower_quartile(seconds(lambda: loss / 8, options.rounds * options.times))
    print(f"the division by 8 that a released Trainer leaves out, alone: {alone:.1f}")
    return 0


def _first_of_a_window(trainer: Any, step: Callable[[], object]) -> None:
    trainer.state.global_step += 1
    step()


if __name__ == "__main__":
    sys.exit(main())
