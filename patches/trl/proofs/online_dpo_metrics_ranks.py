"""What Online DPO logs, and the same in float64: ``--out FOLDER CASE...``.

Each case before apply() of trl-online-dpo-metrics and after it, the first one after revert() too. A case is one of
online_dpo_accumulation_ranks.py, or ``equal``: completions of one length.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from rlhf_patches.patches.trl.proofs import online_dpo_accumulation_ranks as worker
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-online-dpo-metrics"
MASKED = ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward")
ANSWERS = {name: list(getattr(worker, name)) for name in ("FIRST", "SECOND")}


def by_definition() -> dict[str, float]:
    """Means over all completions, in float64."""
    policy, other = small.model().double(), worker.reference().double()
    ours, theirs = [], []
    with torch.no_grad():
        for row, prompt in enumerate(worker.PROMPTS):
            for answer in (worker.FIRST[row], worker.SECOND[row]):
                ours.append(worker.summed(policy, prompt, answer))
                theirs.append(worker.summed(other, prompt, answer))
    entropy = -torch.stack(ours).mean()
    divergence = torch.stack(ours).mean() - torch.stack(theirs).mean()
    reward = (sum(worker.REWARDS) / len(worker.REWARDS) + 0.5) / 2
    found = (divergence, entropy, -worker.BETA * divergence, reward - worker.BETA * divergence)
    return {name: float(value) for name, value in zip(MASKED, found, strict=True)}


def logged(case: str) -> dict[str, Any]:
    """The errors of what a step logs, the other metrics, and the gradient."""
    is_equal = case.endswith(" equal")
    for name, rows in ANSWERS.items():
        longest = [*max(rows, key=len)[:-1]]
        setattr(
            worker, name, [[*row[:-1], *longest[len(row) - 1 :], worker.END][:5] for row in rows] if is_equal else rows
        )
    case = case.removesuffix(" equal")
    trainer = worker.made(case)
    trainer.train()
    (found,) = [entry for entry in trainer.state.log_history if "objective/kl" in entry]
    got = torch.cat([each.flatten() for each in trainer.optimizer.optimizer.found])
    wanted = by_definition()
    timed = ("runtime", "per_second")
    return {
        "errors": {name: abs(found[name] - right) / abs(right) for name, right in wanted.items()},
        "masked": {name: found[name] for name in wanted},
        "others": {name: value for name, value in found.items() if name not in wanted and not name.endswith(timed)},
        "gradient": [float(value).hex() for value in got],
        "lengths": sorted({len(each) for name in ANSWERS for each in getattr(worker, name)}),
    }


def main() -> None:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    first = iter([True, True])

    def observe() -> dict[str, Any]:
        return {case: logged(case) for case in (options.cases if next(first, False) else options.cases[:1])}

    states.report(NAME, observe, options.out)
