"""DPO on conversations whose template ends each answer itself."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-dpo-second-eos",
    "DPO, a template that writes <eos>",
    "DPOTrainer, a conversation, a chat template that ends answers: the chosen answer's tokens",
)
RIGHT = {"chosen": [["w3", "<eos>"]], "rejected": [["w4", "w5", "<eos>"]]}
"""What the template makes of the conversation."""


def rows(reports: Reports) -> Iterator[Row]:
    """The tokens of the answers, compared with the template's own."""
    (report,) = reports
    found = {state: {name: report[state]["chat"][name] for name in RIGHT} for state in ("before", "after")}
    without, with_it = (" ".join(found[state]["chosen"][0]) for state in ("before", "after"))
    twice = {name: [[*answer, "<eos>"] for answer in answers] for name, answers in RIGHT.items()}
    repaired = found["before"] == twice and found["after"] == RIGHT
    yield Row(CASE, report["version"], without, with_it, "the template", repaired)


PROOF = Proof((CASE,), rows, arguments=("chat",))
