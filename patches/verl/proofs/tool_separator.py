"""The separator between a tool's result and the next turn."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-tool-separator",
    "two tool results, ChatML",
    "the tokens of a rollout with two tool results, ChatML",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The tokens of the rollout, compared with the chat template's tokens of the whole conversation."""
    (report,) = reports
    before, after = (report[state]["ChatML"] for state in ("before", "after"))
    whole = report["after"]["whole"]["ChatML"]
    missing = len(after["tokens"]) - len(before["tokens"])
    same = whole.startswith(after["prompt"] + after["response"])
    without, patched = f"{missing} tokens too few", f"{len(after['tokens'])} tokens"
    verdict = "each token" if same else "NO"
    words = (
        f"{without}: `<|im_end|><|im_start|>`",
        patched,
        f"{'token by token' if same else 'NO,'} the chat template's of the whole conversation",
    )
    repaired = same and not whole.startswith(before["prompt"] + before["response"])
    yield Row(CASE, report["version"], without, patched, verdict, repaired, words)


PROOF = Proof((CASE,), rows)
