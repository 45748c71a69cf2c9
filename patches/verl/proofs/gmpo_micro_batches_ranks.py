"""GMPO's loss on verl's real engine in micro-batches of several sizes, and in float64 from the definition.

``--out FOLDER [--briefly]``, with the folder of a verl release on sys.path, on one or more data-parallel ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rlhf_patches.patches.verl.proofs import policy_on_fsdp
from rlhf_patches.patches.verl.proofs.critic_loss_scale_ranks import PROMPTS, RESPONSE, on_cpu
from rlhf_patches.proving import states

PATCH = "verl-gmpo-micro-batches"
LOW, HIGH = 0.1, 0.2


def make_config(loss_mode: str) -> Any:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
    )


def of_a_sequence(ratios: torch.Tensor, advantages: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The advantage times the geometric mean of the tokens' ratios, clipped where it gains by more."""
    clipped = ratios.clamp(-LOW, HIGH)
    kept = torch.where(advantages > 0, torch.minimum(ratios, clipped), torch.maximum(ratios, clipped))
    tokens = counted.sum()
    return -(advantages * counted).sum() / tokens * ((kept * counted).sum() / tokens).exp()


def step(rows: int, loss_mode: str = "geo_mean") -> dict[str, Any]:
    """Padded to one width: releases before 0.8 know no other way."""
    from verl.workers.utils.losses import ppo_loss

    loss = functools.partial(ppo_loss, config=make_config(loss_mode))
    return policy_on_fsdp.compared(policy_on_fsdp.step(loss, rows, RESPONSE), policy_on_fsdp.exactly(of_a_sequence))


def by_hand(**numbers: Any) -> float:
    """The loss by itself, with what somebody has noted of the mini-batch: the older workers nothing."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_geo_mean

    config = make_config("geo_mean")
    config.global_batch_info.update(numbers)
    rows = policy_on_fsdp.mini_batch()
    arguments = {name: rows[name] for name in ("response_mask", "advantages")}
    old = rows["old_log_probs"]
    loss, *_ = compute_policy_loss_geo_mean(old_log_prob=old, log_prob=old * 1.1, **arguments, config=config)
    return float(loss)


def observations(all_of_them: bool) -> dict[str, Any]:
    here = len(PROMPTS) // torch.distributed.get_world_size()
    if not all_of_them:
        return {"micro-batches": {here: step(1)}}
    return {
        "micro-batches": {here // rows: step(rows) for rows in (here, 2, 1)},
        "vanilla": {here // rows: step(rows, "vanilla")["bits"] for rows in (here, 1)},
        "by hand": [by_hand(), by_hand(dp_size=1, global_batch_size=None), by_hand(dp_size=None, global_batch_size=8)],
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("--briefly", action="store_true", help="micro-batches of one row alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu()
    torch.distributed.init_process_group("gloo")
    everything = not options.briefly
    of_states = iter((everything, everything, False))
    states.report(PATCH, lambda: observations(next(of_states)), options.out)
