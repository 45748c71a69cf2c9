"""Token log-probabilities on a GPU, one rank: ``python benchmarks/logprob_on_gpu.py`` where torch sees one.

torch's own (`log_softmax` of the logits in float32), SkyRL's releases beside this environment's own
(tests/environments/side-by-side), and ours, with work buffers of several sizes. A step is forward and backward; memory
is what the allocator has handed out at once beyond the logits, in multiples of them; times are by the GPU's events,
medians over rounds in which the implementations take turns, in multiples of ours as it is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlhf_patches.patches.vocab_parallel import counters, softmax
from rlhf_patches.patches.vocab_parallel.logprob import token_logprobs
from tests.harness import upstream_logprob
from tests.harness.token_reference import made, reference

FEW = 64  # tokens do not depend on each other: these stand for all
MIB = 2**20


def of_torch(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, target[..., None])[..., 0]


def of_skyrl(module: Any, chunk: int) -> Callable[..., Any]:
    def compute(logits: torch.Tensor, target: torch.Tensor) -> Any:
        group, size = torch.distributed.group.WORLD, logits.shape[-1]
        return module.ChunkedDistributedLogprob.apply(logits, target, 0, size, chunk, group, False)

    return compute


def ours(work_bytes: int) -> Callable[..., Any]:
    def compute(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        softmax.WORK_BYTES_ON_GPU = work_bytes
        return token_logprobs(logits, target, 0, logits.shape[-1])

    return compute


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[151_936, 16_384])
    parser.add_argument("--chunk", type=int, default=1024, help="SkyRL's tokens at once")
    parser.add_argument("--work", type=int, nargs="+", default=[2, 8, 16, 64, 128, 256], help="MiB of work buffers")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU; benchmarks/logprob.py is for the CPU")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    torch.set_default_device("cuda")
    as_it_is = softmax.WORK_BYTES_ON_GPU
    functions: dict[str, Callable[..., Any]] = {"torch": of_torch}
    for version, file in upstream_logprob.find().items():
        module = upstream_logprob.load(file, torch.distributed.group.WORLD)
        functions[f"SkyRL {version}"] = of_skyrl(module, options.chunk)
    functions |= {f"ours, {size} MiB": ours(size * MIB) for size in options.work}
    functions["ours"] = ours(as_it_is)
    properties = torch.cuda.get_device_properties(0)
    print(
        f"{properties.name}, {options.dtype} logits, batch 1, {options.rounds} rounds, torch {torch.__version__}, "
        f"ours with {as_it_is // MIB} MiB\n"
        "  tokens  vocabulary  implementation    extra memory (logits)     time        ms   largest error\n"
        "                                        forward   backward                         log-prob  gradient"
    )
    for tokens, vocabulary in [(tokens, size) for size in options.vocabularies for tokens in options.sequences]:
        for name, row in measured(functions, tokens, vocabulary, options).items():
            print(
                f"{tokens:8d}  {vocabulary:10d}  {name:16s}  {row['forward']:7.2f}  {row['backward']:9.2f}  "
                f"{row['times']:9.2f}  {row['ms']:8.2f}   {row['log-prob']:.1e}   {row['gradient']:.1e}",
                flush=True,
            )
    torch.distributed.destroy_process_group()
    return 0


def measured(
    functions: dict[str, Callable[..., Any]], tokens: int, vocabulary: int, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    values = (torch.randn(1, tokens, vocabulary) * 3).to(getattr(torch, options.dtype))
    target, weights = torch.randint(vocabulary, (1, tokens)), torch.randn(1, tokens)
    exact, _, of_logits = reference(values[:, :FEW], target[:, :FEW], weights[:, :FEW])
    gradients: list[torch.Tensor] = []

    def keep(gradient: torch.Tensor) -> None:
        gradients[:] = [gradient[:, :FEW].clone()]

    found: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(options.rounds + 2):  # the first two warm up: one for memory, errors and compilers
        for name in list(functions)[:: 1 if number % 2 else -1]:
            logits = made(values, keep)
            counters.reset()
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            begun.record()
            log_probs = functions[name](logits, target)
            of_forward = torch.cuda.max_memory_allocated() - before
            del logits
            torch.cuda.reset_peak_memory_stats()
            (log_probs * weights).sum().backward()
            ended.record()
            torch.cuda.synchronize()
            of_backward = torch.cuda.max_memory_allocated() - before
            if number < 2:
                found[name] = {
                    "forward": of_forward / values.nbytes,
                    "backward": of_backward / values.nbytes,
                    "log-prob": (log_probs.detach()[:, :FEW].double() - exact).abs().max().item(),
                    "gradient": (gradients[0].double() - of_logits).abs().max().item(),
                }
                assert "ours" not in name or counters.observed() == {"backward in place": 1}, counters.observed()
            else:
                times[name].append(begun.elapsed_time(ended))
            del log_probs
    for name in functions:
        found[name]["times"] = statistics.median(a / b for a, b in zip(times[name], times["ours"], strict=True))
        found[name]["ms"] = statistics.median(times[name])
    return found


if __name__ == "__main__":
    sys.exit(main())
