"""The fused log-probability and entropy with their gradients, and torch's in float64: ``--out FOLDER``.

Each case before apply() of verl-fused-logprob-contiguity, after it, and after revert().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlhf_patches.proving import states

NAME = "verl-fused-logprob-contiguity"
ROWS, LENGTH, HIDDEN, WORDS, CHUNK = 2, 6, 8, 11, 4
WRONG: dict[str, Callable[[Any], Any]] = {
    "slice of the sequence": lambda states: states[:, 1:],
    "transposed": lambda states: states.transpose(0, 1),
}
RIGHT: dict[str, Callable[[Any], Any]] = {
    "every second, which flattens to a view": lambda states: states[:, ::2],
    "whole": lambda states: states,
    "a copy": lambda states: states[:, 1:].contiguous(),
    "in two dimensions": lambda states: states[:, 1:].flatten(0, 1),
}
TRAINED = {"all": (True, True), "the model alone": (True, False), "the head alone": (False, True)}


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator)
    head = torch.randn(WORDS, HIDDEN, generator=generator)
    return hidden, head, torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)


def loss_of(log_probs: Any, entropy: Any) -> Any:
    """A weighted sum, so that each token has a different gradient."""
    weights = torch.arange(1.0, log_probs.numel() + 1, dtype=log_probs.dtype).reshape(log_probs.shape)
    return (log_probs * weights).sum() + 0.3 * (entropy * weights).sum()


def right(hidden: Any, head: Any, ids: Any, temperature: float) -> tuple[Any, Any]:
    logprobs = (hidden @ head.t() / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def gradients(case: str, trained: str, fused: bool) -> list[torch.Tensor | None]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPOFunction

    slicing = {**WRONG, **RIGHT}[case]
    hidden, head, ids = drawn()
    ids = slicing(ids.unsqueeze(-1)).squeeze(-1).contiguous()
    if not fused:
        hidden, head = hidden.double(), head.double()
    hidden.requires_grad_(TRAINED[trained][0])
    head.requires_grad_(TRAINED[trained][1])
    given = slicing(hidden)
    flag = given.requires_grad
    found = FusedLinearForPPOFunction.apply(given, head, ids, 0.7, CHUNK) if fused else right(given, head, ids, 0.7)
    assert given.requires_grad == flag, "of what it was given"
    loss_of(*found).backward()
    return [hidden.grad, head.grad]


def observe() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for case in (*WRONG, *RIGHT):
        for trained in TRAINED:
            found, expected = (gradients(case, trained, fused) for fused in (True, False))
            seen[f"{case}, {trained}"] = {
                "there": [each is not None for each in found],
                "expected": [each is not None for each in expected],
                "errors": [
                    float((one.double() - other).norm() / other.norm())
                    for one, other in zip(found, expected, strict=True)
                    if one is not None and other is not None
                ],
                "bits": [
                    None if each is None else [value.hex() for value in each.flatten().tolist()] for each in found
                ],
            }
    return seen


def main() -> None:
    from verl.utils.experimental import torch_functional

    # Without flash-attn (here only a stand-in), verl computes the cross-entropy with torch.
    torch_functional._FLASH_ATTN_CROSS_ENTROPY_AVAILABLE = False
    states.report(NAME, observe, states.parser().parse_args().out)
