"""TRL's chunked loss on a head that DeepSpeed ZeRO-3 partitions, unpatched and patched: ``make benchmarks``.

``python benchmarks/trl_chunked_nll.py`` in an environment with trl 1.6.0 to 1.14.2 and DeepSpeed
(tests/environments/trl.txt). Two gloo ranks, one thread each. A step is forward and backward; unpatched and
patched steps alternate, and figures are medians. The head is frozen (LoRA): with a trained one the unpatched release
has no step to be timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
NAME = "trl-chunked-nll-zero3"


def on_each_rank(options: argparse.Namespace) -> None:
    from tests.harness import zero3_on_cpu as zero3

    rank, communication = zero3.start()
    import torch
    from transformers.integrations.deepspeed import HfDeepSpeedConfig
    from trl.trainer import sft_trainer

    import rlhf_patches
    from tests.harness.token_reference import peak_memory

    configured = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # what TRL asks before it gathers
    head = torch.nn.Linear(options.hidden, options.vocabulary, bias=False).requires_grad_(False)
    weight = zero3.partition(head).weight

    def step(chunks: int) -> tuple[float, list[tuple[str, int]]]:
        tokens = chunks * options.chunk
        hidden = torch.randn(1, tokens, options.hidden, requires_grad=True)
        labels = torch.randint(0, options.vocabulary, (1, tokens))
        torch.distributed.barrier()
        started = time.perf_counter()
        with communication.during() as seen:
            loss, *_ = sft_trainer._chunked_cross_entropy_loss(hidden, weight, options.chunk, shift_labels=labels)
            loss.backward()
        return time.perf_counter() - started, seen

    if rank == 0:
        print(
            f"hidden size {options.hidden}, vocabulary {options.vocabulary}, {options.chunk} tokens per chunk, head of "
            f"{weight.ds_numel * 4 / 2**20:.0f} MiB; {options.rounds} rounds\n"
            "chunks  gathers          MiB gathered     seconds/step     time    peak MiB\n"
            "        trl  patched     trl  patched     trl     patched  ratio   trl   patched"
        )
    for chunks in options.chunks:
        times: dict[bool, list[float]] = {False: [], True: []}
        seen: dict[bool, Any] = {}
        peak: dict[bool, float] = {}
        for number in range(options.rounds + 1):
            for patched in (False, True) if number % 2 else (True, False):
                if patched:
                    rlhf_patches.apply(only=NAME)
                else:
                    rlhf_patches.revert()
                if number == 0:  # a warm-up, and slowed down by the measurement of memory
                    with peak_memory() as measured:
                        step(chunks)
                    peak[patched] = measured.bytes / 2**20
                else:
                    taken, seen[patched] = step(chunks)
                    times[patched].append(taken)
        if rank == 0:
            ratio = statistics.median(new / old for old, new in zip(times[False], times[True], strict=True))
            gathers = [len(seen[patched]) for patched in (False, True)]
            gathered = [sum(size for _, size in seen[patched]) / 2**20 for patched in (False, True)]
            seconds = [statistics.median(times[patched]) for patched in (False, True)]
            print(
                f"{chunks:6d}  {gathers[0]:3d}  {gathers[1]:7d}  {gathered[0]:6.0f}  {gathered[1]:7.0f}"
                f"     {seconds[0]:.3f}   {seconds[1]:7.3f}  {ratio:5.2f}  {peak[False]:5.0f}  {peak[True]:7.0f}",
                flush=True,
            )
    torch.distributed.barrier()
    del configured
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    options = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "5"
    if "RANK" in os.environ:
        on_each_rank(options)
    if importlib.util.find_spec("deepspeed") is None:
        print("no DeepSpeed in this environment: see tests/environments/trl.txt")
        return 0
    from torch.distributed.run import main as torchrun

    torchrun(["--standalone", "--nproc-per-node", "2", __file__, *sys.argv[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
