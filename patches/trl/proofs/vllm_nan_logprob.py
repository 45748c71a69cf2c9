"""GRPO on completions that vLLM has sampled, with a token that it has given no log-probability."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

NAME = "token_truncate, one"
CASE = Case(
    "trl",
    "trl-vllm-nan-logprob",
    "GRPO, a NaN of vLLM's",
    "GRPOTrainer, completions in vLLM's form, a token of 7 has the log-probability NaN: the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a batch, compared with GRPO's formula in float64, where that token has a ratio of 1."""
    (report,) = reports
    before, after = (report[state][NAME] for state in ("before", "after"))
    error = after.get("distance of gradients", 1.0)
    # The model is in float32, with log-probabilities near 4.6.
    repaired = "failed" in before and error < 2e-6
    without = "no batch: an exception" if "failed" in before else f"off by {before['distance of gradients']:.0e}"
    words = (before.get("failed", without), f"off by {error:.0e}", "float64")
    yield Row(CASE, report["version"], without, f"off by {error:.0e}", "float64", repaired, words)


PROOF = Proof((CASE,), rows, seconds=15, arguments=(NAME,))
