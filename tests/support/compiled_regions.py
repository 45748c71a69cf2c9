"""SkyRL's or NeMo-RL's functions within a region that torch.compile compiles, in a process and a rank of its own.

``python compiled_regions.py skyrl|nemo-rl``: prints a line for each case, and "ok" if the compiled function and the one
that is not have the same result and gradient. TORCHDYNAMO_DISABLE, which other tests set, must not be set here.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch

import rlhf_patches

B, S, V = 2, 6, 16


def skyrl() -> Any:
    import megatron_on_cpu

    megatron_on_cpu.install()
    import skyrl_on_cpu
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    skyrl_on_cpu.install()
    return skyrl_on_cpu.model_utils()


def main(framework: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    rlhf_patches.apply(only=f"{framework}-*")
    module = skyrl() if framework == "skyrl" else importlib.import_module("nemo_rl.distributed.model_utils")
    assert rlhf_patches.report()[f"{framework}-logprob-backward"].status.value == "applied"
    torch.manual_seed(0)
    group, values, target = torch.distributed.group.WORLD, torch.randn(B, S, V), torch.randint(V, (B, S))
    target[0, 0] = -100
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "chunked": lambda logits: module.ChunkedDistributedLogprob.apply(logits, target, 0, V, 4, group, False),
        "whole": lambda logits: module.DistributedLogprob.apply(logits, target, 0, V, group, False),
    }
    if framework == "skyrl":
        log_probs = module.from_parallel_logits_to_logprobs
        cases["entropy"] = lambda logits: module._VocabParallelEntropy.apply(logits)
        cases["callers"] = lambda logits: (
            log_probs(logits, target, 0, V, group, chunk_size=4) + module.vocab_parallel_entropy(logits[:, :-1])
        )
    for name, function in cases.items():

        def loss(leaf: torch.Tensor, function: Any = function) -> torch.Tensor:
            return function(leaf * 2).square().sum()

        found = []
        for run in (loss, torch.compile(loss, backend="aot_eager")):
            leaf = values.clone().requires_grad_()
            try:
                result = run(leaf)
                result.backward()
                found.append((result.detach(), leaf.grad))
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                break
        else:
            same = all(torch.allclose(one, other) for one, other in zip(*found, strict=True))
            print(f"{name}: {'ok' if same else 'another result'}")


def run(framework: str, folder: str) -> list[str]:
    """What this script prints with a folder first on PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, framework],
        env={**environment, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


if __name__ == "__main__":
    main(sys.argv[1])
