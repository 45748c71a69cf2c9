"""Gradients of KTO with Liger's own loss, and the same from the formula, both in float64: ``--out FOLDER [CASE ...]``.

Each case before apply() of trl-kto-liger-reference, after it, and after revert().
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-kto-liger-reference"
CASES: dict[str, dict[str, Any]] = {
    "PEFT": {},
    "PEFT, its own adapter as reference": {"wrapped": True},
    "PEFT, without Liger": {"use_liger_kernel": False},
    "a reference model": {"peft": False},
}
BETA = 0.3
LOSS_ALONE = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False)
"""Of Liger's kernels none in the model, which would be interpreted: the loss is made of torch's functions."""


class Gradients(TrainerCallback):
    """What the optimizer gets."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.found = {name: each.grad.clone() for name, each in named if each.requires_grad and each.grad is not None}


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return off_zero(made)


def off_zero(model: Any) -> Any:
    """An adapter begins with zeros, where policy and reference are the same."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_B.default" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def trainer(out: Path, peft: bool = True, wrapped: bool = False, **settings: Any) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import KTOConfig, KTOTrainer

    given = {
        "use_liger_kernel": True,
        "liger_kernel_config": LOSS_ALONE,
        "learning_rate": 0.0,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
    }
    arguments = KTOConfig(output_dir=str(out), beta=BETA, **{**small.STEPS, **given, **settings})
    rows = Dataset.from_dict(
        {
            "prompt": ["w1 w2", "w3", "w4 w5 w6", "w7"],
            "completion": [" w8 w9 w10", " w11 w12", " w13", " w14 w15 w16 w17"],
            "label": [True, False, True, False],
        }
    )
    model = small.model().double()
    if wrapped:
        model = adapted(model)
    config = (
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if peft and not wrapped else None
    )
    other = None
    if not peft:
        other = small.model().double()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.3)
    made = KTOTrainer(
        model, other, arguments, train_dataset=rows, processing_class=small.tokenizer(), peft_config=config
    )
    return made if wrapped else (off_zero(made.model), made)[1]


def log_probabilities(model: Any, batch: dict[str, Any], prefix: str = "") -> torch.Tensor:
    """Of each row's answer, in float64."""
    ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}completion_mask"][:, 1:]
    logits = model(input_ids=ids, attention_mask=batch[f"{prefix}attention_mask"]).logits[:, :-1]
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (found * mask).sum(-1)


def by_the_formula(policy: Any, reference: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """KTO (https://arxiv.org/abs/2402.01306), equations 6 to 8, as a mean over the rows."""
    policy = copy.deepcopy(policy)
    policy.zero_grad()
    with torch.no_grad():
        apart = log_probabilities(policy, batch, "KL_") - log_probabilities(reference, batch, "KL_")
        kl = apart.mean().clamp(min=0)
        against = log_probabilities(reference, batch)
    ratios = log_probabilities(policy, batch) - against
    signs = torch.where(batch["label"].bool(), 1.0, -1.0).double()
    (1 - torch.sigmoid(BETA * (ratios - kl) * signs)).mean().backward()
    return {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}


def trained(case: str, out: Path) -> dict[str, Any]:
    made = trainer(out, **CASES[case])
    seen, batches = Gradients(), []
    made.add_callback(seen)
    compute_loss = made.compute_loss

    def recording(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append({name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return compute_loss(model, inputs, *args, **kwargs)

    made.compute_loss = recording
    made.train()
    del made.compute_loss
    if made.ref_model is not None:
        reference = made.ref_model
    elif "ref" in made.model.peft_config:  # a copy of the adapter that the model came with
        reference = copy.deepcopy(made.model)
        reference.set_adapter("ref")
    else:
        reference = small.model().double()
    right = by_the_formula(made.model, reference, batches[0])
    found = torch.cat([seen.found[name].flatten() for name in right])
    expected = torch.cat([each.flatten() for each in right.values()])
    return {
        "factor": float(found.norm() / expected.norm()),
        "error": float((found - expected).norm() / expected.norm()),
        "gradient": [float(value).hex() for value in found[:40]],
    }


def prepare() -> None:
    """Let Liger's losses run on a CPU."""
    torch._dynamo.config.disable = True  # Liger compiles its loss, for which there are minutes of C++ here
    from triton.runtime.driver import driver

    try:
        driver.active.get_benchmarker()
    except RuntimeError:  # Triton finds no device to choose kernels for, and none runs
        driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))


def main() -> None:
    prepare()
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    states.report(NAME, lambda: {case: trained(case, options.out) for case in options.cases}, options.out)


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    main()
