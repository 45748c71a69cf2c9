"""TRL's trainers that follow a teacher, on the data set's own answers (``lmbda=0.0``): GKD, GOLD."""

from __future__ import annotations

from typing import Any

from hunt import trl_trainer
from hunt.outcomes import Outcome
from hunt.tiny_text import text
from hunt.trainers import CannotRun, trainer
from hunt.trainers.trl_preferences import chat, pairs

BETA = 0.5


@trainer("trl/gkd", "trl/gold", takes=trl_trainer.COMMON)
def distillation(*, name: str, by: str = "trainer", **settings: Any) -> Outcome:
    made = [(prompt, chosen) for prompt, chosen, _ in pairs(settings.get("rows", 8))]
    if by == "formula":
        return by_formula([chat(*row) for row in made])
    rows = [
        {"messages": [{"role": "user", "content": text(prompt)}, {"role": "assistant", "content": text(answer)}]}
        for prompt, answer in made
    ]
    if name == "gold" and settings.get("micro_batch", 8) * settings.get("accumulation", 1) > len(rows):
        raise CannotRun("its loader takes no step over fewer samples than are asked for")
    return trl_trainer.run(
        name.upper(),
        rows,
        trl_trainer.model,
        settings,
        options={"lmbda": 0.0, "beta": BETA, "temperature": 1.0, "max_length": 64, "disable_dropout": False}
        | {"gold": {"max_completion_length": 16, "use_uld_loss": False}, "gkd": {"max_new_tokens": 16}}[name],
        others=lambda: {"teacher_model": trl_trainer.model(seed=2)},
    )


def by_formula(rows: list[tuple[list[int], list[int]]]) -> Outcome:
    """Agarwal et al., 1: the generalized divergence of Jensen and Shannon, the mean over all tokens of answers."""
    import torch

    from hunt import formulas

    model, teacher = (trl_trainer.model(seed=seed, dtype="float64") for seed in (1, 2))
    losses = []
    for prompt, answer in rows:
        tokens = torch.tensor([[*prompt, *answer]])
        own = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].double().softmax(-1)
        with torch.no_grad():
            wanted = teacher(input_ids=tokens).logits[0, len(prompt) - 1 : -1].double().softmax(-1)
        middle = BETA * wanted + (1 - BETA) * own
        losses.append(
            BETA * (wanted * (wanted / middle).log()).sum(-1) + (1 - BETA) * (own * (own / middle).log()).sum(-1)
        )
    return formulas.outcome(model, torch.cat(losses).mean())
