"""SkyRL's training step with FP8 in the model's config, on two ranks: tensor and sequence, or context parallel.

``--out FOLDER``, with the folder of a SkyRL release on sys.path. The `MegatronModelWrapper`, megatron-core's schedule
and a GPTModel are real. FP8 itself needs a GPU: the model computes in fp32, and transformer_engine_shapes.py refuses
what TransformerEngine would. With context parallelism, for which megatron-core has no attention without
TransformerEngine, tokens do not attend to one another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu

megatron_on_cpu.install()

from megatron.core import parallel_state

import rlhf_patches
from tests.harness import small_gpt
from tests.harness.transformer_engine_shapes import refuse_shapes
from tests.patches.skyrl import logprob_backward_training_ranks as training

skyrl_on_cpu = training.skyrl_on_cpu
LENGTH, ACTIONS, ROWS, VOCABULARY = training.LENGTH, training.ACTIONS, training.ROWS, small_gpt.VOCABULARY
RECIPES = (None, "delayed", "mxfp8", "blockwise")
STARTS = {"ragged": (3, 7), "whole": (0, 0)}
"""Where each row's tokens begin."""
CASES: dict[str, dict[str, Any]] = {
    f"{parallel}-{'packed' if packed else 'unpacked'}-{rows}-{recipe}": {
        "parallel": parallel,
        "packed": packed,
        "rows": rows,
        "recipe": recipe,
    }
    for parallel, packed, rows, recipe in (
        *itertools.product(("tensor",), (True, False), ("ragged",), RECIPES),
        *itertools.product(("context",), (True,), ("ragged",), RECIPES),  # SkyRL has it with packing only
        ("tensor", True, "whole", "blockwise"),
        ("context", True, "whole", "delayed"),
        ("context", True, "whole", "mxfp8"),
    )
}


class NoAttention(torch.nn.Module):
    """Each token gets its own value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return value.reshape(value.shape[0], 1, -1) if value.dim() == 3 else value.flatten(2)


def make_model(case: dict[str, Any]) -> tuple[Any, Any]:
    """The same weights every time; and the model's config."""
    tensor = case["parallel"] == "tensor"
    model = small_gpt.make_model(
        bf16=False,
        attention=small_gpt.Attention if tensor else NoAttention,
        position="rope" if tensor else "none",
        context_parallel_size=1 if tensor else 2,
        sequence_parallel=tensor,
        **({} if case["recipe"] is None else {"fp8": "hybrid", "fp8_recipe": case["recipe"]}),
    )
    return model, model.module.config


def make_micro_batches(rows: str) -> list[dict[str, Any]]:
    """Two, padded on the left."""
    mask = (torch.arange(LENGTH) >= torch.tensor(STARTS[rows])[:, None]).long()
    batches = training.make_micro_batches()
    for batch in batches:
        batch["sequences"] = (batch["sequences"] + (batch["sequences"] == 0)) * mask
        batch["attention_mask"] = mask
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return batches


def step(case: dict[str, Any], refuse: bool) -> dict[str, Any]:
    """One mini-batch and one inference pass; with ``refuse`` the layers refuse TransformerEngine's shapes."""
    algorithm = SimpleNamespace(
        policy_loss_type="regular", use_entropy_loss=True, entropy_loss_coef=0.3, use_kl_loss=False, kl_loss_coef=0.0
    )
    settings = SimpleNamespace(algorithm=algorithm, use_sample_packing=case["packed"])
    model, config = make_model(case)
    wrapper = skyrl_on_cpu.model_wrapper().MegatronModelWrapper(settings, [model], None, training.policy_loss)
    wrapper.train()
    seen = refuse_shapes(model, config) if refuse else []
    given: list[int] = []
    model.register_forward_pre_hook(lambda module, arguments: given.append(arguments[0].numel()))
    found: dict[str, Any] = {"failed": {}, "given": given, "seen": seen}
    try:
        found["metrics"] = wrapper.forward_backward_mini_batch(make_micro_batches(case["rows"]), LENGTH, ROWS)
    except (AssertionError, RuntimeError) as error:
        found["failed"]["training"] = str(error)
    found["gradients"] = {name: one.main_grad.clone() for name, one in model.named_parameters()}
    try:
        with torch.no_grad():
            found["inference"] = wrapper.forward(make_micro_batches(case["rows"]), LENGTH, ROWS)
    except (AssertionError, RuntimeError) as error:
        found["failed"]["inference"] = str(error)
    return found


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Two runs in which nothing was refused."""
    outputs = [
        torch.tensor([value for one in run["metrics"] for row in one["loss_fn_outputs"] for value in row["logprobs"]])
        for run in (before, after)
    ]
    deviations = [
        (found - before["gradients"][name]).norm() / before["gradients"][name].norm().clamp(min=1e-30)
        for name, found in after["gradients"].items()
    ]
    return {
        "log_probs": len(outputs[0]),
        "difference_of_log_probs": (outputs[0] - outputs[1]).abs().max().item(),
        "difference_of_inference": (before["inference"] - after["inference"]).abs().max().item(),
        "difference_of_gradients": max(deviations).item(),
        "gradients_found": sum(bool(one.any()) for one in before["gradients"].values()),
        "same": before["metrics"] == after["metrics"]
        and torch.equal(before["inference"], after["inference"])
        and all(torch.equal(one, before["gradients"][name]) for name, one in after["gradients"].items())
        and before["given"] == after["given"],
    }


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.distributed.init_process_group("gloo")
    report: dict[str, Any] = {"skyrl": skyrl_on_cpu.install(), "cases": {}}
    for parallel in ("tensor", "context"):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**{f"{parallel}_{'model_' * (parallel == 'tensor')}parallel_size": 2})
        cases = {name: case for name, case in CASES.items() if case["parallel"] == parallel}
        before = {name: step(case, refuse=False) for name, case in cases.items()}
        refused = {name: step(case, refuse=True) for name, case in cases.items() if case["recipe"] is not None}
        rlhf_patches.apply(only="skyrl-*fp8-alignment")
        for name, case in cases.items():
            after = step(case, refuse=case["recipe"] is not None)
            report["cases"][name] = {
                "refused_before": refused[name]["failed"] if name in refused else {},
                "refused_after": after["failed"],
                "given_before": before[name]["given"],
                "given_after": after["given"],
                "seen_after": after["seen"],
                **(compared(before[name], after) if not after["failed"] else {}),
            }
        report["report"] = [row.to_dict() for row in rlhf_patches.report() if "fp8" in row.name]
        rlhf_patches.revert()
    (options.out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))
