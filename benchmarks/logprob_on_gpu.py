"""Token log-probabilities on a GPU, one rank: ``python benchmarks/logprob_on_gpu.py`` where torch sees one.

torch's own (`log_softmax` of the logits in float32), SkyRL's releases beside this environment's own
(tests/environments/side-by-side), megatron-core's two cross entropies and Liger's where they are installed, and ours,
with kernels and by torch's operators. A step is forward and backward; memory is what the allocator has handed out at
once beyond the logits, in multiples of them; times are by the GPU's events, medians over rounds in which the
implementations take turns, in multiples of ours as it is. The copy's share is that of the bandwidth at which the GPU
copies the logits, where a step reads them twice and writes them once, which is the least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlhf_patches.patches._vocab_parallel import counters, fused
from rlhf_patches.patches._vocab_parallel.logprob import token_logprobs
from tests.harness import upstream_logprob
from tests.harness.token_reference import made, reference

FEW = 64  # tokens do not depend on each other: these stand for all


def of_torch(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, target[..., None])[..., 0]


def of_skyrl(module: Any, chunk: int) -> Callable[..., Any]:
    def compute(logits: torch.Tensor, target: torch.Tensor) -> Any:
        group, size = torch.distributed.group.WORLD, logits.shape[-1]
        return module.ChunkedDistributedLogprob.apply(logits, target, 0, size, chunk, group, False)

    return compute


def of_megatron() -> dict[str, Callable[..., Any]]:
    try:
        from megatron.core import parallel_state
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    except ImportError:
        return {}
    parallel_state.initialize_model_parallel()
    group = parallel_state.get_tensor_model_parallel_group()
    return {
        "megatron-core": lambda logits, target: -vocab_parallel_cross_entropy(logits, target),
        "its fused one": lambda logits, target: -fused_vocab_parallel_cross_entropy(logits, target, group),
    }


def of_liger() -> dict[str, Callable[..., Any]]:
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy
    except ImportError:
        return {}

    def compute(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = liger_cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
        return -loss.float().view(target.shape)

    return {"Liger": compute}


def ours(*, kernels: bool = True) -> Callable[..., Any]:
    def compute(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fused._failed = not kernels
        return token_logprobs(logits, target, 0, logits.shape[-1])

    return compute


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8_192, 32_768])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[152_064])
    parser.add_argument("--chunk", type=int, default=1024, help="SkyRL's tokens at once")
    parser.add_argument("--only", nargs="+", help="implementations by name; all that are there, if none is named")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU; benchmarks/logprob.py is for the CPU")
    os.environ["TORCHDYNAMO_DISABLE"] = "0"  # megatron-core compiles its fused one
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    functions: dict[str, Callable[..., Any]] = {"torch": of_torch}
    for version, file in upstream_logprob.find().items():
        module = upstream_logprob.load(file, torch.distributed.group.WORLD)
        functions[f"SkyRL {version}"] = of_skyrl(module, options.chunk)
    functions |= of_megatron() | of_liger() | {"ours, operators": ours(kernels=False), "ours": ours()}
    functions = {name: each for name, each in functions.items() if name in (options.only or functions)}
    print(
        f"{torch.cuda.get_device_properties(0).name}, {options.dtype} logits, batch 1, {options.rounds} rounds, "
        f"torch {torch.__version__}\n"
        "  tokens  vocabulary  implementation    extra memory (logits)     time        ms  of copy   largest error\n"
        "                                        forward   backward                                 log-prob  gradient"
    )
    for tokens, vocabulary in [(tokens, size) for size in options.vocabularies for tokens in options.sequences]:
        for name, row in measured(functions, tokens, vocabulary, options).items():
            print(
                f"{tokens:8d}  {vocabulary:10d}  {name:16s}  {row['forward']:7.2f}  {row['backward']:9.2f}  "
                f"{row['times']:9.2f}  {row['ms']:8.2f}  {row['of copy']:7.0%}   {row['log-prob']:.1e}   "
                f"{row['gradient']:.1e}",
                flush=True,
            )
    torch.distributed.destroy_process_group()
    return 0


def measured(
    functions: dict[str, Callable[..., Any]], tokens: int, vocabulary: int, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    values = (torch.randn(1, tokens, vocabulary) * 3).to(getattr(torch, options.dtype))
    target, weights = torch.randint(vocabulary, (1, tokens)), torch.randn(1, tokens)
    exact, _, of_logits = reference(values[:, :FEW], target[:, :FEW], weights[:, :FEW])
    gradients: list[torch.Tensor] = []

    def keep(gradient: torch.Tensor) -> None:
        gradients[:] = [gradient[:, :FEW].clone()]

    torch.set_default_device(None)  # it takes a microsecond or two of every call
    copied = copying(values)
    found: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(options.rounds + 2):  # the first two warm up: one for memory, errors and compilers
        for name in list(times)[:: 1 if number % 2 else -1]:
            try:
                row, took = step(functions[name], values, keep, target, weights, timed=number >= 2)
            except torch.OutOfMemoryError as error:
                print(f"{tokens:8d}  {vocabulary:10d}  {name:16s}  {str(error).split('. ')[1]}", flush=True)
                del times[name], error
                torch.cuda.empty_cache()
                continue
            if number < 2:
                row["log-prob"] = (row.pop("found").double() - exact).abs().max().item()
                row["gradient"] = (gradients[0].double() - of_logits).abs().max().item()
                found[name] = row
                assert "ours" not in name or counters.observed() == {"backward in place": 1}, counters.observed()
                assert name != "ours" or not fused._failed, "no kernel"
            else:
                times[name].append(took)
    for name, each in times.items():
        found[name]["times"] = statistics.median(a / b for a, b in zip(each, times["ours"], strict=True))
        found[name]["ms"] = statistics.median(each)
        found[name]["of copy"] = 1.5 * copied / found[name]["ms"]
    return {name: found[name] for name in times}


def step(
    function: Any, values: torch.Tensor, keep: Any, target: torch.Tensor, weights: torch.Tensor, *, timed: bool
) -> tuple[Any, float]:
    """What one forward and backward need and find, or, without asking the allocator in between, its milliseconds."""
    with torch.device("cuda"):
        logits = made(values, keep)
    counters.reset()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begun.record()
    log_probs = function(logits, target)
    del logits
    if not timed:
        of_forward = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
    (log_probs * weights).sum().backward()
    ended.record()
    torch.cuda.synchronize()
    if timed:
        return None, begun.elapsed_time(ended)
    of_backward = torch.cuda.max_memory_allocated() - before
    row = {"forward": of_forward / values.nbytes, "backward": of_backward / values.nbytes}
    return {**row, "found": log_probs.detach()[:, :FEW]}, 0.0


def copying(values: torch.Tensor) -> float:
    """Milliseconds for a copy of these, the median of 20."""
    times = []
    copy = torch.empty_like(values)
    for _ in range(22):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        copy.copy_(values)
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
