"""verl's REINFORCE++ on trajectories of several turns, and its definition in float64: ``--out FOLDER``, on one rank."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_patches.patches.verl.proofs.advantages import LENGTH, at_the_end, differences, estimate
from rlhf_patches.proving import states

# Each letter is a token: a (counts), o (a tool's answer, does not count), . (padding).
ONE_TURN = ("aaaaaaaaaaaa", "aaaaa.......", "aaa.........", "aaaaaaaa....")
TURNS = ("aaooaa......", "aaaoaaoooaaa", "aooooooooooa", "aaaaaaa.....")
ENDS = ("aaooaaoo....", "aaaoaaoooaaa", "aooooooooooo", "aaaaaaa.....")
CASES: dict[str, dict[str, Any]] = {
    "one turn": {"rows": ONE_TURN},
    "one turn, discounted": {"rows": ONE_TURN, "gamma": 0.9},
    "turns": {"rows": TURNS},
    "turns, discounted": {"rows": TURNS, "gamma": 0.9},
    "turns, penalties": {"rows": TURNS, "penalties": True},
    "turns, penalties, discounted": {"rows": TURNS, "penalties": True, "gamma": 0.9},
    "turns, mask of booleans": {"rows": TURNS, "dtype": torch.bool},
    "turns, mask of floats": {"rows": TURNS, "dtype": torch.float32, "gamma": 0.9},
    "ends with an answer": {"rows": ENDS},
    "ends with an answer, discounted": {"rows": ENDS, "gamma": 0.9, "penalties": True},
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def inputs(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards: the outcome's on the last token that is not padding, and penalties on tokens that count."""
    counts = torch.tensor([[token == "a" for token in row] for row in case["rows"]])
    present = torch.tensor([[token != "." for token in row] for row in case["rows"]])
    rewards = at_the_end(torch.tensor([1.0, 0.5, -1.0, 2.0]), present.long())
    if case.get("penalties"):
        rewards -= torch.rand(counts.shape, generator=torch.Generator().manual_seed(1)) * 0.2 * counts
    return rewards, counts.to(case.get("dtype", torch.long))


def exactly(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, a sum for each token; the variance is unbiased."""
    rewards, mask = inputs(case)
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for row, counts in enumerate(mask.bool().tolist()):
        for t in range(LENGTH):
            returns[row, t] = sum(
                case.get("gamma", 1.0) ** sum(counts[t:s]) * rewards[row, s].item() for s in range(t, LENGTH)
            )
    counted = returns[mask.bool()]
    advantages = (returns - counted.mean()) / (counted.var() + 1e-8).sqrt()
    return advantages * mask, returns * mask


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        rewards, mask = inputs(case)
        try:
            advantages, returns = estimate("reinforce_plus_plus", rewards, mask, gamma=case.get("gamma", 1.0))
        except RuntimeError as error:  # 0.9 subtracts the mask from 1
            found[name] = {"failed": str(error)}
            continue
        exact = exactly(case)
        found[name] = {
            "advantages": differences(advantages, exact[0]),
            "returns": differences(returns * mask, exact[1]),
        }
    found["types"] = of_types()
    return found


def of_types() -> dict[str, Any]:
    """For rewards in each dtype, without the bug: all bits of the results."""
    found = {}
    for name in ("one turn", "one turn, discounted", "turns, penalties, discounted"):
        case = {"penalties": True, **CASES[name]}
        for dtype in DTYPES:
            rewards, mask = inputs(case)
            results = estimate("reinforce_plus_plus", rewards.to(dtype), mask, gamma=case.get("gamma", 1.0))
            found[f"{name}, {dtype}"] = [str(result.dtype) + str(result.tolist()) for result in results]
    return found


def main() -> None:
    states.report("verl-reinforce-plus-plus-turns", observe, states.parser().parse_args().out)
