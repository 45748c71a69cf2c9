"""What eval mode costs a reference pass of ms-swift: ``python benchmarks/swift_reference_pass.py``.

The tests' tiny GPTModel with LoRA (real megatron-core, PEFT and ms-swift), which is where it costs most: the cost
goes with the number of modules, whatever their size. Entering and leaving the context is timed with and without the
patch, in turns within each round, and so is a forward within it; the figures are medians over the rounds, of the
thread's own time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import rlhf_patches
from tests.patches.swift import null_ref_context_ranks as reference_pass

PATCH = "swift-null-ref-context"


def seconds(action: Callable[[], object], times: int) -> float:
    # Without the tests' stand-in for CUDA, which slows down every access to a tensor's attributes.
    with torch._C.DisableTorchFunction():
        start = time.thread_time()
        for _ in range(times):
            action()
        return (time.thread_time() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--times", type=int, default=20, help="each in a round")
    options = parser.parse_args()
    reference_pass.prepare("megatron")
    print(f"medians of {options.rounds} rounds of {options.times}; microseconds")
    for batch, sequence in ((2, 16), (4, 512)):
        reference_pass.BATCH, reference_pass.SEQUENCE = batch, sequence
        for ref_adapter, kind in ((False, "adapter disabled"), (True, "reference adapter")):
            print(
                f"{kind}, {batch} x {sequence} tokens", *measure(ref_adapter, options.rounds, options.times), sep="\n  "
            )


def measure(ref_adapter: bool, rounds: int, times: int) -> list[str]:
    """The lines of one case."""
    trainer = reference_pass.lora_trainer(ref_adapter)

    def enter() -> None:
        with reference_pass.reference(trainer):
            pass

    def forward() -> None:
        reference_pass.reference_logps(trainer)

    taken: dict[str, list[float]] = {"released": [], "patched": [], "forward": []}
    for _ in range(rounds):
        taken["released"].append(seconds(enter, times))
        assert rlhf_patches.apply()[PATCH].status == "applied"
        taken["patched"].append(seconds(enter, times))
        taken["forward"].append(seconds(forward, 2) - taken["patched"][-1])
        rlhf_patches.revert()
    added = statistics.median(p - r for p, r in zip(taken["patched"], taken["released"], strict=True))
    share = added / statistics.median(taken["forward"])
    modules = sum(1 for _ in trainer.peft_models[0].modules())
    lines = [f"{name:10}{statistics.median(values) * 1e6:10.1f}" for name, values in taken.items()]
    return [
        *lines,
        f"{'added':10}{added * 1e6:10.1f}  for {modules} modules: {share:.2%} of the forward (goal: below 1 %)",
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
