"""Gradients of RLOO and GRPO with dropout, and those of a ratio of 1: ``--out FOLDER CASE...``.

Each case before apply() of trl-dropout-ratio, after it, and after revert(). The reference is in float64, under the
dropout masks of the loss: torch draws the same ones in both precisions. The learning rate is 0.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-dropout-ratio"
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
TWO: dict[str, Any] = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
AHEAD: dict[str, Any] = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2}
TWICE: dict[str, Any] = {**TWO, "num_iterations": 2, "max_steps": 2}
GRPO: dict[str, Any] = {"kind": "GRPO", "loss_type": "grpo"}
CASES: dict[str, dict[str, Any]] = {
    "RLOO, LoRA": {},
    "RLOO, model": {"policy": "GPT-2"},
    "RLOO, micro-batches": TWO,
    "RLOO, generations": {**TWO, "steps_per_generation": 1},
    "RLOO, steps ahead": AHEAD,
    "RLOO, iterations": TWICE,
    "RLOO, evaluated": {**TWICE, "evaluated": True},
    "RLOO, KL": {"beta": 0.1},
    "RLOO, disabled": {"policy": "GPT-2", "disable_dropout": True},
    "RLOO, none": {"policy": "none"},
    "GRPO, steps ahead": {**GRPO, **AHEAD},
    "GRPO, iterations": {**GRPO, **TWICE},
    "GRPO, equal": {**GRPO, **TWO},
}


def policy(kind: str) -> Any:
    """Qwen 2 with LoRA, whose dropout is TRL's default or 0; or GPT-2 with its own dropout, 0.1 by default."""
    if kind == "GPT-2":
        torch.manual_seed(0)
        size = {"vocab_size": 99, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=1, eos_token_id=1, attn_implementation="eager"))
    dropout = 0.0 if kind == "none" else 0.05
    # Else the adapter's output is 0, with every mask.
    lora = LoraConfig(r=8, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(small.model(), lora)


def of_some_words(completion_ids: Any = (), completions: Any = (), **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [float(sum(int(token) for token in ids) % 7) for ids in completion_ids]


class Recorded(TrainerCallback):
    """The micro-batches of each step with their random states, and the gradients."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.batches: list[list[tuple[Any, ...]]] = [[]]
        self.gradients: list[dict[str, torch.Tensor]] = []

    def forward(self, module: Any, args: Any, given: Any) -> None:
        if module.training and torch.is_grad_enabled():
            (batch,) = [
                each
                for each in self.trainer._buffered_inputs
                if torch.equal(torch.cat([each["prompt_ids"], each["completion_ids"]], 1), given["input_ids"])
            ]
            self.batches[-1].append((torch.get_rng_state(), given["input_ids"], given["attention_mask"], batch))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        found = {name.removeprefix("module."): each.grad for name, each in named if each.grad is not None}
        self.gradients.append({name: gradient.double().clone() for name, gradient in found.items()})
        self.batches.append([])


def of_a_ratio_of_1(exact: Any, kind: str, batches: Any) -> dict[str, torch.Tensor]:
    """The policy gradient of a step: advantage times the gradient of the log-probability."""
    exact.zero_grad()
    for state, ids, attended, batch in batches:
        torch.set_rng_state(state)
        completion, mask = batch["completion_ids"], batch["completion_mask"].double()
        length = completion.shape[1]
        logits = exact(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1][:, -length:]
        logps = logits.log_softmax(-1).gather(-1, completion[..., None])[..., 0]
        if "importance_sampling_ratio" in batch:  # of this policy, to the engine that has generated
            logps = logps * (logps.detach() - batch["sampling_per_token_logps"].double()).exp()
        own = (logps * mask).sum(-1)
        if kind == "GRPO":
            own = own / mask.sum(-1)
        (-(own * batch["advantages"].double()).mean() / len(batches)).backward()
    found = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}
    if RANKS > 1:
        for gradient in found.values():
            torch.distributed.all_reduce(gradient)
            gradient /= RANKS
    return found


def trained(
    options: dict[str, Any],
    out: Any,
    make: Callable[..., Any] = small.rollouts,
    run: Callable[[Any, Recorded], Any] = lambda trainer, seen: trainer.train(),
) -> dict[str, Any]:
    """A case's steps: how far the gradient is from that of a ratio of 1, the gradient, and what is logged."""
    options = dict(options)
    kind, evaluated = options.pop("kind", "RLOO"), options.pop("evaluated", False)
    seen = Recorded()
    settings = {
        **small.STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.0,
        "max_completion_length": 48,
        "generation_kwargs": {"suppress_tokens": [0, 1]},
        **({"eval_strategy": "steps", "eval_steps": 1} if evaluated else {}),
    }
    model = policy(options.pop("policy", "LoRA"))
    exact = copy.deepcopy(model).double().train(not options.get("disable_dropout"))
    more: dict[str, Any] = {"callbacks": [seen]}
    if evaluated:
        from datasets import Dataset

        more["eval_dataset"] = Dataset.from_list([{"prompt": "w1 w2"}, {"prompt": "w3"}])
    trainer = make(kind, out, [of_some_words], small.PROMPTS * 4, model, more, **{**settings, **options})
    trainer.processing_class.model_input_names = ["input_ids", "attention_mask"]  # for transformers 4
    seen.trainer = trainer
    with trainer.model.register_forward_pre_hook(seen.forward, with_kwargs=True):
        run(trainer, seen)
    steps = []
    for gradient, batches in zip(seen.gradients, seen.batches, strict=False):
        right = of_a_ratio_of_1(exact, kind, batches)
        found = torch.cat([gradient[name].flatten() for name in right])
        expected = torch.cat([each.flatten() for each in right.values()])
        steps.append(
            {
                "error": float((found - expected).norm() / expected.norm()),
                "gradient": [float(value).hex() for value in found[::97]],
            }
        )
    names = ("loss", "clip_ratio/region_mean", "eval_loss", "kl", "eval_clip_ratio/region_mean")
    logs = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]
    return {"steps": steps, "logs": [entry for entry in logs if entry]}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    states.report_cases(
        NAME, lambda cases: {case: trained(CASES[case], options.out) for case in cases}, options.cases, options.out
    )


if __name__ == "__main__":
    main()
