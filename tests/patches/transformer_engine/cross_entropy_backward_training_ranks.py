"""A step of a GPT with Megatron's own loss function and TransformerEngine's cross entropy: ``--out FOLDER``, one rank.

What stands between the two, `megatron.core.extensions.transformer_engine`, needs the compiled core: its three lines are
here. Levels: `tests.harness.forkserver.transformer_engine`, with megatron-core below.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

import rlhf_patches
from tests.harness import rollout_training
from tests.patches.transformer_engine.cross_entropy_backward_ranks import PATCH

PROMPT = 6  # tokens of each sequence, which the loss mask leaves out


def adapter(logits: Any, labels: Any, group: Any, is_cg_capturable: bool = False) -> Any:
    """`te_parallel_cross_entropy` of megatron-core 0.16.1, where there is one rank."""
    assert group.size() == 1
    return parallel_cross_entropy(logits, labels, 0.0, False, None)


def gradients(fused: bool, double: bool = False) -> dict[str, torch.Tensor]:
    """Of all parameters. In float64 without Megatron's loss, which computes in float32."""
    config = rollout_training.make_config()
    if fused:
        config = dataclasses.replace(config, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    model_parallel_cuda_manual_seed(1)
    model = rollout_training.make_gpt(config, 1)
    batch = rollout_training.make_batch(1, 0, 0, 0)
    if double:
        model = model.double()
        logits = rollout_training.forward(model, batch)
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    else:
        positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
        mask = torch.ones(batch.inputs.shape[1], batch.inputs.shape[1], dtype=torch.bool).triu(1)
        losses = model(batch.inputs, positions, mask[None, None], labels=batch.targets)
    (losses[:, PROMPT:] * batch.values[:, PROMPT:].to(losses.dtype)).sum().backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    language_module.te_parallel_cross_entropy = adapter
    exact = gradients(fused=False, double=True)
    whole = torch.cat([one.flatten() for one in exact.values()]).norm()

    def measured(found: dict[str, torch.Tensor]) -> dict[str, float]:
        flat = torch.cat([(found[name] - one).flatten() for name, one in exact.items()])
        norm = torch.cat([one.flatten() for one in found.values()]).norm()
        return {"norm": norm.item(), "off": (flat.norm() / whole).item()}

    report = {"exact norm": whole.item(), "own": measured(gradients(fused=False)), "before": measured(gradients(True))}
    rlhf_patches.apply(only=PATCH)
    report["row"] = rlhf_patches.report()[PATCH].to_dict()
    report["after"] = measured(gradients(True))
    (options.out / "rank0.json").write_text(json.dumps(report))
