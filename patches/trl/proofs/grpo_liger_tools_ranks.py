"""Gradients of GRPO with Liger's own loss, and the same from the formula, both in float64: ``--out FOLDER [CASE ...]``.

Some tokens of the completions are said to be a tool's. Before apply() of trl-grpo-liger-tools, after it, and after
revert().
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.kto_liger_reference_ranks import LOSS_ALONE
from rlhf_patches.proving import states

NAME = "trl-grpo-liger-tools"
CASES: dict[str, dict[str, Any]] = {
    "tools": {},
    "tools, bnpo": {"loss_type": "bnpo"},
    "no tools": {"tools": False},
    "tools, without Liger": {"use_liger_kernel": False},
    "no tools, without Liger": {"tools": False, "use_liger_kernel": False},
    "tools, own loss": {"own": "loss"},
    "tools, own forward": {"own": "forward"},
    "tools, own compute": {"own": "compute"},
}


def tool_mask(completion_mask: torch.Tensor) -> torch.Tensor:
    """Of each completion the second and the third token are a tool's."""
    made = torch.ones_like(completion_mask)
    made[:, 1:3] = 0
    return made


def by_the_formula(model: Any, batch: dict[str, torch.Tensor], loss_type: str) -> list[torch.Tensor]:
    """GRPO's gradient where the policy is the one that has generated: a mean over each sequence's tokens, or over all.

    bnpo's is over all. In float64; only tokens that the model has written count.
    """
    model = copy.deepcopy(model).double()
    model.zero_grad()
    prompt, completion = batch["prompt_ids"], batch["completion_ids"]
    mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).double()
    logits = model(
        input_ids=torch.cat([prompt, completion], dim=1),
        attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    ).logits[:, prompt.shape[1] - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)
    terms = -logprobs * batch["advantages"].double().unsqueeze(-1) * mask
    loss = terms.sum() / mask.sum() if loss_type == "bnpo" else (terms.sum(-1) / mask.sum(-1)).mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def trained(case: str, out: Path) -> dict[str, Any]:
    """How far the gradient is from the formula's, by its norm."""
    settings = {"use_liger_kernel": True, "loss_type": "grpo", **CASES[case]}
    tools, own = settings.pop("tools", True), settings.pop("own", "")

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [float(at) for at, _ in enumerate(completions)]

    trainer = small.rollouts(
        "GRPO", out, [rewards], liger_kernel_config=LOSS_ALONE, generation_kwargs={"min_new_tokens": 4}, **settings
    )
    if settings["use_liger_kernel"]:
        trainer.liger_grpo_loss.compiled = False
    replaced(trainer, own)
    model = trainer.model.double()
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    torch.manual_seed(0)
    batch = trainer._generate_and_score_completions([{"prompt": small.PROMPTS[0]}] * 2)
    if tools:
        batch["tool_mask"] = tool_mask(batch["completion_mask"])
        trainer.tools = [len]  # 0.26 and 0.27 ask for these, and not for the mask
    batch["advantages"] = batch["advantages"].double()
    expected = torch.cat([one.flatten() for one in by_the_formula(model, batch, settings["loss_type"])])
    model.zero_grad()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    found = torch.cat([one.grad.flatten() for one in model.parameters()])
    return {
        "error": float((found - expected).norm() / expected.norm()),
        "loss": float(loss).hex(),
        "gradient": [float(value).hex() for value in found[:50]],
    }


class OwnLoss:
    """A user's loss: it calls Liger's with the mask that it gets."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, *args: Any, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        return self.loss(*args, attention_mask=attention_mask, **kwargs)


def replaced(trainer: Any, own: str) -> None:
    """A function of the user's in place of Liger's loss, of its forward, or of the trainer's method around it."""
    if own == "loss":
        trainer.liger_grpo_loss = OwnLoss(trainer.liger_grpo_loss)
    elif own == "forward":
        theirs = trainer.liger_grpo_loss.forward
        trainer.liger_grpo_loss.forward = lambda *args, **kwargs: theirs(*args, **kwargs)
    elif own == "compute":
        calls = trainer.compute_liger_loss
        trainer.compute_liger_loss = lambda *args, **kwargs: calls(*args, **kwargs)


def without_optional_packages() -> None:
    """Transformers 5 answers with a pair, which these releases take for yes (trl-optional-packages)."""
    from trl import import_utils

    theirs = import_utils._is_package_available

    def is_there(*args: Any, **kwargs: Any) -> Any:
        found = theirs(*args, **kwargs)
        return found[0] if isinstance(found, tuple) and not kwargs.get("return_version") else found

    import_utils._is_package_available = is_there


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[case for case in CASES if case != "no tools, without Liger"])
    options = parser.parse_args()
    without_optional_packages()
    states.report(NAME, lambda: {case: trained(case, options.out) for case in options.cases}, options.out)


if __name__ == "__main__":
    main()
