"""A framework's functions within a region that torch.compile compiles, in a process and a rank of its own.

``--out FOLDER skyrl|nemo-rl|megatron-core``: reports a line for each case, and "ok" if the compiled function and the
one that is not have the same result and gradient; and of ``fullgraph=True`` the outcomes before and after.
TORCHDYNAMO_DISABLE, which other tests set, must not be set here.
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
PATCHES = {
    "skyrl": "skyrl-logprob-backward",
    "nemo-rl": "nemo-rl-logprob-backward",
    "megatron-core": "megatron-core-cross-entropy-in-place",
}


def skyrl() -> Any:
    from tests.harness import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state

    from tests.harness import skyrl_on_cpu

    parallel_state.initialize_model_parallel()
    skyrl_on_cpu.install()
    return skyrl_on_cpu.model_utils()


def megatron_core(target: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Not the fused one, which compiles its parts itself, for which there is no compiler here."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel()
    return {"plain": lambda logits: vocab_parallel_cross_entropy(logits, target)}


def log_probs(framework: str, group: Any, target: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    module = skyrl() if framework == "skyrl" else importlib.import_module("nemo_rl.distributed.model_utils")
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "chunked": lambda logits: module.ChunkedDistributedLogprob.apply(logits, target, 0, V, 4, group, False),
        "whole": lambda logits: module.DistributedLogprob.apply(logits, target, 0, V, group, False),
    }
    if framework == "skyrl":
        of_callers = module.from_parallel_logits_to_logprobs
        functions["entropy"] = lambda logits: module._VocabParallelEntropy.apply(logits)
        functions["callers"] = lambda logits: (
            of_callers(logits, target, 0, V, group, chunk_size=4) + module.vocab_parallel_entropy(logits[:, :-1])
        )
    return functions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("framework", choices=PATCHES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    group, values, target = torch.distributed.group.WORLD, torch.randn(B, S, V), torch.randint(V, (B, S))
    target[0, 0] = -100
    framework = options.framework
    functions = megatron_core(target) if framework == "megatron-core" else log_probs(framework, group, target)
    # The others compile something themselves, for which there is no compiler here.
    whole = {name: function for name, function in functions.items() if name in ("plain", "chunked", "whole")}
    released = cases(whole, values, backend="eager", fullgraph=True)
    rlhf_patches.apply(only=f"{framework}-*")
    assert rlhf_patches.report()[PATCHES[framework]].status.value == "applied"
    patched = cases(whole, values, backend="eager", fullgraph=True)
    report = {
        "cases": [f"{name}: {found}" for name, found in cases(functions, values, backend="aot_eager").items()],
        "whole graph": {name: [released[name], patched[name]] for name in whole},
    }
    (options.out / "rank0.json").write_text(json.dumps(report))


def cases(
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]], values: torch.Tensor, **how: Any
) -> dict[str, str]:
    outcomes = {}
    torch.compiler.reset()
    for name, function in functions.items():

        def loss(leaf: torch.Tensor, function: Any = function) -> torch.Tensor:
            return function(leaf * 2).square().sum()

        found = []
        for run in (loss, torch.compile(loss, **how)):
            leaf = values.clone().requires_grad_()
            try:
                result = run(leaf)
                result.backward()
                found.append((result.detach(), leaf.grad))
            except Exception as error:
                outcomes[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                break
        else:
            same = all(torch.allclose(one, other) for one, other in zip(*found, strict=True))
            outcomes[name] = "ok" if same else "another result"
    return outcomes
