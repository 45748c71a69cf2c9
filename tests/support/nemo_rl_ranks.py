"""What happens on each of two ranks in the tests of NeMo-RL's patch: its real file, from a clone, and gloo.

``python -m torch.distributed.run ... nemo_rl_ranks.py --out FOLDER``, with a folder on PYTHONPATH that has
`nemo_rl.distributed.model_utils`. The cases are those of skyrl_ranks.py that both frameworks have.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import skyrl_ranks as shared
import torch
from megatron.core import parallel_state

import rlhf_patches

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


if __name__ == "__main__":
    main()
