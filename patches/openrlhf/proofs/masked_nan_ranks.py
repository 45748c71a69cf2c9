"""OpenRLHF's `PolicyLoss` with NaN in masked tokens, and with weights that overflow in filtered ones.

``--out FOLDER``, on one rank, with the folder of an OpenRLHF release on sys.path. The test contains the formulas.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from openrlhf.models.loss import PolicyLoss

from rlhf_patches.proving import states

NAME = "openrlhf-masked-nan"
MASK = [[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
LOW, HIGH, DUAL = 0.5, 5.0, 1.5
OVERFLOW = 1000.0
WITH_VLLM = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
DIVERGENCES = ("binary_kl", "tv")
OBJECTIVES = ("ppo", "dual", "gspo", *WITH_VLLM, *DIVERGENCES)


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_loss(objective: str, level: str = "seq") -> Any:
    """The release's loss; None if the release does not support the objective."""
    if objective in ("ppo", "gspo"):
        return PolicyLoss(policy_loss_type=objective)
    if objective == "dual":
        return PolicyLoss(dual_clip=DUAL)
    try:
        if objective in DIVERGENCES:
            return PolicyLoss(
                is_correction_level=level, is_correction_gating=objective, is_correction_threshold=[0.0, HIGH]
            )
        level, mode = WITH_VLLM[objective]
        return PolicyLoss(is_correction_level=level, is_correction_mode=mode, is_correction_threshold=[LOW, HIGH])
    except TypeError:  # before 0.11.2
        if objective in DIVERGENCES:
            return None
        return PolicyLoss(
            enable_vllm_is_correction=True,
            vllm_is_truncated_threshold=[LOW, HIGH],
            vllm_is_correction_type=objective,
        )


def make_batch(masked: float, overflow: bool) -> dict[str, torch.Tensor]:
    """Finite numbers where the mask is 1, except for one weight that overflows, if requested."""
    generator = torch.Generator().manual_seed(4)
    means = {"log_probs": -2.0, "old_log_probs": -2.0, "rollout_log_probs": -2.0, "advantages": 0.0}
    batch = {name: mean + 0.4 * torch.randn(3, 5, generator=generator) for name, mean in means.items()}
    if overflow:
        batch["rollout_log_probs"][1, 2] -= OVERFLOW
    mask = torch.tensor(MASK)
    return {name: values.masked_fill(mask == 0, masked) for name, values in batch.items()} | {"action_mask": mask}


def numbers(value: Any) -> Any:
    """Values for JSON: NaN as a text, so that it equals itself."""
    if isinstance(value, list):
        return [numbers(one) for one in value]
    return "nan" if value != value else value


def run(loss: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    log_probs = batch["log_probs"].clone().requires_grad_()
    value, clip_ratio, ppo_kl, vllm_kl, *_ = loss(**{**batch, "log_probs": log_probs})
    value.backward()
    assert log_probs.grad is not None
    return {
        "loss": numbers(value.item()),
        "gradient": numbers(log_probs.grad.tolist()),
        "metrics": [None if one is None else numbers(one.item()) for one in (clip_ratio, ppo_kl, vllm_kl)],
    }


def converted(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {key: values.to(dtype) if values.is_floating_point() else values for key, values in batch.items()}


def of_types() -> dict[str, Any]:
    """Without errors in the input: loss, metrics, and the gradients of trained tokens, including the sign of zeros."""
    found = {}
    dtypes = (torch.float32, torch.float64, *HALF.values())
    masks = (torch.long, torch.bool, torch.float32, None)
    for objective, dtype, mask in itertools.product(OBJECTIVES, dtypes, masks):
        loss = make_loss(objective)
        if loss is None or (mask is None and objective == "gspo"):  # which multiplies by the mask
            continue
        batch = converted(make_batch(-2.0, False), dtype)
        kept = batch["action_mask"] == 1 if mask else torch.ones(3, 5, dtype=torch.bool)
        batch["action_mask"] = batch["action_mask"].to(mask) if mask else None
        of_this = run(loss, batch)
        of_this["gradient"] = [
            str(one)
            for one, trained in zip(itertools.chain(*of_this["gradient"]), kept.flatten(), strict=True)
            if trained
        ]
        found[f"{objective}, {dtype}, {mask}"] = of_this
    return found


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for objective in OBJECTIVES:
        loss = make_loss(objective)
        if loss is None:
            continue
        for overflow in (False, True) if objective in WITH_VLLM else (False,):
            for name, masked in (("zero", 0.0), ("nan", float("nan")), ("inf", float("-inf"))):
                batch = make_batch(masked, overflow)
                found[f"{objective}{', overflow' if overflow else ''}, {name}"] = run(loss, batch)
        for place in ("old_log_probs", "log_probs", "advantages", "rollout_log_probs"):
            batch = make_batch(0.0, False)
            batch[place][0, 0] = float("nan")
            found[f"{objective}, trained on, {place}"] = run(loss, batch)
    for objective, level, dtype in itertools.product(DIVERGENCES, ("token", "seq"), HALF):
        loss = make_loss(objective, level)
        for name, masked in (("harmless", -2.0), ("zero", 0.0), ("nan", float("nan")), ("inf", float("-inf"))):
            batch = converted(make_batch(masked, False), HALF[dtype])
            if loss is not None:
                found[f"{objective}, {level}, {dtype}, {name}"] = run(loss, batch)
    found["types"] = of_types()
    batch = make_batch(float("nan"), True)
    given = {name: (values, values.clone(), values._version) for name, values in batch.items()}
    run(make_loss("seq-mask-tis"), batch)
    found["inputs left alone"] = all(
        values is batch[name] and torch.equal(values.nan_to_num(), copy.nan_to_num()) and values._version == version
        for name, (values, copy, version) in given.items()
    )
    batch = make_batch(0.0, True)
    found["batch"] = {name: values.tolist() for name, values in batch.items()}
    found["plain rollout"] = make_batch(0.0, False)["rollout_log_probs"].tolist()
    return found


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
