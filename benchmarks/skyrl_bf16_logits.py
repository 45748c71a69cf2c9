"""What SkyRL 0.2.0's training step takes beside the model: ``python benchmarks/skyrl_bf16_logits.py``.

The real `MegatronModelWrapper` around the tests' GPTModel in bfloat16, on two gloo ranks, one thread each, with half of
the vocabulary each: as released, and with combinations of the patches. One micro-batch, forward and backward, and one
of inference. Memory is the most that the allocator hands out at once, in multiples of the logits in bfloat16; it has
the model's activations in it, which are small here. Times are medians over the rounds, in multiples of the release's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
COMBINATIONS: dict[str, list[str]] = {
    "as released": [],
    "the other patches": ["skyrl-*-backward", "skyrl-sequence-parallel-logits"],
    "skyrl-bf16-logits": ["skyrl-bf16-logits"],
    "and log-probabilities": ["skyrl-bf16-logits", "skyrl-logprob-backward"],
    "and entropies": ["skyrl-bf16-logits", "skyrl-logprob-backward", "skyrl-entropy-backward"],
    "all": ["skyrl-*"],
}


def on_each_rank(options: argparse.Namespace) -> None:
    import torch

    import rlhf_patches
    from rlhf_patches.patches.skyrl import _logits
    from tests.harness.token_reference import counted_all_reduces, peak_memory
    from tests.patches.skyrl import bf16_logits_ranks as ranks

    torch.distributed.init_process_group("gloo")
    ranks.parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    training, rank = ranks.training, torch.distributed.get_rank()
    release = training.skyrl_on_cpu.install()
    training.VOCABULARY, training.LENGTH = 2 * options.vocabulary, options.sequence
    unit = 2 * training.ROWS * options.sequence * options.vocabulary
    _logits.CHUNK_BYTES = 2 * unit // options.chunks
    if rank == 0:
        print(
            f"skyrl {release}, {training.ROWS} x {options.sequence} tokens, {options.vocabulary} columns per rank, "
            f"{options.chunks} chunks, {options.rounds} rounds, torch {torch.__version__}\n"
            f"{'case':20} {'patches':22} {'memory/step':>12} {'inference':>10} {'all-reduces':>12} {'time':>6}  logits"
        )
    for name in ("plain", "packed", "entropy in the loss", "temperature"):
        case = ranks.CASES[name]
        temperature = case.get("temperature", 1.0)
        model = training.make_model(True)
        wrapper = ranks.wrapper_of(model, {key: value for key, value in case.items() if key != "chunk"})

        def step(temperature: float = temperature, wrapper: Any = wrapper) -> float:
            batches = training.make_micro_batches()[:1]
            torch.distributed.barrier()
            started = time.perf_counter()
            wrapper.forward_backward_mini_batch(batches, training.LENGTH, training.ROWS, temperature=temperature)
            return time.perf_counter() - started

        rows: dict[str, str] = {}
        times: dict[str, list[float]] = {combination: [] for combination in COMBINATIONS}
        for number in range(options.rounds + 1):
            for combination, patches in COMBINATIONS.items():
                if patches:
                    rlhf_patches.apply(only=patches)
                model.zero_grad_buffer()
                if number:
                    times[combination].append(step())
                else:
                    with counted_all_reduces() as collectives, ranks.logits_seen() as seen, peak_memory() as of_step:
                        step()
                    batches = training.make_micro_batches()[:1]
                    with torch.no_grad(), peak_memory() as of_inference:
                        wrapper.forward(batches, training.LENGTH, training.ROWS, temperature)
                    rows[combination] = (
                        f"{of_step.bytes / unit:12.2f} {of_inference.bytes / unit:10.2f} {len(collectives):12d} "
                        f"{{:6.2f}}  {seen[0].split()[0]}"
                    )
                rlhf_patches.revert()
        for combination, row in rows.items():
            ratios = [a / b for a, b in zip(times[combination], times["as released"], strict=True)]
            if rank == 0:
                print(f"{name:20} {combination:22} {row.format(statistics.median(ratios))}", flush=True)
    torch.distributed.barrier()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=16_384, help="columns on each rank")
    parser.add_argument("--chunks", type=int, default=8, help="into which the default size cuts the logits")
    options = parser.parse_args()
    os.environ |= {"KINETO_LOG_LEVEL": "5", "CUDA_VISIBLE_DEVICES": ""}
    if "RANK" in os.environ:
        on_each_rank(options)
    from torch.distributed.run import main as torchrun

    from tests.harness.side_by_side import on_path

    # What SkyRL compiles is one product and sum; compiling it would take a GPU, or a minute.
    os.environ |= {**on_path("skyrl-0.2"), "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    torchrun(["--standalone", "--nproc-per-node", "2", __file__, *sys.argv[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
