"""TRL's trainers on completions: GRPO with its losses, RLOO, OnlineDPO. The completions are given, not sampled.

What is sampled differs with the size of a batch and the number of ranks, whatever the seed; so each prompt has the
completions that it has, by the trainer's `rollout_func`, or where it takes none, in place of the method that samples.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

from hunt import formulas, hf_trainer, trl_trainer
from hunt.hf_trainer import PAD
from hunt.outcomes import Outcome
from hunt.tiny_text import END, text
from hunt.trainers import CannotRun, trainer

GENERATIONS, LONGEST = 2, 8
Group = tuple[list[int], list[list[int]]]
"""A prompt and its completions, in tokens."""
FORMULAS = ("grpo", "bnpo", "dapo", "dr_grpo")
NAMES = (*FORMULAS, "cispo", "sapo", "luspo", "vespo")


def groups(settings: Mapping[str, Any]) -> list[Group]:
    """Those of the samples of the settings."""
    count = settings.get("rows", 8)
    # Of the first group nothing is another's.
    rows = hf_trainer.rows(rows=count)[:GENERATIONS]
    rows += hf_trainer.rows(rows=count, others=settings.get("others", 0))[GENERATIONS:]
    split = [trl_trainer.split(row["input_ids"]) for row in rows]
    made = [
        (split[at][0], [[*answer, END] for _, answer in split[at : at + GENERATIONS]])
        for at in range(0, len(split) - GENERATIONS + 1, GENERATIONS)
    ]
    if len({text(prompt) for prompt, _ in made}) < len(made):
        raise ValueError("two groups have the same prompt")
    return made


def rewards(group: Group) -> list[float]:
    """Of its completions."""
    return [float(sum(completion) % 7) for completion in group[1]]


class Rollouts:
    """Hands out completions, and rewards them."""

    def __init__(self, made: Sequence[Group], only_first: bool, logs: bool) -> None:
        self.groups = {text(prompt): (prompt, completions) for prompt, completions in made}
        self.only_first, self.logs, self.first = only_first, logs, text(made[0][0])

    def completions(self, prompts: Sequence[str]) -> list[list[int]]:
        """The first completion of a prompt where it stands first, then its second."""
        return [self.groups[prompt][1][prompts[:at].count(prompt) % GENERATIONS] for at, prompt in enumerate(prompts)]

    def rollout_func(self, prompts: Sequence[str], *_: Any) -> dict[str, Any]:
        """As GRPO's trainer wants it."""
        found = {"prompt_ids": [self.groups[prompt][0] for prompt in prompts]}
        return {**found, "completion_ids": self.completions(prompts), "logprobs": None}

    def reward(self, prompts: Any, completions: Any, log_metric: Any = None, **_: Any) -> list[float]:
        """The same for all but the first group where that one alone shall count; logs of the first group only."""
        if self.logs and log_metric is None:
            raise CannotRun("reward functions of this release log nothing")
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            if self.logs and prompt == self.first:
                log_metric("of the first", 1.0)
            group = self.groups[prompt]
            each = dict(zip((text(tokens[:-1]) for tokens in group[1]), rewards(group), strict=True))
            found.append(0.0 if self.only_first and prompt != self.first else each[completion.strip()])
        return found


def by_formula(name: str, model: Any, made: Sequence[Group], of_a_generation: int) -> Outcome:
    """Shao et al., 3; Yu et al., 8; Liu et al., 3; the mean over generations where a step has several of them.

    The policy is the one that has generated: ratios are 1, and nothing is clipped.
    """
    import torch

    samples = []
    for group in made:
        scores = torch.tensor(rewards(group), dtype=torch.float64)
        if name == "rloo":
            advantages = scores - (scores.sum() - scores) / (len(scores) - 1)
        else:
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for completion, advantage in zip(group[1], advantages, strict=True):
            own = formulas.logprobs(model, group[0], completion)
            ratio = own - own.detach() if name != "rloo" else (own - own.detach()).sum()[None]
            samples.append(-advantage * ratio.exp())
    generations = [samples[at : at + of_a_generation] for at in range(0, len(samples), of_a_generation)]
    loss = 0.0
    for each in generations:
        tokens = sum(map(len, each))
        shares = {"grpo": 0, "rloo": 0, "bnpo": tokens, "dapo": tokens, "dr_grpo": LONGEST * len(each)}
        loss += sum(sample.sum() / (shares[name] or len(sample) * len(each)) for sample in each) / len(generations)
    return formulas.outcome(model, loss)


@trainer("trl/grpo", "trl/rloo", takes=trl_trainer.COMMON | {"others", "padding"})
@trainer("trl/grpo-gpt2", *(f"trl/grpo-{name}" for name in FORMULAS if name != "dapo"), takes=trl_trainer.STEPS)
def rollouts(*, name: str, by: str = "trainer", steps_per_generation: int | None = None, **settings: Any) -> Outcome:
    kind, _, loss = name.partition("-")
    family = "GPT2" if loss == "gpt2" else "Llama"
    loss = loss if loss in NAMES else "dapo"
    made = groups(settings)
    if by == "formula":
        accumulation = steps_per_generation or settings.get("accumulation", 1)
        model = trl_trainer.model(family, dtype="float64")
        return by_formula(
            "rloo" if kind == "rloo" else loss, model, made, settings.get("micro_batch", 8) * accumulation
        )
    return _run(kind, loss, family, made, settings, steps_per_generation)


@trainer(*(f"trl/grpo-{name}" for name in NAMES if name not in FORMULAS), takes=trl_trainer.STEPS)
def more_losses(*, name: str, **settings: Any) -> Outcome:
    return _run("grpo", name.partition("-")[2], "Llama", groups(settings), settings)


@trainer("trl/grpo-metrics", "trl/rloo-metrics")
def metrics(*, name: str, micro_batch: int = 8, ranks: int = 1) -> Outcome:
    """Of a reward function that logs for some samples only."""
    settings = {"micro_batch": micro_batch, "ranks": ranks}
    return _run(name.partition("-")[0], "dapo", "Llama", groups(settings), settings, logs=True)


@trainer("trl/grpo-ratio", "trl/rloo-ratio")
def ratios(
    *,
    name: str,
    epsilon: float = 1e-4,
    micro_batch: int = 8,
    accumulation: int = 1,
    ranks: int = 1,
    dropout: float = 0.0,
) -> Outcome:
    """Which share of the ratios is 1, up to ``epsilon``."""
    settings = {"micro_batch": micro_batch, "accumulation": accumulation, "ranks": ranks, "dropout": dropout}
    return _run(name.partition("-")[0], "dapo", "Llama", groups(settings), settings, more={"epsilon": epsilon})


def _run(
    kind: str,
    loss: str,
    family: str,
    made: Sequence[Group],
    settings: Mapping[str, Any],
    steps_per_generation: int | None = None,
    logs: bool = False,
    more: Mapping[str, Any] = types.MappingProxyType({}),
) -> Outcome:
    micro_batch = settings.get("micro_batch", 8)
    of_a_step = micro_batch * settings.get("accumulation", 1) * settings.get("ranks", 1)
    if of_a_step % GENERATIONS or (steps_per_generation and micro_batch * steps_per_generation % GENERATIONS):
        raise CannotRun(f"a generation is of whole groups of {GENERATIONS}")
    given = Rollouts(made, bool(settings.get("others")), logs)
    options: dict[str, Any] = {"num_generations": GENERATIONS, "max_completion_length": LONGEST, "beta": 0.0}
    options |= {"temperature": 1.0, "remove_unused_columns": False, **more}
    if settings.get("padding"):
        options["pad_to_multiple_of"] = 16
    if steps_per_generation:
        options["steps_per_generation"] = steps_per_generation
    if kind == "grpo":
        options["loss_type"] = loss

    def sampled(_: Any, prompt_ids: Sequence[list[int]], *__: Any) -> list[list[int]]:
        return given.completions([text(tokens) for tokens in prompt_ids])

    others: dict[str, Any] = {"reward_funcs": given.reward}
    if kind == "grpo":
        others["rollout_func"] = given.rollout_func
    found = trl_trainer.run(
        kind.upper(),
        [{"prompt": text(prompt)} for prompt, _ in made],
        lambda **chosen: trl_trainer.model(family, **chosen),
        settings,
        options=options,
        others=lambda: others,
        around=lambda base: (
            base if kind == "grpo" else type(base.__name__, (base,), {"_generate_single_turn": sampled})
        ),
    )
    if loss == "grpo" or kind == "rloo":  # the advantages' sum, which is zero: only rounding could be compared
        return {part: values for part, values in found.items() if "loss" not in part}
    return found


@trainer("trl/online_dpo", takes=trl_trainer.COMMON - {"evaluated"})
def online_dpo(**settings: Any) -> Outcome:
    import inspect

    import torch

    made = groups({**settings, "rows": GENERATIONS * settings.get("rows", 8)})
    given = Rollouts(made, False, False)

    def padded(rows: Sequence[Sequence[int]], left: bool) -> tuple[Any, Any]:
        width = max(map(len, rows))
        both = []
        for values in ([*rows], [[1] * len(row) for row in rows]):
            filled = [
                [*[PAD] * (width - len(row)), *row] if left else [*row, *[PAD] * (width - len(row))] for row in values
            ]
            both.append(torch.tensor(filled))
        return both[0], both[1]

    def around(base: Any) -> Any:
        with_vision = "completion_mask, vision" in inspect.getsource(base._generate)

        def sampled(_: Any, __: Any, prompts: Sequence[str], ___: Any = None) -> tuple[Any, ...]:
            twice = [*prompts, *prompts]
            found: tuple[Any, ...] = padded([given.groups[prompt][0] for prompt in twice], True)
            found += padded(given.completions(twice), False)
            return (*found, None) if with_vision else found

        return type(base.__name__, (base,), {"_generate": sampled})

    return trl_trainer.run(
        "OnlineDPO",
        [{"prompt": text(prompt)} for prompt, _ in made],
        trl_trainer.model,
        settings,
        options={"max_new_tokens": LONGEST, "max_length": 64, "missing_eos_penalty": None},
        others=lambda: {
            "reward_funcs": given.reward,
            "ref_model": None if settings.get("lora") else trl_trainer.model(seed=2),
        },
        around=around,
    )
