"""verl's estimators with returns for each token, on trajectories that end with an answer: ``--out FOLDER``, one rank.

And their definitions in float64, over the tokens that count alone.
"""

from __future__ import annotations

import importlib
import inspect
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlhf_patches.patches.verl.proofs.advantages import LENGTH, at_the_end, differences
from rlhf_patches.patches.verl.proofs.reinforce_plus_plus_turns_ranks import DTYPES, ENDS, ONE_TURN, TURNS
from rlhf_patches.proving import states

GAMMA, LAMBDA = 0.9, 0.8
GROUPS = (0, 1, 0, 1)
SCORES = (1.0, 0.5, -1.0, 2.0)
BASELINES = (0.3, 0.1, -0.2, 0.4)
EPSILON = 1e-8
ESTIMATORS = ("gae", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
CASES: dict[str, dict[str, Any]] = {
    "one turn": {"rows": ONE_TURN},
    "turns": {"rows": TURNS, "penalties": True},
    "no token counts": {"rows": ("oooo........", "aaaaa.......", "............", "oooaaa......")},
    "ends with an answer": {"rows": ENDS},
    "ends with an answer, penalties": {"rows": ENDS, "penalties": True},
    "ends with an answer, none counts": {"rows": ("oooo........", "ooaaoo......", "aaaaa.......", "aaaaao......")},
    "rewards between turns": {
        "rows": ("aaooaa......", "aaaoaaoooaaa", "ooaaoooooaao", "aaaaaaa....."),
        "answers": True,
    },
}
WRONG = tuple(name for name in CASES if name.startswith(("ends", "rewards")))


def tokens(case: dict[str, Any], letters: str) -> torch.Tensor:
    return torch.tensor([[token in letters for token in row] for row in case["rows"]])


def drawn(seed: int) -> torch.Tensor:
    return torch.rand((4, LENGTH), generator=torch.Generator().manual_seed(seed))


def inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Rewards: the outcome's on the last token that is no padding; and penalties, or what answers bring."""
    counts = tokens(case, "a")
    rewards = at_the_end(torch.tensor(SCORES), tokens(case, "ao").long())
    if case.get("penalties"):
        rewards -= drawn(1) * 0.2 * counts
    if case.get("answers"):
        rewards += drawn(2) * tokens(case, "o")
    return {
        "token_level_rewards": rewards,
        "response_mask": counts.long(),
        "values": drawn(3),
        "old_log_probs": -drawn(4),
        "sum_pi_squared": drawn(5) * 0.5,
        "reward_baselines": torch.tensor(BASELINES),
        "index": np.array(GROUPS),
        "gamma": GAMMA,
        "lam": LAMBDA,
    }


def estimate(name: str, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, by verl's function, of what it takes."""
    estimator = importlib.import_module("verl.trainer.ppo.core_algos").get_adv_estimator_fn(name)
    taken = inspect.signature(estimator).parameters
    found: tuple[torch.Tensor, torch.Tensor] = estimator(**{key: it for key, it in given.items() if key in taken})
    return found


def exactly(name: str, case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of the tokens that count, 0 elsewhere."""
    given = {key: it.double() for key, it in inputs(case).items() if torch.is_tensor(it)}
    mask = given["response_mask"]
    at = [[t for t in range(LENGTH) if row[t]] for row in mask.tolist()]
    # What comes after a token that counts, up to the next one, is that one's.
    rewards = [
        [given["token_level_rewards"][row, t:end].sum().item() for t, end in pairwise([*own, LENGTH])]
        for row, own in enumerate(at)
    ]
    returns = torch.zeros_like(mask)
    for row, own in enumerate(at):
        for number, t in enumerate(own):
            returns[row, t] = sum(rewards[row][number:])
    if name == "remax":
        return (returns - given["reward_baselines"][:, None]) * mask, returns
    if name == "gae":
        return generalised(given, at, rewards)
    weights = 1 - 2 * given["old_log_probs"].exp() + given["sum_pi_squared"]
    baselines = optimal(name, returns, (weights * mask).cumsum(-1), at)
    return (returns - baselines) * mask, returns


def generalised(given: dict[str, Any], at: Any, rewards: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Schulman et al., arXiv:1506.02438, equation 16, and whitened; the variance is the one without bias."""
    mask, advantages = given["response_mask"], torch.zeros_like(given["response_mask"])
    for row, own in enumerate(at):
        values = [*given["values"][row, own].tolist(), 0.0]
        deltas = [reward + GAMMA * values[i + 1] - values[i] for i, reward in enumerate(rewards[row])]
        for number, t in enumerate(own):
            advantages[row, t] = sum((GAMMA * LAMBDA) ** later * one for later, one in enumerate(deltas[number:]))
    counted = advantages[mask.bool()]
    whitened = (advantages - counted.mean()) / (counted.var() + EPSILON).sqrt()
    return whitened * mask, (advantages + given["values"]) * mask


def optimal(name: str, returns: torch.Tensor, weights: torch.Tensor, at: Any) -> torch.Tensor:
    """Of each group, a mean for each position, weighted; with turns a position is a number of tokens that count.

    Where one response is the longest its baseline is 0 from the length of the second on, in the same positions.
    """
    baselines = torch.zeros_like(returns)
    places = [own if name == "optimal_token_baseline" else list(range(len(own))) for own in at]
    for group in set(GROUPS):
        rows = [row for row in range(len(GROUPS)) if GROUPS[row] == group]
        if name.startswith("tir"):
            rows = [row for row in rows if at[row]]
        lengths = sorted(len(at[row]) for row in rows)
        for row in rows if len(rows) > 1 else ():
            longest = len(at[row]) == lengths[-1] > lengths[-2]
            for t, place in zip(at[row], places[row], strict=True):
                there = [(other, at[other][places[other].index(place)]) for other in rows if place in places[other]]
                weight = sum(weights[one] for one in there)
                if not (longest and place >= lengths[-2]):
                    baselines[row, t] = sum(returns[one] * weights[one] for one in there) / (weight + EPSILON)
    return baselines


def estimators() -> tuple[str, ...]:
    known = importlib.import_module("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY
    return tuple(name for name in ESTIMATORS if name in known)


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for estimator in estimators():
        for name, case in CASES.items():
            given = inputs(case)
            mask, kept = given["response_mask"], given["token_level_rewards"].clone()
            advantages, returns = estimate(estimator, given)
            exact = exactly(estimator, case)
            found[f"{estimator}, {name}"] = {
                "advantages": differences(advantages * mask, exact[0]),
                "returns": differences(returns * mask, exact[1]),
                "rewards kept": torch.equal(kept, given["token_level_rewards"]),
            }
        found[f"types of {estimator}"] = of_types(estimator)
    return found


def of_types(estimator: str) -> dict[str, Any]:
    """Where the bug is not, of rewards and masks of each type, and of masks that are broadcast: to the last bit."""
    found = {}
    for name in ("one turn", "turns"):
        given = inputs(CASES[name] | {"penalties": True})
        mask = given["response_mask"]
        masks = {"long": mask, "float": mask.float(), "bool": mask.bool(), "half": mask.half(), "one": mask[:1]}
        for dtype in (*DTYPES, torch.long):
            for kind, of_kind in masks.items():
                rewards = given["token_level_rewards"].to(dtype)
                try:
                    results = estimate(estimator, given | {"token_level_rewards": rewards, "response_mask": of_kind})
                except (IndexError, RuntimeError) as error:
                    found[f"{name}, {dtype}, {kind}"] = [type(error).__name__]
                    continue
                found[f"{name}, {dtype}, {kind}"] = [str(result.dtype) + str(result.tolist()) for result in results]
    return found


def main() -> None:
    states.report("verl-reward-on-answer", observe, states.parser().parse_args().out)
