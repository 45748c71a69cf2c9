"""A policy that is trained, and the engine that samples from it, or from what it was before: a table of logits.

The next token depends on the one before. What the engine samples and what either says of it is computed, so that a
difference of theirs is one of their weights, or of the precision that the engine computes in.
"""

from __future__ import annotations

import torch

VOCABULARY = 24


class Trained:
    """The trainer's weights, and the engine's, which `refit` makes the trainer's."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(VOCABULARY, VOCABULARY, generator=self.random)
        self.refit()

    def refit(self) -> None:
        """As kernels do that round to bfloat16."""
        self.engine = self.weights.bfloat16().float()

    def update(self, size: float = 0.5) -> None:
        """A step of the optimizer."""
        self.weights = self.weights + size * torch.randn(VOCABULARY, VOCABULARY, generator=self.random)

    def sample(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (rows, 1 + length), of which the first is the prompt, and the engine's log-probabilities of the rest.

        Returns:
            tokens, and float32 log-probabilities (rows, length).
        """
        tokens = [torch.randint(VOCABULARY, (rows, 1), generator=self.random)]
        for _ in range(length):
            probabilities = self.engine[tokens[-1][:, 0]].softmax(-1)
            tokens.append(torch.multinomial(probabilities, 1, generator=self.random))
        made = torch.cat(tokens, 1)
        return made, of(self.engine, made)

    def log_probabilities(self, tokens: torch.Tensor) -> torch.Tensor:
        """The trainer's, of all tokens but the first: float32 (rows, length)."""
        return of(self.weights, tokens)


def of(weights: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all tokens but the first."""
    return weights.log_softmax(-1)[tokens[:, :-1], tokens[:, 1:]]
