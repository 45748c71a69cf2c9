"""Losses by their formulas, in float64, one sequence at a time: no padding, no batch, none of a trainer's code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hunt.outcomes import Outcome


def logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Any:
    """Of each token of the completion, given what comes before it."""
    import torch

    tokens = torch.tensor([*prompt, *completion])
    scores = model(input_ids=tokens[None]).logits[0, :-1].double().log_softmax(-1)
    return scores[torch.arange(len(tokens) - 1), tokens[1:]][-len(completion) :]


def outcome(model: Any, loss: Any) -> Outcome:
    """As of a step of a trainer (hf_trainer.py)."""
    loss.backward()
    gradients = {
        f"step 0 {name}": parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return {"loss": {"step 1": loss.detach()}, "gradient": gradients}
