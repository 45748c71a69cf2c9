"""Gradients of GRPO's trainer with truncated completions, and those of the formula: ``--out FOLDER CASE...``.

Each case as released, with trl-grpo-truncated-count, with trl-grpo-dapo-scale too, with that one alone, and after
revert(). The learning rate is 0, so all steps of a case have the same weights.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.grpo_dapo_scale_ranks import Gradients, of_some_words, recorded
from rlhf_patches.proving import states

NAME, SCALE = "trl-grpo-truncated-count", "trl-grpo-dapo-scale"
STATES = {"before": (), "after": (NAME,), "both": (NAME, SCALE), "scale": (SCALE,), "reverted": ()}
HALF = "masked, half a generation"
ONLY = {"both": (HALF,), "scale": (HALF,), "reverted": ("masked",)}
"""The cases that these states are relevant for; on one rank."""
RANKS = int(os.environ["WORLD_SIZE"])
END = 1
FEW_WORDS = {"suppress_tokens": [0, *range(8, 99)]}
"""One word of seven is the end. Not padding, which TRL treats as an end if it comes last."""
OF_A_STEP = 4 // RANKS
"""Micro-batches of two completions: a generation is all eight, whatever the number of ranks."""
CASES: dict[str, dict[str, Any]] = {
    "masked": {},
    "masked, cispo": {"loss_type": "cispo", "epsilon_high": 5.0},  # for CISPO the bound itself
    HALF: {"gradient_accumulation_steps": OF_A_STEP // 2, "max_steps": 2},
    "masked, an environment": {"environment": True},
    "all are truncated": {"generation_kwargs": {"suppress_tokens": [0, END, *range(8, 99)]}},
    "none is truncated": {"generation_kwargs": {**FEW_WORDS, "forced_eos_token_id": END}},
    "not masked": {"mask_truncated_completions": False},
    "masked, grpo": {"loss_type": "grpo"},
}


def played(prompts: list[str], *_: Any) -> dict[str, Any]:
    """Completions with some tokens of an environment; the second one of each prompt is truncated."""
    words = [[4 + len(prompt.split()), 5, 6, 7, 3] for prompt in prompts]
    second = [prompts[:at].count(prompt) % 2 for at, prompt in enumerate(prompts)]
    return {
        "prompt_ids": [[int(word[1:]) + 3 for word in prompt.split()] for prompt in prompts],
        "completion_ids": [row if late else [*row[:-1], END] for row, late in zip(words, second, strict=True)],
        "logprobs": None,
        "env_mask": [[1, 0, 0, 1, 1]] * len(prompts),
    }


def kept(ids: torch.Tensor) -> torch.Tensor:
    """For completed texts the tokens up to their end; for truncated ones none."""
    ended = (ids == END).int()
    return ((ended.cumsum(-1) - ended) == 0) & (ended.sum(-1, keepdim=True) > 0)


def by_the_formula(model: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], int]:
    """DAPO's equation 8, in float64, for the policy that has generated.

    A mean over the tokens of all ranks' completed texts, without an environment's tokens. Returns the gradient, and
    the number of these tokens.
    """
    model = copy.deepcopy(model).double()
    model.zero_grad()
    tokens = 0
    for batch in batches:
        prompt, completion = batch["prompt_ids"], batch["completion_ids"]
        alive = kept(completion)
        mask = alive if "tool_mask" not in batch else alive & batch["tool_mask"].bool()
        logits = model(
            input_ids=torch.cat([prompt, completion], dim=1),
            attention_mask=torch.cat([batch["prompt_mask"], alive | (alive.sum(-1, keepdim=True) == 0)], dim=1),
        ).logits[:, prompt.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)
        (-(logprobs * batch["advantages"].double().unsqueeze(-1))[mask].sum()).backward()
        tokens += int(mask.sum())
    sums = {name: parameter.grad for name, parameter in model.named_parameters()}
    if RANKS > 1:
        for gradient in sums.values():
            torch.distributed.all_reduce(gradient)
        count = torch.tensor(tokens)
        torch.distributed.all_reduce(count)
        tokens = int(count)
    return {name: gradient / max(tokens, 1) for name, gradient in sums.items()}, tokens


def trained(case: str, out: Path) -> dict[str, Any]:
    """The mean gradient of the case's optimizer steps, and that of the formula."""
    settings = {"mask_truncated_completions": True, "generation_kwargs": FEW_WORDS, **CASES[case]}
    of_an_environment = settings.pop("environment", False)
    trainer = small.rollouts(
        "GRPO",
        out,
        [of_some_words],
        **{
            "learning_rate": 0.0,
            "max_grad_norm": 1e9,
            "gradient_accumulation_steps": OF_A_STEP,
            "steps_per_generation": OF_A_STEP,
            **settings,
        },
    )
    trainer.processing_class.model_input_names = ["input_ids", "attention_mask"]  # for transformers 4
    if of_an_environment:
        trainer.rollout_func = played
    seen = Gradients()
    trainer.add_callback(seen)
    batches = recorded(trainer)
    trainer.train()
    right, tokens = by_the_formula(trainer.model, batches)
    found = torch.cat([(total / seen.steps).flatten() for total in seen.sums.values()])
    expected = torch.cat([right[name].flatten() for name in seen.sums])
    trainer.eval_dataset = trainer.train_dataset
    torch.manual_seed(0)
    return {
        "factor": float(found @ expected / (expected @ expected)) if tokens else None,
        "error": float((found - expected).norm() / expected.norm()) if tokens else None,
        "norm": float(found.norm()),
        "tokens": tokens,
        "gradient": [float(value).hex() for value in found[:50]],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "seen": [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry],
        "evaluated": None if RANKS > 1 or case == HALF else trainer.evaluate()["eval_loss"],
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    import trl  # noqa: F401  (patches that apply at once are imported)

    report: dict[str, Any] = {}
    for state, names in STATES.items():
        if RANKS > 1 and state in ONLY:
            continue
        rows: Any = rlhf_patches.apply(only=names) if names else {}
        for name in names:
            report[name] = [rows[name].version, rows[name].status.value]
        report[state] = {case: trained(case, options.out) for case in options.cases if case in ONLY.get(state, CASES)}
        rlhf_patches.revert()
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
