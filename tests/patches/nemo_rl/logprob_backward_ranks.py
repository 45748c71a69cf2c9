"""What happens on each of two ranks in the tests of NeMo-RL's patch: its real file, from a clone, and gloo.

``--out FOLDER``, with a folder on sys.path that has
`nemo_rl.distributed.model_utils`. The cases are those of logprob_backward_ranks.py that both frameworks have.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import torch

from tests.harness import megatron_on_cpu

megatron_on_cpu.install()

from megatron.core import parallel_state

import rlhf_patches
from tests.patches.skyrl import logprob_backward_ranks as shared

PATCH = "nemo-rl-logprob-backward"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    shared.upstream = lambda: importlib.import_module("nemo_rl.distributed.model_utils")
    cases = {
        name: case
        for name, case in shared.FUNCTIONS.items()
        if not case["entropy"] and case["kind"] and not case["kind"].startswith("packed")
    }
    report = {"functions": shared.in_every_state(cases, shared.run_function, PATCH)}
    rlhf_patches.apply(only=PATCH)
    report["row"] = rlhf_patches.report()[PATCH].to_dict()
    (options.out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))
