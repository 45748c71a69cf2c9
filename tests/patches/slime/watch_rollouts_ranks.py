"""slime's own logging of one tag, of rollouts that its own `generate` made, while they are watched: ``--out FOLDER``.

The engine is that of partial_rollout_budget_ranks.py.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import types
from typing import Any

import torch

from rlhf_patches.patches.slime import _watched_rollouts
from rlhf_patches.proving import states
from tests.harness import watched
from tests.patches.slime import partial_rollout_budget_ranks as partial

for _name in ("wandb", "torch.utils.tensorboard"):
    sys.modules.setdefault(_name, types.ModuleType(_name))
sys.modules["torch.utils.tensorboard"].SummaryWriter = object  # type: ignore[attr-defined]

NAME, REPAIR = "slime-watch-rollouts", "slime-partial-rollout-budget"
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def arguments(**settings: Any) -> Any:
    """For logging, what partial_rollout_budget_ranks.py does not have."""
    more: dict[str, Any] = dict(
        use_wandb=False, use_tensorboard=False, colocate=True, keep_old_actor=False, use_rollout_logprobs=False
    )
    more |= dict(load_debug_rollout_data=None, custom_rollout_log_function_path=None, log_passrate=False)
    more |= dict(rollout_function_path="slime.rollout.sglang_rollout.generate_rollout", advantage_estimator="grpo")
    more |= dict(wandb_always_use_train_step=False, log_reward_category=None, partial_rollout=False)
    more |= dict(reward_key=None, rollout_batch_size=1, global_batch_size=1, context_parallel_size=1)
    return partial.arguments(**{**more, **settings})


def in_parts(**settings: Any) -> Any:
    """A sample that was aborted after six tokens, and resumed; or not."""
    args = arguments(**settings)
    with partial.engine([6] if args.partial_rollout else []):

        async def all_parts() -> Any:
            group = [partial.Sample(index=0, group_index=0, prompt="", reward=1.0)]
            for _ in range(1 + args.partial_rollout):
                params = partial.rollout.GenerateState(args).sampling_params.copy()
                group = await partial.rollout.generate_and_rm_group(args, group, sampling_params=params)
            return group

        return args, asyncio.run(all_parts())


def rolled_out(**settings: Any) -> int:
    args, group = in_parts(**settings)
    importlib.import_module("slime.ray.rollout")._log_rollout_data(2, args, group, {}, 1.0)
    return int(group[0].response_length)


def trained(same: bool = True, **settings: Any) -> float:
    """Logs what slime's loss reports: the mean |trainer - engine| of sampled tokens, of one policy or of two."""
    generator = torch.Generator().manual_seed(0)
    policy, other = torch.randn(2, 8, 50, generator=generator).log_softmax(-1)
    engine = policy if same else other
    tokens = torch.multinomial(engine.exp(), 1, generator=generator)
    value = (policy.bfloat16().float() - engine).gather(1, tokens).abs().mean().item()
    metrics = {DIFFERENCE: value, "train/step": 5}
    log = importlib.import_module("slime.utils.logging_utils").log
    log(arguments(**settings), metrics, step_key="train/step")
    log(arguments(**settings), {"rollout/step": 5}, step_key="rollout/step")
    return value


CASES: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "too long": (rolled_out, (NAME,), {"partial_rollout": True}),
    "repaired": (rolled_out, (NAME, REPAIR), {"partial_rollout": True}),
    "not watched": (rolled_out, (REPAIR,), {"partial_rollout": True}),
    "whole": (rolled_out, (NAME,), {}),
    "own function": (rolled_out, (NAME,), {"partial_rollout": True, "rollout_function_path": "mine.rollout"}),
    "other policy": (trained, (NAME,), {"same": False}),
    "policy": (trained, (NAME,), {}),
    "not colocated": (trained, (NAME,), {"same": False, "colocate": False}),
    "partial": (trained, (NAME,), {"same": False, "partial_rollout": True}),
    "temperature": (trained, (NAME,), {"same": False, "rollout_temperature": 0.8}),
}


def observe(case: str) -> dict[str, Any]:
    function, patches, settings = CASES[case]
    return watched.observe(NAME, _watched_rollouts.FIGURES, lambda: {"value": function(**settings)}, patches)


def main() -> None:
    out = states.parser().parse_args().out
    for name in ("slime.ray.rollout", "slime.utils.logging_utils"):
        importlib.import_module(name)
    found = {case: observe(case) for case in CASES}
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
