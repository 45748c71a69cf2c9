"""verl's vectorized and plain RLOO on groups of several sizes, and the definition: ``--out FOLDER``, one rank."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_patches.patches.verl.proofs.advantages import at_the_end, differences, estimate, lengths_as_mask
from rlhf_patches.proving import states

CASES = {
    "groups": "aaaabbbb",
    "one alone": "aaabcccc",
    "all alone": "abcdefgh",
}
LENGTHS = (3, 12, 7, 1, 9, 4, 12, 6)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scores, each on its response's last token, and the mask."""
    scores = torch.tensor([1.0, 0.0, 0.3, 1.0, -0.7, 2.0, 0.1, 0.0])
    mask = lengths_as_mask(*LENGTHS)
    return scores, at_the_end(scores, mask), mask


def exactly(groups: str) -> torch.Tensor:
    """Each response's score minus the average of the others', if there are any."""
    scores, _, mask = inputs()
    advantages = []
    for row, group in enumerate(groups):
        others = [scores[other].item() for other in range(len(groups)) if other != row and groups[other] == group]
        advantages.append(scores[row].item() - (sum(others) / len(others) if others else 0.0))
    return torch.tensor(advantages, dtype=torch.float64)[:, None] * mask


def observe() -> dict[str, Any]:
    _, rewards, mask = inputs()
    found: dict[str, Any] = {
        estimator: {
            name: differences(estimate(estimator, rewards, mask, list(groups))[0], exactly(groups))
            for name, groups in CASES.items()
        }
        for estimator in ("rloo", "rloo_vectorized")
    }
    return found | {"types": of_types()}


def of_types() -> dict[str, list[str]]:
    """For responses that have others, in each dtype of rewards and mask: all bits of the advantages."""
    _, rewards, mask = inputs()
    found = {}
    for name in ("groups", "one alone"):
        groups = list(CASES[name])
        rows = [row for row, group in enumerate(groups) if groups.count(group) > 1]
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for of_mask in (torch.long, torch.bool, torch.float32):
                advantages, _ = estimate("rloo_vectorized", rewards.to(dtype), mask.to(of_mask), groups)
                found[f"{name}, {dtype}, {of_mask}"] = [str(advantages.dtype), str(advantages[rows].tolist())]
    return found


def main() -> None:
    states.report("verl-rloo-singletons", observe, states.parser().parse_args().out)
