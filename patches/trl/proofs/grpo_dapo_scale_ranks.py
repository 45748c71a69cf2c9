"""Gradients of GRPO's trainer and of the formula in float64, on one rank: ``--out FOLDER``.

Each case before apply() of trl-grpo-dapo-scale, after it, and after revert(). The learning rate is 0, so all steps of
a case have the same weights, and their mean can be compared with that over the generations.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-grpo-dapo-scale"
CASES: dict[str, dict[str, Any]] = {
    # Micro-batches per generation, and per optimizer step.
    "4 and 2": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 2},
    "1 and 4": {"steps_per_generation": 1, "gradient_accumulation_steps": 4},
    "4 and 2, cispo": {
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "loss_type": "cispo",
        "epsilon_high": 5.0,  # for CISPO the bound itself
    },
    "2 and 2": {"gradient_accumulation_steps": 2},
    "4 and 2, grpo": {
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "loss_type": "grpo",
    },
}
FEW_WORDS = {"suppress_tokens": list(range(8, 99))}
"""One word of eight is the end: completions have one to four tokens."""


class Gradients(TrainerCallback):
    """Sums the gradients that the optimizer receives."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.steps = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        for name, parameter in kwargs["model"].named_parameters():
            gradient = parameter.grad.double()
            self.sums[name] = self.sums.get(name, torch.zeros_like(gradient)) + gradient


def of_some_words(completions: list[str], **kwargs: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def by_the_formula(model: Any, batches: list[dict[str, torch.Tensor]], of_a_generation: int, kind: str) -> Any:
    """DAPO's equation 8 for the policy that has generated, as a mean over the generations, in float64.

    The ratio is then 1, so nothing is clipped, and CISPO's gradient is the same. For ``grpo`` it is the mean over
    samples of the means over tokens (DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3).
    """
    model = copy.deepcopy(model).double()
    model.zero_grad()
    generations = [batches[start : start + of_a_generation] for start in range(0, len(batches), of_a_generation)]
    for generation in generations:
        tokens = sum(int(batch["completion_mask"].sum()) for batch in generation)
        samples = sum(len(batch["completion_mask"]) for batch in generation)
        for batch in generation:
            prompt, completion = batch["prompt_ids"], batch["completion_ids"]
            mask = batch["completion_mask"]
            logits = model(
                input_ids=torch.cat([prompt, completion], dim=1),
                attention_mask=torch.cat([batch["prompt_mask"], mask], dim=1),
            ).logits[:, prompt.shape[1] - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            per_token = ratio * batch["advantages"].double().unsqueeze(-1) * mask
            share = per_token.sum(-1) / mask.sum(-1) / samples if kind == "grpo" else per_token / tokens
            (-share.sum() / len(generations)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def loss_of(trainer: Any, batch: Any) -> float | str:
    """The loss outside ``train()``, where TRL 1.10 and later raise."""
    try:
        return float(trainer.compute_loss(trainer.model, batch))
    except AttributeError as error:
        return str(error)


class Recorded(TrainerCallback):
    """Collects a trainer's generations, each already in micro-batches."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.last = trainer, None
        self.batches: list[dict[str, torch.Tensor]] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        made = self.trainer._buffered_inputs
        if made is not self.last:
            self.last = made
            self.batches += [
                {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
                for batch in made
            ]

    on_step_end = on_substep_end


def recorded(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """The inputs of a trainer's losses from now on."""
    recording = Recorded(trainer)
    trainer.add_callback(recording)
    return recording.batches


def trained(case: str, out: Path) -> dict[str, Any]:
    """The mean gradient of the case's optimizer steps, and that of the formula."""
    settings = CASES[case]
    trainer = small.rollouts(
        "GRPO", out, [of_some_words], learning_rate=0.0, max_grad_norm=1e9, generation_kwargs=FEW_WORDS, **settings
    )
    seen = Gradients()
    trainer.add_callback(seen)
    batches = recorded(trainer)
    trainer.train()
    right = by_the_formula(trainer.model, batches, trainer.args.steps_per_generation, settings.get("loss_type", "dapo"))
    untrained = small.rollouts("GRPO", out, [of_some_words], **settings)
    untrained.model.train()
    found = torch.cat([(total / seen.steps).flatten() for total in seen.sums.values()])
    expected = torch.cat([right[name].flatten() for name in seen.sums])
    trainer.eval_dataset = trainer.train_dataset
    torch.manual_seed(0)
    return {
        "steps": seen.steps,
        "lengths": sorted({int(length) for batch in batches for length in batch["completion_mask"].sum(-1)}),
        "factor": float(found @ expected / (expected @ expected)),
        "error": float((found - expected).norm() / expected.norm()),
        "gradient": [float(value).hex() for value in found[:50]],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "outside train()": loss_of(untrained, batches[0]) if "grpo" not in case else None,
        "evaluated": trainer.evaluate()["eval_loss"],
    }


def main() -> None:
    out = states.parser().parse_args().out
    states.report(NAME, lambda: {case: trained(case, out) for case in CASES}, out)
