"""What Megatron's two cross entropies do on each rank: the real megatron-core, gloo, one rank or more.

``--out FOLDER --tp SIZE PART ...``. A part runs its cases as released, with the patch, and after a revert; each rank
writes its report.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import checkpoint, model_parallel_cuda_manual_seed
from megatron.core.transformer.module import float16_to_fp32

import rlhf_patches
from rlhf_patches.patches._vocab_parallel import counters, softmax
from tests.harness.token_reference import counted_all_reduces, made, peak_memory

PATCH = "megatron-core-cross-entropy-in-place"
S, B, SHARD = 12, 2, 64  # positions, rows, columns of a rank
BLOCK = 4 * 4 * SHARD  # bytes: several blocks here too, of four tokens
Case = dict[str, Any]
NEWER = "tp_group" in inspect.signature(fused_vocab_parallel_cross_entropy).parameters

CASES: dict[str, Case] = {
    f"{function} {kind} {dtype}": {"function": function, "kind": kind, "dtype": dtype}
    for function in ("plain", "fused")
    for dtype in ("float32", "bfloat16")
    for kind in ("as it is", "view", "div_", "held", "leaf", "transposed", "tanh", "unknown", "recompute")
    if function == "plain" or kind in ("as it is", "held", "unknown")
} | {
    "fused as it is float16": {"function": "fused", "kind": "as it is", "dtype": "float16"},
    "plain float16_to_fp32 bfloat16": {"function": "plain", "kind": "float16_to_fp32", "dtype": "bfloat16"},
    "smoothed held float32": {"function": "plain", "kind": "held", "dtype": "float32", "smoothing": 0.1},
    "smoothed held bfloat16": {"function": "plain", "kind": "held", "dtype": "bfloat16", "smoothing": 0.1},
}


def losses_of(function: str, logits: torch.Tensor, target: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """As Megatron's language models call them."""
    if function == "plain":
        return vocab_parallel_cross_entropy(logits, target, *([smoothing] if smoothing else []))
    group = [parallel_state.get_tensor_model_parallel_group()] if NEWER else []
    return fused_vocab_parallel_cross_entropy(logits, target, *group)


def reference(whole: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of their weighted sum, in float64. A target that no rank has counts as the largest."""
    exact = whole.detach().double().requires_grad_()
    known = (target >= 0) & (target < whole.shape[-1])
    chosen = exact.gather(-1, target.clamp(0, whole.shape[-1] - 1)[..., None])[..., 0]
    losses = exact.logsumexp(-1) - torch.where(known, chosen, exact.detach().amax(-1))
    (gradient,) = torch.autograd.grad((losses * weights.double()).sum(), exact)
    return losses.detach(), gradient


def run(case: Case) -> Case:
    """Losses and their backward on this rank's part of the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    dtype, kind = getattr(torch, case["dtype"]), case["kind"]
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    part = slice(rank * SHARD, (rank + 1) * SHARD)
    whole = (torch.randn(S, B, ranks * SHARD, generator=generator) * (1 if kind == "tanh" else 4)).to(dtype)
    target = torch.randint(ranks * SHARD, (S, B), generator=generator)
    weights = torch.randn(S, B, generator=generator)
    if kind == "unknown":
        target[::3] = torch.tensor([-100, ranks * SHARD + 3])
    if kind == "transposed":
        whole, target, weights = (tensor.transpose(0, 1) for tensor in (whole, target, weights))
    mine, gradients = whole[..., part], []
    counters.reset()
    wanted, of_logits = reference(whole, target, weights)
    if kind == "recompute":
        return recomputed(case, mine, target, weights, wanted, of_logits[..., part])
    if kind == "leaf":
        logits = mine.clone().requires_grad_()
    elif kind == "view":
        logits = made(mine.reshape(S * B, SHARD), lambda g: gradients.append(g.clone().view(S, B, SHARD))).view(
            S, B, -1
        )
    elif kind == "div_":
        logits = made(mine * 2, lambda g: gradients.append(g * 2)).div_(2)
    else:
        logits = made(mine if kind == "transposed" else mine.contiguous(), lambda g: gradients.append(g.clone()))
    if kind == "tanh":  # whose backward reads its result
        logits = logits.tanh()
        wanted, of_logits = reference(whole.tanh(), target, weights)
        of_logits = of_logits * (1 - whole.tanh().double() ** 2)
    if kind == "float16_to_fp32":
        logits = float16_to_fp32(logits)
    values = logits.detach().clone()
    held = [logits] if kind in ("held", "leaf") else []
    try:
        with counted_all_reduces() as forward:
            losses = losses_of(case["function"], logits, target, case.get("smoothing", 0.0))
        unchanged = torch.equal(logits.detach(), values)
        del logits
        with counted_all_reduces() as backward:
            (losses * weights).sum().backward()
    except RuntimeError as error:
        return {"failed": str(error)}
    gradient = held[0].grad if kind == "leaf" else gradients[0]
    assert gradient is not None
    exact = of_logits[..., part]
    return {
        "losses": (losses.detach().double() - wanted).abs().max().item(),
        "bits": losses.detach().flatten().tolist(),
        "gradient": ((gradient.double() - exact).abs().max() / exact.abs().max()).item(),
        "gradient bits": gradient.double().sum().item().hex(),
        "dtypes": [str(losses.dtype), str(gradient.dtype)],
        "unchanged": unchanged,
        "unchanged after backward": not held or torch.equal(held[0].detach(), values),
        "collectives": [len(forward), len(backward)],
        "observed": counters.observed(),
    }


def recomputed(
    case: Case, values: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, wanted: Any, exact: Any
) -> Case:
    """The output layer and the loss in Megatron's activation checkpoint: forward runs again within backward."""
    inputs = values.detach().clone().requires_grad_()
    losses = checkpoint(lambda hidden: losses_of(case["function"], hidden * 1.0, target), False, inputs)
    (losses * weights).sum().backward()
    assert inputs.grad is not None
    return {
        "losses": (losses.detach().double() - wanted).abs().max().item(),
        "bits": losses.detach().flatten().tolist(),
        "gradient": ((inputs.grad.double() - exact).abs().max() / exact.abs().max()).item(),
        "gradient bits": inputs.grad.double().sum().item().hex(),
        "observed": counters.observed(),
    }


def the_first_step() -> Case:
    """What code gets that calls the steps of the computation itself: memory of its own."""
    logits = torch.randn(2, 3, SHARD)
    found, _ = VocabParallelCrossEntropy.calculate_logits_max(logits)
    return {"shares": found.data_ptr() == logits.data_ptr(), "dtype": str(found.dtype)}


def others() -> Case:
    """What Megatron takes besides, such as targets ``[T]`` of logits ``[1, T, V / TP]``, which it broadcasts."""
    generator = torch.Generator().manual_seed(7)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    values = torch.randn(1, S, SHARD, generator=generator)
    target = torch.randint(ranks * SHARD, (S,), generator=generator)
    certain = torch.full((1, SHARD), -1e9)
    certain[0, 0] = 0.0 if parallel_state.get_tensor_model_parallel_rank() == 0 else -1e9
    losses = {
        "other shape": losses_of("plain", values.clone(), target),
        "integers": losses_of("plain", (values[0] * 4).long(), target),
        "one token": losses_of("plain", values[0, 0].clone(), target[0]),
        "int32 targets": losses_of("plain", values[0].clone(), target.int()),
        "float64": losses_of("plain", values[0].double(), target),
        "by name": vocab_parallel_cross_entropy(target=target, vocab_parallel_logits=values[0].clone()),
        "certain": losses_of("plain", certain, torch.zeros(1, dtype=torch.long)),
    }
    with torch.inference_mode():
        losses["inference mode"] = losses_of("plain", values[0].clone(), target)
    return {name: [loss.hex() for loss in found.flatten().tolist()] for name, found in losses.items()}


# ------------------------------------------------------------------------------------- memory, training

TOKENS, COLUMNS = 1024, 8192


def memory(case: Case) -> Case:
    """Bytes beyond the logits, as a multiple of theirs, in forward and backward and kept in between."""
    values = torch.zeros(TOKENS, 1, COLUMNS, dtype=getattr(torch, case["dtype"]))
    target, sizes = torch.zeros(TOKENS, 1, dtype=torch.long), []
    logits = made(values, lambda gradient: sizes.append(gradient.nbytes))
    softmax.WORK_BYTES = 1 << 20  # small beside these logits, as the usual one is beside usual logits
    counters.reset()
    with peak_memory() as of_forward:
        losses = losses_of(case["function"], logits, target)
    del logits
    total = losses.sum()
    with peak_memory() as of_backward:
        total.backward()
    softmax.WORK_BYTES = BLOCK
    return {
        "forward": of_forward.bytes / values.nbytes,
        "backward": of_backward.bytes / values.nbytes,
        "observed": counters.observed(),
    }


def training(case: Case) -> Case:
    """A step of a GPT with Megatron's own loss: the losses, and the gradients of all parameters."""
    from tests.harness import rollout_training

    config = dataclasses.replace(
        rollout_training.make_config(),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        cross_entropy_loss_fusion=case["function"] == "fused",
        **({"cross_entropy_fusion_impl": "native"} if NEWER else {}),
        **({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    )
    model_parallel_cuda_manual_seed(1)
    model = rollout_training.make_gpt(config, 1)
    batch = rollout_training.make_batch(1, 0, 0, 0)
    positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
    mask = torch.ones(batch.inputs.shape[1], batch.inputs.shape[1], dtype=torch.bool).triu(1)
    counters.reset()
    losses = model(batch.inputs, positions, mask[None, None], labels=batch.targets)
    (losses * (batch.values > 0.3)).sum().backward()
    return {
        "losses": losses.detach(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "observed": counters.observed(),
    }


def compared(before: Case, after: Case) -> Case:
    gradients = before["gradients"]
    return {
        "same losses": torch.equal(before["losses"], after["losses"]),
        "gradients": max(
            ((after["gradients"][name] - one).norm() / one.norm()).item() for name, one in gradients.items()
        ),
        "parameters": len(gradients),
        "observed": after["observed"],
    }


# ------------------------------------------------------------------------------------- all of it

MEMORY = {
    f"{function} {dtype}": {"function": function, "dtype": dtype}
    for function in ("plain", "fused")
    for dtype in ("float32", "bfloat16")
}
TRAINING: dict[str, Case] = {"plain": {"function": "plain"}, "fused": {"function": "fused"}}
PARTS: dict[str, tuple[dict[str, Case], Callable[[Case], Case]]] = {
    "functions": (CASES, run),
    "memory": (MEMORY, memory),
    "training": (TRAINING, training),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    options = parser.parse_args()
    softmax.WORK_BYTES = BLOCK
    # Megatron's fused functions, which inductor cannot compile where CUDA stands for the CPU.
    torch.compiler.set_stance("force_eager")
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp,
        context_parallel_size=torch.distributed.get_world_size() // options.tp,
    )
    report: Case = {"version": importlib.metadata.version("megatron-core")}
    states: dict[str, Any] = {"before": None, "after": None, "reverted": None}
    for state in states:
        if state == "after":
            rlhf_patches.apply(only=PATCH)
            report["row"] = rlhf_patches.report()[PATCH].to_dict()
        elif state == "reverted":
            rlhf_patches.revert()
        states[state] = {
            part: {name: function(case) for name, case in cases.items()}
            for part, (cases, function) in PARTS.items()
            if part in options.parts and (part == "functions" or state != "reverted")
        }
        states[state]["first step"], states[state]["others"] = the_first_step(), others()
    if "training" in options.parts:
        pairs = (states[state].pop("training") for state in ("before", "after"))
        report["training"] = {name: compared(*both) for name, both in _zipped(*pairs)}
    report |= states
    rank = int(os.environ.get("RANK", "0"))
    (options.out / f"rank{rank}.json").write_text(json.dumps(report))


def _zipped(before: dict[str, Case], after: dict[str, Case]) -> list[tuple[str, tuple[Case, Case]]]:
    return [(name, (one, after[name])) for name, one in before.items()]
