"""Gradients of DPO with Liger's own loss, and without, and the same from formulas in float64: ``--out FOLDER CASE...``.

Each case before apply() of trl-dpo-liger-settings and trl-dpo-liger-label-smoothing, after it, and after revert().
"""

from __future__ import annotations

import copy
import json
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.kto_liger_reference_ranks import LOSS_ALONE, Gradients, prepare
from rlhf_patches.proving import states

NAMES = ("trl-dpo-liger-settings", "trl-dpo-liger-label-smoothing")
BETA, SMOOTHED, TAU = 0.3, 0.2, 0.5
SMOOTHING = {"label_smoothing": SMOOTHED}
CASES: dict[str, dict[str, Any]] = {
    "robust": {"loss_type": "robust", **SMOOTHING},
    "discopop": {"loss_type": "discopop", "discopop_tau": TAU},
    "exo_pair": {"loss_type": "exo_pair", **SMOOTHING},
    "robust, no smoothing": {"loss_type": "robust"},
    "robust, refused": {"loss_type": "robust", "label_smoothing": 0.6},
    "sigmoid": {"loss_type": "sigmoid", **SMOOTHING},
    "apo_zero": {"loss_type": "apo_zero", **SMOOTHING},
    "robust, without Liger": {"loss_type": "robust", "liger": False, **SMOOTHING},
    "sigmoid, without Liger": {"loss_type": "sigmoid", "liger": False, **SMOOTHING},
}


def losses(kind: str, margin: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, smoothing: float) -> Any:
    """Of each pair, by beta times the log ratios of its answers, and their difference.

    Chowdhury et al. (https://arxiv.org/abs/2403.00409), 12; Lu et al. (https://arxiv.org/abs/2406.08414), 5; Ji et al.
    (https://arxiv.org/abs/2402.00856), 16 for two answers; Mitchell's cDPO (https://ericmitchell.ai/cdpo.pdf), 3;
    D'Oosterlinck et al. (https://arxiv.org/abs/2408.06266), 7.
    """
    right, flipped = -F.logsigmoid(margin), -F.logsigmoid(-margin)
    if kind == "robust":
        return ((1 - smoothing) * right - smoothing * flipped) / (1 - 2 * smoothing)
    if kind == "sigmoid":
        return (1 - smoothing) * right + smoothing * flipped
    if kind == "discopop":
        share = torch.sigmoid(margin / TAU)
        return right * (1 - share) + torch.exp(-margin) * share
    if kind == "exo_pair":
        wanted = torch.tensor([1 - smoothing, smoothing], dtype=torch.float64).log()
        found = torch.stack([margin, -margin], -1)
        return (found.sigmoid() * (F.logsigmoid(found) - wanted)).sum(-1)
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def log_probability(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + answer])
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).flatten()
    return logprobs[len(prompt) - 1 :].sum()


def by_the_formula(policy: Any, reference: Any, kind: str, smoothing: float) -> dict[str, torch.Tensor]:
    policy = copy.deepcopy(policy)
    policy.zero_grad()
    words = small.tokenizer()
    found = []
    for prompt, *answers in zip(*PAIRS.values(), strict=True):
        start = words(prompt)["input_ids"]
        ends = [[*words(answer)["input_ids"], words.eos_token_id] for answer in answers]
        with torch.no_grad():
            against = [log_probability(reference, start, end) for end in ends]
        chosen, rejected = (
            BETA * (log_probability(policy, start, end) - other) for end, other in zip(ends, against, strict=True)
        )
        found.append(losses(kind, chosen - rejected, chosen, rejected, smoothing))
    torch.stack(found).mean().backward()
    return {name: each.grad for name, each in policy.named_parameters()}


REVERTED = ("robust", "exo_pair")
PAIRS = {
    "prompt": ["w1 w2", "w3", "w4 w5 w6", "w7"],
    "chosen": [" w8 w9 w10", " w11 w12", " w13", " w14 w15 w16 w17"],
    "rejected": [" w18", " w19 w20 w21", " w22 w23", " w24 w25"],
}


def trained(case: str, out: Path) -> dict[str, Any]:
    import dataclasses

    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    settings = {"learning_rate": 0.0, "max_steps": 1, "per_device_train_batch_size": 4, **CASES[case]}
    known = {field.name for field in dataclasses.fields(DPOConfig)}
    switch = "use_liger_loss" if "use_liger_loss" in known else "use_liger_kernel"
    settings |= {switch: settings.pop("liger", True), "liger_kernel_config": LOSS_ALONE}
    settings = {name: value for name, value in settings.items() if name in known}
    policy, reference = small.model().double(), small.model().double()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.3)
    words = small.tokenizer()
    try:
        trainer = DPOTrainer(
            policy,
            reference,
            args=DPOConfig(output_dir=str(out), beta=BETA, **{**small.STEPS, **settings}),
            train_dataset=Dataset.from_dict(PAIRS),
            processing_class=words,
        )
    except ValueError as error:
        return {"refused": str(error), "log": traceback.format_exc()}
    seen = Gradients()
    trainer.add_callback(seen)
    trainer.train()
    found: torch.Tensor | None = None
    factors: dict[str, float] = {}
    for smoothing in (SMOOTHED if "label_smoothing" in settings else 0.0, 0.0):
        if settings["loss_type"] == "exo_pair" and not smoothing:
            continue
        right = by_the_formula(trainer.model, reference, settings["loss_type"], smoothing)
        found = torch.cat([seen.found[name].flatten() for name in right])
        expected = torch.cat([each.flatten() for each in right.values()])
        factors.setdefault("error", float((found - expected).norm() / expected.norm()))
        factors["error of none"] = float((found - expected).norm() / expected.norm())
    assert found is not None
    return {**factors, "gradient": [float(value).hex() for value in found[:40]]}


def main() -> None:
    prepare()
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    import trl  # noqa: F401

    report: dict[str, Any] = {}
    for state in ("before", "after", "reverted"):
        if state == "after":
            rows = rlhf_patches.apply(only=NAMES)
            report |= {name: [rows[name].version, rows[name].status.value] for name in NAMES}
        # Of what was refused or right before, the revert tells nothing.
        cases = [case for case in options.cases if state != "reverted" or case in REVERTED]
        with states.heard() as said:
            report[state] = {case: trained(case, options.out) for case in cases}
        if state == "after":
            rows = rlhf_patches.report()
            for key, name in zip(("reached", "reached by the advice"), NAMES, strict=True):
                if reached := rows[name].reached:
                    report[key] = reached.to_dict()
            report["said"] = [line for line in said if NAMES[1] in line]
        rlhf_patches.revert()
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
