"""verl's estimators of advantages, called by their names as its trainer's compute_advantage calls them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer

LENGTHS = (3, 9, 7, 1, 8, 4, 9, 6)
SCORES = (1.0, 0.0, 0.3, 1.0, -0.7, 2.0, 0.1, 0.5)
GROUPS, IN_PAIRS = "aaabbbbc", "aaaabbbb"
"""With one response that is alone in its group; without, for what takes the second best of each."""
ESTIMATORS = (
    *("gae", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "remax", "gpg", "gdpo"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)


def estimated(name: str, order: str, padding: int, answers: int, ending: int) -> Outcome:
    """Of each response's tokens that count: a tool's answer may stand after 3 tokens, or at the end."""
    import numpy as np
    import torch

    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    try:
        estimator = core_algos.get_adv_estimator_fn(name)
        config = importlib.import_module("verl.trainer.config").AlgoConfig(adv_estimator=name, gamma=0.9, lam=0.8)
    except (AttributeError, ModuleNotFoundError, ValueError) as error:
        raise CannotRun(f"this verl has no estimator {name}") from error
    rows, masks, numbers = [*range(len(LENGTHS))], [], []
    for row in rows:
        length = LENGTHS[row]
        inside = answers if length > 3 else 0
        mask = torch.tensor([1] * min(length, 3) + [0] * inside + [1] * (length - 3) + [0] * ending)
        masks.append(mask)
        drawn = torch.rand(length, generator=torch.Generator().manual_seed(row))
        numbers.append(torch.full((len(mask),), 0.5).masked_scatter(mask.bool(), drawn))
    rows = rows if order == "given" else rows[::-1]
    width = padding + max(map(len, masks))

    def padded(values: list[Any]) -> Any:
        return torch.stack([torch.nn.functional.pad(values[row], (0, width - len(values[row]))) for row in rows])

    mask, of_tokens = padded(masks), padded(numbers)
    there = padded([torch.ones_like(one) for one in masks])
    scores = torch.tensor([SCORES[row] for row in rows])
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(rows)), there.sum(1) - 1] = scores
    groups = IN_PAIRS if name == "grpo_passk" else GROUPS
    config = (
        config
        if name != "gdpo"
        else importlib.import_module("verl.trainer.config").AlgoConfig(
            adv_estimator=name, gdpo_reward_keys=["right", "short"], gdpo_reward_weights=[1.0, 0.25]
        )
    )
    given = {
        "values": of_tokens * 0.3,
        "gamma": 0.9,
        "lam": 0.8,
        "index": np.array([groups[row] for row in rows]),
        "reward_baselines": torch.tensor([0.1 * row for row in rows]),
        "old_log_probs": -of_tokens,
        "sum_pi_squared": of_tokens * 0.5,
        "batch": {"prompts": torch.ones(len(rows), 1), "attention_mask": torch.cat([there[:, :1], there], 1)},
        "non_tensor_batch": {"right": scores.numpy(), "short": scores.numpy() ** 2},
        "config": config,
    }
    taken = inspect.signature(estimator).parameters
    found, _ = estimator(
        token_level_rewards=rewards, response_mask=mask, **{key: value for key, value in given.items() if key in taken}
    )
    return {"values": {f"response {row}": found[at][mask[at].bool()] for at, row in enumerate(rows)}}


@trainer(*(f"verl/advantages-{name}" for name in ESTIMATORS))
def of_one(*, name: str, order: str = "given", padding: int = 0, answers: int = 0, ending: int = 0) -> Outcome:
    return estimated(name.partition("-")[2], order, padding, answers, ending)


@trainer("verl/advantages-grpo", "verl/advantages-rloo")
def of_two(
    *, name: str, order: str = "given", padding: int = 0, answers: int = 0, ending: int = 0, vectorized: bool = False
) -> Outcome:
    return estimated(name.partition("-")[2] + "_vectorized" * vectorized, order, padding, answers, ending)


@trainer("verl/published-gdpo", "verl/published-rloo_vectorized", "verl/published-reinforce_plus_plus")
def published(*, name: str, by: str = "trainer") -> Outcome:
    """Cases and definitions of the tests."""
    from rlhf_patches.patches.verl.proofs import gdpo_whitening_ranks as gdpo
    from rlhf_patches.patches.verl.proofs import reinforce_plus_plus_turns_ranks as turns
    from rlhf_patches.patches.verl.proofs import rloo_singletons_ranks as rloo
    from rlhf_patches.patches.verl.proofs.advantages import LENGTH, estimate

    kind = name.partition("-")[2]
    try:
        import numpy as np
        import torch

        if kind == "gdpo":
            case = gdpo.CASES["lengths"]
            there, counted = gdpo.masks(case)
            tensors = {"prompts": torch.ones(8, 3), "attention_mask": torch.cat([torch.ones(8, 3).long(), there], 1)}
            rewards = {key: np.array(values) for key, values in gdpo.REWARDS.items()}
            arguments: Any = (torch.zeros(8, LENGTH), counted, list(gdpo.GROUPS), (tensors, rewards))
            exactly = gdpo.exactly(case)
            options: dict[str, Any] = {"gdpo_reward_keys": list(rewards)}
        elif kind == "reinforce_plus_plus":
            case = turns.CASES["ends with an answer, discounted"]
            arguments, exactly, options = turns.inputs(case), turns.exactly(case)[0], {"gamma": case["gamma"]}
        else:
            _, reward, mask = rloo.inputs()
            arguments, exactly, options = (reward, mask, list(rloo.CASES["one alone"])), rloo.exactly("aaabcccc"), {}
        found = exactly if by == "formula" else estimate(kind, *arguments, **options)[0]
    except (AttributeError, ModuleNotFoundError, ValueError) as error:
        raise CannotRun(f"this verl has no estimator {kind}") from error
    return {"values": {"advantages": found}}
