"""verl's GAE on trajectories that end with an answer: ``--out FOLDER``, one rank.

It also computes the definition in float64, over the tokens that count.
"""

from __future__ import annotations

import importlib
import inspect
from itertools import pairwise
from typing import Any

import torch

from rlhf_patches.patches.verl.proofs.advantages import LENGTH, at_the_end, differences
from rlhf_patches.patches.verl.proofs.reinforce_plus_plus_turns_ranks import ENDS
from rlhf_patches.proving import states

NAME = "verl-reward-on-answer"
GAMMA, LAMBDA = 0.9, 0.8
SCORES = (1.0, 0.5, -1.0, 2.0)
EPSILON = 1e-8
Results = tuple[torch.Tensor, torch.Tensor]
"""Advantages and returns."""


def tokens(rows: tuple[str, ...], letters: str) -> torch.Tensor:
    return torch.tensor([[token in letters for token in row] for row in rows])


def drawn(seed: int) -> torch.Tensor:
    return torch.rand((4, LENGTH), generator=torch.Generator().manual_seed(seed))


def inputs(rows: tuple[str, ...]) -> dict[str, Any]:
    """The outcome's reward, on the last token that is not padding."""
    return {
        "token_level_rewards": at_the_end(torch.tensor(SCORES), tokens(rows, "ao").long()),
        "response_mask": tokens(rows, "a").long(),
        "values": drawn(3),
        "gamma": GAMMA,
        "lam": LAMBDA,
    }


def estimate(name: str, given: dict[str, Any]) -> Results:
    """The results of verl's function, from its own arguments."""
    estimator = importlib.import_module("verl.trainer.ppo.core_algos").get_adv_estimator_fn(name)
    taken = inspect.signature(estimator).parameters
    found: Results = estimator(**{key: it for key, it in given.items() if key in taken})
    return found


def counted(given: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """For each row, the tokens that count, and their rewards: rewards up to the next such token belong to it."""
    at = [[t for t in range(LENGTH) if row[t]] for row in given["response_mask"].tolist()]
    rewards = [
        [given["token_level_rewards"][row, t:end].sum().item() for t, end in pairwise([*own, LENGTH])]
        for row, own in enumerate(at)
    ]
    return at, rewards


def generalized(given: dict[str, Any]) -> Results:
    """Schulman et al., arXiv:1506.02438, equation 16, and whitened; the variance is unbiased.

    In float64; 0 where a token does not count.
    """
    at, rewards = counted(given)
    mask, advantages = given["response_mask"], torch.zeros_like(given["response_mask"])
    for row, own in enumerate(at):
        values = [*given["values"][row, own].tolist(), 0.0]
        deltas = [reward + GAMMA * values[i + 1] - values[i] for i, reward in enumerate(rewards[row])]
        for number, t in enumerate(own):
            advantages[row, t] = sum((GAMMA * LAMBDA) ** later * one for later, one in enumerate(deltas[number:]))
    those = advantages[mask.bool()]
    whitened = (advantages - those.mean()) / (those.var() + EPSILON).sqrt()
    return whitened * mask, (advantages + given["values"]) * mask


def double(given: dict[str, Any]) -> dict[str, Any]:
    """Only the tensors."""
    return {key: it.double() for key, it in given.items() if torch.is_tensor(it)}


def compared(name: str, given: dict[str, Any], exact: Results) -> dict[str, Any]:
    found = estimate(name, given)
    return {
        what: differences(one * given["response_mask"], other)
        for what, one, other in zip(("advantages", "returns"), found, exact, strict=True)
    }


def observe() -> dict[str, Any]:
    given = inputs(ENDS)
    return {"gae, ends with an answer": compared("gae", given, generalized(double(given)))}


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
