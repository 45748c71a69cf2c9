"""TRL's trainer on steps of an answer, each of which is right or not: in releases that lie beside the newest only."""

from __future__ import annotations

from typing import Any

from hunt import formulas, trl_trainer
from hunt.outcomes import Outcome
from hunt.tiny_text import text
from hunt.trainers import trainer
from hunt.trainers.trl_preferences import pairs

SEPARATOR = 3
"""The token after each step, which has the step's label: as many labels in each row, as a mean of means wants it."""


@trainer("trl_prm/prm", takes=trl_trainer.COMMON)
def prm(*, by: str = "trainer", **settings: Any) -> Outcome:
    made = pairs(settings.get("rows", 8))

    def model(**chosen: Any) -> Any:
        return trl_trainer.model(head="ForTokenClassification", num_labels=2, classifier_dropout=0.0, **chosen)

    if by == "formula":
        import torch

        exact, losses = model(dtype="float64"), []
        for prompt, *steps in made:
            tokens = list(prompt)
            for step, label in zip(steps, (1, 0), strict=True):
                tokens += [*step, SEPARATOR]
                losses.append(-exact(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)[label])
        return formulas.outcome(exact, sum(losses) / len(losses))
    rows = [
        {"prompt": text(prompt), "completions": [text(step) for step in steps], "labels": [True, False]}
        for prompt, *steps in made
    ]
    return trl_trainer.run("PRM", rows, model, settings, options={"step_separator": text([SEPARATOR])})
