"""The Triton kernels of log-probabilities and entropies against float64: ``--device cpu|cuda``, a rank's environment.

On the CPU by Triton's interpreter, which computes what the kernels say. Prints one line of JSON: errors by case, and
what the kernels have left to torch's operators.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

options = argparse.ArgumentParser()
options.add_argument("--device", choices=["cpu", "cuda"], required=True)
options.add_argument("--some", action="store_true", help="of the dear ones, one of each kind")
given = options.parse_args()
DEVICE = given.device
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from rlhf_patches.patches._vocab_parallel import counters, fused, softmax
from tests.harness.token_reference import made, reference

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
KINDS = {"log-probability": (True, False), "entropy": (False, True), "both": (True, True)}
INFINITE = -float("inf")


def values(shape: tuple[int, ...], dtype: torch.dtype, masked: bool) -> torch.Tensor:
    """The whole vocabulary's logits. Masked: the first columns, which are all of rank 0's where there are two ranks."""
    found = (torch.randn(*shape) * 3).to(dtype)
    if masked:
        found[..., : shape[-1] // RANKS if RANKS > 1 else shape[-1] // 2] = INFINITE
    return found


def case(
    kind: str,
    whole: torch.Tensor,
    *,
    strides: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    group: Any = None,
) -> list[float]:
    """The largest errors of log-probabilities, entropies and of the gradient of their weighted sum."""
    size = whole.shape[-1] // RANKS
    own = slice(RANK * size, (RANK + 1) * size)
    tokens = whole.shape[:-1]
    target = torch.randint(whole.shape[-1] // 2 + 1, whole.shape[-1], tokens)
    weights, of_entropy = (torch.randn(tokens) for _ in range(2))
    with_log_probs, with_entropy = KINDS[kind]
    elsewhere = (target < own.start) | (target >= own.stop)
    found: list[torch.Tensor] = []
    logits = made(strides(whole[..., own]), lambda gradient: found.append(gradient.clone()))
    log_probs, entropy = softmax.VocabParallelLogprobEntropy.apply(
        logits, (target - own.start).masked_fill(elsewhere, -1) if with_log_probs else None, group, with_entropy, False
    )
    del logits
    loss: Any = (log_probs * weights).sum() if with_log_probs else 0
    loss = loss + (entropy * of_entropy).sum() if with_entropy else loss
    loss.backward()
    finite = whole.double().clamp(min=-1e4)  # exp of it is 0, as of -inf
    wanted = reference(finite, target, weights * with_log_probs, of_entropy if with_entropy else None)
    pairs = ((log_probs, wanted[0]), (entropy, wanted[1]), (found[0], wanted[2][..., own]))
    return [0.0 if one is None else (one.double() - exact).abs().max().item() for one, exact in pairs]


def kinds_of(dtype: torch.dtype, shape: tuple[int, ...]) -> list[str]:
    """All of `KINDS`; of some, one of other dtypes and of many columns, and none of both."""
    other, many = dtype is not torch.float32, shape[-1] > 1000
    if given.some and (other or many):
        return [] if other and many else ["both"]
    return [*KINDS]


def cases() -> dict[str, list[float]]:
    group = torch.distributed.group.WORLD if RANKS > 1 else None
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((5, 100), (2, 3, 300), (3, 20_000)):
            for masked in (False, True):
                for kind in kinds_of(dtype, shape):
                    name = f"{str(dtype).removeprefix('torch.')}, {shape}, {kind}" + ", masked" * masked
                    found[name] = case(kind, values(shape, dtype, masked), group=group)
    turned = values((4, 3, 100), torch.float32, False)
    found["float32, sequence first"] = case(
        "both", turned, strides=lambda logits: logits.transpose(0, 1).contiguous().transpose(0, 1), group=group
    )
    return found


def hopeless() -> list[bool]:
    """What NaN, and what -inf alone, make of a token, and that its neighbor stays what it was."""
    logits = values((3, 64), torch.float32, False)
    logits[0, 3], logits[1] = float("nan"), INFINITE
    logits.requires_grad_()
    log_probs, entropy = softmax.VocabParallelLogprobEntropy.apply(
        logits * 1, torch.tensor([1, 2, 3]), None, True, False
    )
    (log_probs + entropy).sum().backward()
    return [bool(each[row].isfinite().all()) for row in range(3) for each in (log_probs, entropy, logits.grad)]


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_device(DEVICE)
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        if DEVICE == "cpu":
            serves = lambda logits: logits.stride(-1) == 1 and not fused._failed  # noqa: E731
            stack.enter_context(mock.patch.object(fused, "serves", serves))
            stack.enter_context(mock.patch.object(torch.cuda, "device", mock.Mock(side_effect=contextlib.nullcontext)))
        operators = stack.enter_context(mock.patch.object(softmax, "_write_gradient", wraps=softmax._write_gradient))
        counters.reset()
        found = cases()
        report = {"cases": found, "counted": counters.observed(), "by operators": operators.call_count}
        report["hopeless"] = hopeless() if RANKS == 1 else []
        report["failed"] = fused._failed
    print(json.dumps(report))


if __name__ == "__main__":
    main()
