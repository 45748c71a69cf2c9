"""TRL's trainers on answers that are preferred or not: DPO with its losses, KTO, ORPO, CPO, rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hunt import formulas, hf_trainer, tiny_text, trl_trainer
from hunt.outcomes import Outcome
from hunt.tiny_text import END, text
from hunt.trainers import CannotRun, trainer

BETA, TAU = 0.1, 0.05
"""Defaults of TRL's."""
FAR = 5
"""Of a reference from which the policy's divergence, as KTO estimates it, is more than zero."""


def pairs(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens of a prompt, of the better answer, and of the worse one, which has another length."""
    made = []
    for one, other in zip(hf_trainer.rows(rows=count), hf_trainer.rows(rows=count + 3)[3:], strict=True):
        prompt, chosen = trl_trainer.split(one["input_ids"])
        made.append((prompt, chosen, trl_trainer.split(other["input_ids"])[1]))
    return made


def _smooth(score: Any) -> Any:
    import torch

    return -torch.nn.functional.logsigmoid(score)


def _discopop(chosen: Any, rejected: Any) -> Any:
    score = BETA * (chosen - rejected)
    share = (score / TAU).sigmoid()
    return (1 - share) * _smooth(score) + share * (-score).exp()


# Of the log-ratios of all better answers, and all worse ones, to the reference; of ipo and sigmoid_norm per token.
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "sigmoid": lambda chosen, rejected: _smooth(BETA * (chosen - rejected)),
    "hinge": lambda chosen, rejected: (1 - BETA * (chosen - rejected)).relu(),
    "ipo": lambda chosen, rejected: (chosen - rejected - 1 / (2 * BETA)) ** 2,
    "sigmoid_norm": lambda chosen, rejected: _smooth(BETA * (chosen - rejected)),
    "nca_pair": lambda chosen, rejected: (
        _smooth(BETA * chosen) + (_smooth(-BETA * chosen) + _smooth(-BETA * rejected)) / 2
    ),
    "robust": lambda chosen, rejected: _smooth(BETA * (chosen - rejected)),  # no label is flipped by default
    "bco_pair": lambda chosen, rejected: _smooth(BETA * chosen) + _smooth(-BETA * rejected),
    "sppo_hard": lambda chosen, rejected: (chosen - 0.5 / BETA) ** 2 + (rejected + 0.5 / BETA) ** 2,
    "aot_unpaired": lambda chosen, rejected: _smooth(BETA * (chosen.sort().values - rejected.sort().values)),
    "apo_zero": lambda chosen, rejected: 1 - (BETA * chosen).sigmoid() + (BETA * rejected).sigmoid(),
    "apo_down": lambda chosen, rejected: (BETA * chosen).sigmoid() + 1 - (BETA * (chosen - rejected)).sigmoid(),
    "discopop": _discopop,
}
WHOLE_BATCHES = ("aot", "sft")
"""Losses that are no sum over pairs of one of their log-ratios."""
NAMES = [*LOSSES, *WHOLE_BATCHES]


def dpo_by_formula(name: str, rows: list[tuple[list[int], list[int], list[int]]]) -> Outcome:
    """Rafailov et al., and what came after it; each answer ends once."""
    import torch

    model, reference = (trl_trainer.model(seed=seed, dtype="float64") for seed in (1, 2))
    found: dict[str, list[Any]] = {"chosen": [], "rejected": [], "own": [], "references": [], "first": []}
    for prompt, chosen, rejected in rows:
        scores = []
        for side, answer in (("chosen", chosen), ("rejected", rejected)):
            own = formulas.logprobs(model, prompt, answer)
            with torch.no_grad():
                references = formulas.logprobs(reference, prompt, answer)
            ratio = (own - references).sum() / (len(answer) if name in ("ipo", "sigmoid_norm") else 1)
            found[side].append(ratio)
            scores.append((own, references.sum()))
        found["own"].append(scores[0][0].sum() - scores[1][0].sum())
        found["references"].append(scores[0][1] - scores[1][1])
        found["first"].append(scores[0][0])
    if name == "sft":
        return formulas.outcome(model, -torch.cat(found["first"]).mean())
    if name == "aot":
        own, references = (torch.stack(found[each]).sort().values for each in ("own", "references"))
        return formulas.outcome(model, _smooth(BETA * (own - references)).mean())
    return formulas.outcome(model, LOSSES[name](*(torch.stack(found[side]) for side in ("chosen", "rejected"))).mean())


def chat(prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
    """Tokens of a conversation and of its last answer, by the template."""
    messages = [{"role": "user", "content": text(prompt)}, {"role": "assistant", "content": text(answer)}]
    tokenizer = tiny_text.tokenizer()
    whole, start = (
        tokenizer(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=count == 1))
        for count in (2, 1)
    )
    return start["input_ids"], whole["input_ids"][len(start["input_ids"]) :]


@trainer("trl/dpo-chat", *(f"trl/dpo-{name}" for name in NAMES if name != "sigmoid"), takes=trl_trainer.STEPS)
@trainer("trl/dpo", takes=trl_trainer.COMMON | {"padding"})
def dpo(*, name: str, by: str = "trainer", **settings: Any) -> Outcome:
    made, loss = pairs(settings.get("rows", 8)), name.partition("-")[2] or "sigmoid"
    if by == "formula":
        if loss == "chat":
            ended = [(*chat(prompt, chosen), chat(prompt, rejected)[1]) for prompt, chosen, rejected in made]
        else:
            ended = [(prompt, [*chosen, END], [*rejected, END]) for prompt, chosen, rejected in made]
        return dpo_by_formula("sigmoid" if loss == "chat" else loss, ended)
    rows: list[dict[str, Any]] = [
        dict(zip(("prompt", "chosen", "rejected"), map(text, each), strict=True)) for each in made
    ]
    for row in rows:
        row |= {name: f" {row[name]}" for name in ("chosen", "rejected")}
    if loss == "chat":
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        rows = [{key: [{"role": roles[key], "content": words.strip()}] for key, words in row.items()} for row in rows]
    return trl_trainer.run(
        "DPO",
        rows,
        trl_trainer.model,
        settings,
        options={
            "loss_type": ["sigmoid" if loss == "chat" else loss],
            **({"pad_to_multiple_of": 16} if settings.get("padding") else {}),
        },
        others=lambda: {"ref_model": None if settings.get("lora") else trl_trainer.model(seed=2)},
    )


@trainer("trl/kto", takes=trl_trainer.COMMON)
@trainer("trl/kto-apo_zero_unpaired", takes=trl_trainer.STEPS)
def kto(*, name: str, by: str = "trainer", **settings: Any) -> Outcome:
    made = [(prompt, chosen) for prompt, chosen, _ in pairs(settings.get("rows", 8))]
    loss = name.partition("-")[2] or "kto"
    if by == "formula":
        return kto_by_formula(loss, [(prompt, [*answer, END]) for prompt, answer in made])
    if settings.get("micro_batch", 8) == 1:
        raise CannotRun("KTO wants micro-batches of two: its divergence is that of other prompts' answers")
    rows = [
        {"prompt": text(prompt), "completion": f" {text(answer)}", "label": index % 3 > 0}
        for index, (prompt, answer) in enumerate(made)
    ]
    return trl_trainer.run(
        "KTO",
        rows,
        trl_trainer.model,
        settings,
        options={"loss_type": loss},
        others=lambda: {"ref_model": None if settings.get("lora") else trl_trainer.model(seed=FAR)},
    )


def kto_by_formula(name: str, rows: list[tuple[list[int], list[int]]]) -> Outcome:
    """Ethayarajh et al., 7 and 8: the divergence is that of each prompt with the answer of the one before it."""
    import torch

    model, reference = (trl_trainer.model(seed=seed, dtype="float64") for seed in (1, FAR))

    def ratio(prompt: list[int], answer: list[int]) -> Any:
        with torch.no_grad():
            references = formulas.logprobs(reference, prompt, answer).sum()
        return formulas.logprobs(model, prompt, answer).sum() - references

    with torch.no_grad():
        divergence = sum(ratio(prompt, rows[at - 1][1]) for at, (prompt, _) in enumerate(rows)) / len(rows)
    divergence = max(divergence, torch.zeros(())) if name == "kto" else 0.0
    ratios = [ratio(*row) - divergence for row in rows]
    return formulas.outcome(
        model,
        sum(1 - (BETA * (each if index % 3 else -each)).sigmoid() for index, each in enumerate(ratios)) / len(rows),
    )


@trainer("trl/reward", takes=trl_trainer.COMMON | {"padding"})
def reward(*, by: str = "trainer", **settings: Any) -> Outcome:
    made = pairs(settings.get("rows", 8))

    def model(**chosen: Any) -> Any:
        return trl_trainer.model(head="ForSequenceClassification", num_labels=1, **chosen)

    if by == "formula":
        import torch

        exact = model(dtype="float64")
        scores = [
            [exact(input_ids=torch.tensor([[*prompt, *answer, END]])).logits[0, 0] for answer in answers]
            for prompt, *answers in made
        ]
        return formulas.outcome(exact, sum(_smooth(chosen - rejected) for chosen, rejected in scores) / len(scores))
    rows = [{"chosen": text(prompt + chosen), "rejected": text(prompt + rejected)} for prompt, chosen, rejected in made]
    return trl_trainer.run(
        "Reward", rows, model, settings, options={"pad_to_multiple_of": 16 if settings.get("padding") else None}
    )


@trainer("trl/orpo", "trl/cpo", takes=trl_trainer.COMMON)
def without_a_reference(*, name: str, **settings: Any) -> Outcome:
    rows = [
        dict(zip(("prompt", "chosen", "rejected"), map(text, each), strict=True))
        for each in pairs(settings.get("rows", 8))
    ]
    return trl_trainer.run(name.upper(), rows, trl_trainer.model, settings)
