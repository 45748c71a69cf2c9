"""TRL's GRPO trainer on completions that vLLM has sampled and, of one token or several, not scored.

vLLM cannot run here. Its answers are made up in its own form, `RequestOutput`; what takes the log-probabilities out of
them (`extract_logprobs`), what makes a batch of them, and the loss are TRL's. The reference is computed in float64 from
the definition, with the log-probabilities of the same model.
"""

from __future__ import annotations

import copy
import json
import math
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl.generation import vllm_generation

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.vllm_nan_logprob_cases import (
    CAP,
    COMPLETIONS,
    DIFFERENCES,
    MODES,
    REWARDS,
    UNSCORED,
)
from rlhf_patches.proving import states

NAME = "trl-vllm-nan-logprob"
PROMPT = small.PROMPTS[0]
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{mode}, {name}": (mode, unscored) for mode in MODES for name, unscored in UNSCORED.items()},
    "not corrected": (MODES[0], UNSCORED["several"], False),
}


class Sampler:
    """In the place of ``VLLMGeneration``: answers with the completions above."""

    def __init__(self, model: Any, prompt: list[int], unscored: list[tuple[int, int]]) -> None:
        self.logprobs = [
            [
                math.nan if (row, column) in unscored else exact - difference
                for column, (exact, difference) in enumerate(zip(exacts, differences, strict=True))
            ]
            for row, (exacts, differences) in enumerate(zip(log_probs(model, prompt), DIFFERENCES, strict=True))
        ]

    def sync_weights(self) -> None:
        """The weights are the trainer's."""

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> Any:
        completions = [
            SimpleNamespace(
                logprobs=[
                    {token: SimpleNamespace(logprob=one, rank=1)} for token, one in zip(tokens, logprobs, strict=True)
                ]
            )
            for tokens, logprobs in zip(COMPLETIONS, self.logprobs, strict=True)
        ]
        logprobs, token_ids = vllm_generation.extract_logprobs([SimpleNamespace(outputs=completions)])
        more: tuple[Any, ...] = ({},) if trl.__version__.startswith("0.") else ()  # extra fields
        return prompts, COMPLETIONS, logprobs, token_ids, *more


def log_probs(model: Any, prompt: list[int]) -> list[list[float]]:
    """Of each completion's tokens, in float64, without padding."""
    with torch.no_grad():
        return [of_tokens(model.double(), prompt, tokens).tolist() for tokens in COMPLETIONS]


def of_tokens(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def reference(model: Any, prompt: list[int], mode: str, unscored: list[tuple[int, int]]) -> dict[str, Any]:
    """Ratios, loss and gradients: GRPO's loss at the policy that has sampled, times the truncated or masked ratio.

    The ratio of a token that was not scored is 1.
    """
    advantages = torch.tensor(REWARDS, dtype=torch.float64)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-4)
    loss, ratios = torch.zeros((), dtype=torch.float64), []
    for row, (tokens, differences) in enumerate(zip(COMPLETIONS, DIFFERENCES, strict=True)):
        current = of_tokens(model, prompt, tokens)
        known = [0.0 if (row, column) in unscored else one for column, one in enumerate(differences)]
        log_ratio = torch.tensor(known, dtype=torch.float64)
        ratio = (log_ratio.sum(0, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
        ratio = ratio.clamp(max=CAP) if mode.endswith("truncate") else ratio * (ratio <= CAP)
        ratios.append(ratio.expand(len(tokens)).tolist())
        loss = loss - ((current - current.detach()).exp() * advantages[row] * ratio).mean() / len(COMPLETIONS)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return {"ratios": ratios, "loss": loss.item(), "gradients": gradients}


def trained(out: Path, mode: str, unscored: list[tuple[int, int]], corrected: bool = True) -> dict[str, Any]:
    """The batch and the loss of TRL's trainer, with the distance from the reference."""

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return REWARDS

    trainer = small.rollouts(
        "GRPO",
        out,
        [reward],
        loss_type="grpo",
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_cap=CAP,
        vllm_importance_sampling_correction=corrected,
        off_policy_mask_threshold=0.5,
    )
    model, prompt = trainer.model, trainer.processing_class(PROMPT)["input_ids"]
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    sampler = Sampler(copy.deepcopy(model), prompt, unscored)
    trainer.vllm_generation = sampler
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    try:
        batch = trainer._generate_and_score_completions([{"prompt": PROMPT}] * 2)
    except RuntimeError as error:
        return {"failed": str(error), "traceback": traceback.format_exc()}
    expected = reference(copy.deepcopy(model).double(), prompt, mode, unscored)
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    found = {"loss": loss.item(), "mask": batch["completion_mask"].tolist(), "metrics": metrics(trainer)}
    if corrected:
        ratios = batch["importance_sampling_ratio"].expand(-1, 4)
        found["ratios"] = [ratios[row, : len(tokens)].tolist() for row, tokens in enumerate(COMPLETIONS)]
        found["expected"] = {"ratios": expected["ratios"], "loss": expected["loss"]}
        scale = max(one.abs().max().item() for one in expected["gradients"])
        pairs = zip((one.grad.double() for one in model.parameters()), expected["gradients"], strict=True)
        found["distance of gradients"] = max((one - other).abs().max().item() for one, other in pairs) / scale
    return found


def metrics(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("sampling/")}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--released", action="store_true", help="a release without the bug, as it is")
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()

    def observe() -> dict[str, Any]:
        return {case: trained(options.out, *CASES[case]) for case in options.cases}

    if options.released:
        (options.out / "rank0.json").write_text(json.dumps({"version": trl.__version__, "released": observe()}))
    else:
        states.report(NAME, observe, options.out)
