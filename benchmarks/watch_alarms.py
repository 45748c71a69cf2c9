"""How often a watch speaks of a right run: ``python benchmarks/watch_alarms.py``, with the Python of environment-vllm.

TRL's GRPO on real vLLM, in the trainer's process, all patches on: each combination of temperature, full or LoRA,
accumulation, learning rate and length of completions is a run of a few steps by itself, and so are a few more. Printed
are the alarms, which should be none, and the largest figure of all runs. One process has several runs, each with a vLLM
of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = 3
RUNS: list[dict[str, Any]] = [
    {
        "temperature": temperature,
        "lora": lora,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": rate,
        "max_completion_length": length,
    }
    for temperature, lora, accumulation, rate, length in itertools.product(
        (0.7, 1.0, 1.3), (False, True), (1, 2), (1e-6, 1e-2), (8, 24)
    )
]
RUNS += [
    {"num_iterations": 2},
    {"steps_per_generation": 2},
    {"beta": 0.1},
    {"mask_truncated_completions": True},
    {"scale_rewards": "none"},
    {"loss_type": "grpo"},
    {"loss_type": "dr_grpo"},
    {"vllm_importance_sampling_correction": False},
    {"tools": True},
    {"tools": True, "lora": True, "temperature": 0.7},
]


def work(numbers: list[int]) -> None:
    """Train these runs in this process, and print what was seen of each."""
    sys.path.insert(0, str(ROOT))
    from tests.harness import vllm_on_cpu

    os.environ.update({**vllm_on_cpu.SETTINGS, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"})
    vllm_on_cpu.keep_weights()
    import rlhf_patches
    from rlhf_patches.patches.trl import _watched_rollouts
    from tests.patches.trl_on_vllm import grpo_loop_ranks

    rlhf_patches.apply()
    for number in numbers:
        for figure in _watched_rollouts.FIGURES:
            figure.start_anew()
        with tempfile.TemporaryDirectory() as folder:
            grpo_loop_ranks.train({**RUNS[number], "max_steps": STEPS}, Path(folder))
        print(f"RUN {number} {json.dumps(_watched_rollouts.observed())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=8, help="runs in one process (default: 8)")
    parser.add_argument("--most", type=int, default=len(RUNS), help="runs in all (default: all)")
    parser.add_argument("--work", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    found: dict[int, dict[str, Any]] = {}
    numbers = list(range(min(options.most, len(RUNS))))
    for start in range(0, len(numbers), options.at_once):
        own = numbers[start : start + options.at_once]
        command = [sys.executable, __file__, "--work", *map(str, own)]
        environment = os.environ | {"MASTER_PORT": str(29800 + start)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            if line.startswith("RUN "):
                _, number, text = line.split(" ", 2)
                found[int(number)] = json.loads(text)
        missing = [number for number in own if number not in found]
        if missing:
            sys.exit(f"runs {missing} did not end:\n{done.stderr[-3000:]}")
    told = {number: each for number, each in found.items() if any("warning" in one for one in each.values())}
    print(f"{len(found)} right runs of {STEPS} steps, {len(told)} of which a watch spoke of")
    for number, each in told.items():
        print(f"  {RUNS[number]}: {each}")
    for figure in sorted({name for each in found.values() for name in each}):
        seen = [each[figure] for each in found.values() if figure in each]
        print(f"  {figure}: {max(one['worst'] for one in seen):.3g} at worst, of {sum(one['values'] for one in seen)}")


if __name__ == "__main__":
    main()
