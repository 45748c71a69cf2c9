"""verl's estimators with returns for each token, on trajectories that end with an answer: ``--out FOLDER``, one rank.

As the proof of verl-reward-on-answer has GAE; and their definitions in float64, over the tokens that count alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from rlhf_patches.patches.verl.proofs import reward_on_answer_ranks
from rlhf_patches.patches.verl.proofs.reinforce_plus_plus_turns_ranks import DTYPES, ENDS, ONE_TURN, TURNS
from rlhf_patches.patches.verl.proofs.reward_on_answer_ranks import (
    EPSILON,
    NAME,
    Results,
    compared,
    counted,
    double,
    drawn,
    estimate,
    generalized,
    tokens,
)
from rlhf_patches.proving import states

GROUPS = (0, 1, 0, 1)
BASELINES = (0.3, 0.1, -0.2, 0.4)
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


def inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Rewards: the outcome's; and penalties, or what answers bring."""
    given = reward_on_answer_ranks.inputs(case["rows"])
    rewards = given["token_level_rewards"]
    if case.get("penalties"):
        rewards -= drawn(1) * 0.2 * tokens(case["rows"], "a")
    if case.get("answers"):
        rewards += drawn(2) * tokens(case["rows"], "o")
    return {
        **given,
        "old_log_probs": -drawn(4),
        "sum_pi_squared": drawn(5) * 0.5,
        "reward_baselines": torch.tensor(BASELINES),
        "index": np.array(GROUPS),
    }


def exactly(name: str, case: dict[str, Any]) -> Results:
    """Advantages and returns of the tokens that count, 0 elsewhere."""
    given = double(inputs(case))
    if name == "gae":
        return generalized(given)
    mask = given["response_mask"]
    at, rewards = counted(given)
    returns = torch.zeros_like(mask)
    for row, own in enumerate(at):
        for number, t in enumerate(own):
            returns[row, t] = sum(rewards[row][number:])
    if name == "remax":
        return (returns - given["reward_baselines"][:, None]) * mask, returns
    weights = 1 - 2 * given["old_log_probs"].exp() + given["sum_pi_squared"]
    baselines = optimal(name, returns, (weights * mask).cumsum(-1), at)
    return (returns - baselines) * mask, returns


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
            kept = given["token_level_rewards"].clone()
            of_case = found[f"{estimator}, {name}"] = compared(estimator, given, exactly(estimator, case))
            of_case["rewards kept"] = torch.equal(kept, given["token_level_rewards"])
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
    states.report(NAME, observe, states.parser().parse_args().out)
