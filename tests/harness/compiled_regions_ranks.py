"""SkyRL's or NeMo-RL's functions within a region that torch.compile compiles, in a process and a rank of its own.

``--out FOLDER skyrl|nemo-rl``: reports a line for each case, and "ok" if the compiled function and the one that is not
have the same result and gradient. TORCHDYNAMO_DISABLE, which other tests set, must not be set here.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rlhf_patches

B, S, V = 2, 6, 16


def skyrl() -> Any:
    from tests.harness import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state

    from tests.harness import skyrl_on_cpu

    parallel_state.initialize_model_parallel()
    skyrl_on_cpu.install()
    return skyrl_on_cpu.model_utils()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("framework", choices=("skyrl", "nemo-rl"))
    options = parser.parse_args()
    (options.out / "rank0.json").write_text(json.dumps({"cases": cases(options.framework)}))


def cases(framework: str) -> list[str]:
    lines = []
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    rlhf_patches.apply(only=f"{framework}-*")
    module = skyrl() if framework == "skyrl" else importlib.import_module("nemo_rl.distributed.model_utils")
    assert rlhf_patches.report()[f"{framework}-logprob-backward"].status.value == "applied"
    torch.manual_seed(0)
    group, values, target = torch.distributed.group.WORLD, torch.randn(B, S, V), torch.randint(V, (B, S))
    target[0, 0] = -100
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "chunked": lambda logits: module.ChunkedDistributedLogprob.apply(logits, target, 0, V, 4, group, False),
        "whole": lambda logits: module.DistributedLogprob.apply(logits, target, 0, V, group, False),
    }
    if framework == "skyrl":
        log_probs = module.from_parallel_logits_to_logprobs
        functions["entropy"] = lambda logits: module._VocabParallelEntropy.apply(logits)
        functions["callers"] = lambda logits: (
            log_probs(logits, target, 0, V, group, chunk_size=4) + module.vocab_parallel_entropy(logits[:, :-1])
        )
    for name, function in functions.items():

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
                lines.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                break
        else:
            same = all(torch.allclose(one, other) for one, other in zip(*found, strict=True))
            lines.append(f"{name}: {'ok' if same else 'another result'}")
    return lines
