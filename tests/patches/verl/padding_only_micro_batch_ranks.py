"""verl's distillation loss on micro-batches of which some have no token that counts: ``--out FOLDER``, on one rank.

As the proof of verl-padding-only-micro-batch has the loss of one step. The metrics of two data-parallel ranks are added
up as verl's `TrainingWorker` does it.
"""

from __future__ import annotations

import importlib
import itertools
import traceback
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.verl.proofs import padding_only_micro_batch_ranks
from rlhf_patches.patches.verl.proofs.padding_only_micro_batch_ranks import (
    MODE,
    NAME,
    PROMPT,
    RESPONSE,
    TOPK,
    Tokens,
    counted,
    loss_and_metrics,
    micro_batch,
    micro_batches,
    of_responses,
)
from rlhf_patches.proving import states

TOKENS: dict[str, Tokens] = {
    "all count": [[(3, 6), (1, 4)], [(5, 2), (6, 6)]],
    "one without": padding_only_micro_batch_ranks.TOKENS,
    "only one with": [[(0, 0), (0, 0)], [(0, 0), (2, 5)]],
    "none at all": [[(0, 0), (0, 0)], [(0, 0), (0, 0)]],
}
CASES = {f"{name}, {mode}": (name, mode) for name in TOKENS for mode in (MODE, "k3")}


def step(name: str, mode: str) -> dict[str, Any]:
    """The loss over both ranks, its gradient for what the model has computed, and the step's metrics."""
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.py_functional import append_to_dict

    count = counted(TOKENS[name])
    of_ranks: list[dict[str, Any]] = []
    total, gradients = 0.0, []
    for of_rank in micro_batches(TOKENS[name]):
        metrics: dict[str, Any] = {}
        for values in of_rank:
            trained = values["distillation_losses" if mode == MODE else "log_probs"].requires_grad_()
            loss, found = loss_and_metrics(values, mode, count)
            loss.backward()
            total += loss.item() / 2
            assert trained.grad is not None
            gradients.append((trained.grad / 2).tolist())
            append_to_dict(metrics, found)
        of_ranks.append(metrics)
    gathered = {key: [metrics[key] for metrics in of_ranks] for key in of_ranks[0]}
    reduced = reduce_metrics(
        {
            key: [Metric.aggregate_dp(each)] if isinstance(each[0], Metric) else list(itertools.chain(*each))
            for key, each in gathered.items()
        }
    )
    prefix = "distillation/"
    return {
        "loss": total,
        "gradients": gradients,
        **{key.removeprefix(prefix): float(value) for key, value in reduced.items() if key.startswith(prefix)},
    }


def exactly(name: str, mode: str) -> dict[str, Any]:
    """The same from the definition, in float64; what there is none of is left out."""
    count = counted(TOKENS[name])
    losses, masses, gradients = [], [], []
    for values in itertools.chain(*micro_batches(TOKENS[name])):
        mask = values.pop("mask").bool()
        exact = {key: value.double() for key, value in values.items()}
        trained = exact["distillation_losses" if mode == MODE else "log_probs"].requires_grad_()
        distance = exact["teacher"] - exact["log_probs"]
        of_tokens = exact["distillation_losses"] if mode == MODE else distance.exp() - distance - 1
        each = of_responses(of_tokens)[mask]
        gradients.append(torch.autograd.grad(each.sum() / count, trained)[0].tolist())
        losses += each.tolist()
        if mask.any():
            masses.append({key: of_responses(exact[key])[mask] for key in ("student_mass", "teacher_mass")})
            masses[-1]["overlap_ratio"] = of_responses(exact["overlap_count"])[mask] / TOPK
    found = {"loss": sum(losses) / count, "gradients": gradients}
    if losses:
        found |= {"loss_min": min(losses), "loss_max": max(losses)}
    if losses and mode == MODE:
        for key in ("student_mass", "teacher_mass"):
            every = torch.cat([each[key] for each in masses])
            found |= {f"{key}_min": every.min().item(), f"{key}_max": every.max().item()}
        for key in masses[0]:  # an average of the micro-batches' averages
            found[key] = sum(each[key].mean().item() for each in masses) / len(masses)
    return found


def by_itself(dtype: torch.dtype) -> list[str]:
    """``distillation_loss`` alone, of data without the numbers of a mini-batch: all that it returns, and the config."""
    from tensordict import TensorDict
    from verl.workers.config import ActorConfig

    losses = importlib.import_module("verl.trainer.distillation.losses")
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2)
    settings = {"loss_mode": MODE, "use_policy_gradient": False, "loss_max_clamp": None, "topk": TOPK}
    distillation = SimpleNamespace(distillation_loss=SimpleNamespace(**settings))
    values = micro_batch((3, 6), 1)
    mask = values.pop("mask")
    outputs = {
        name: (value.to(dtype) if value.is_floating_point() else value).flatten() for name, value in values.items()
    }
    ids = torch.ones(2, PROMPT + RESPONSE, dtype=torch.long)
    rows = {"prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": ids, "response_mask": mask}
    try:
        loss, metrics = losses.distillation_loss(config, distillation, outputs, TensorDict(rows, batch_size=2))
    except KeyError as error:
        return [f"KeyError: {error}"]
    of_metrics = {name: getattr(value, "values", value) for name, value in metrics.items()}
    return [f"{loss.dtype} {loss.item()}", str(of_metrics), str(config.global_batch_info)]


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, (name, mode) in CASES.items():
        try:
            found[case] = {"found": step(name, mode), "exact": exactly(name, mode)}
        except RuntimeError:
            found[case] = {"failed": traceback.format_exc()}
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    return found | {"by itself": {str(dtype): by_itself(dtype) for dtype in dtypes}}


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
