"""TRL's trainers on Granite, and on a model that is the same without a factor: ``--out FOLDER [CASE ...]``.

Logits that are divided by 8 are those of a head whose weights are divided by 8, bit for bit. Of each trainer the loss
and the gradient of the backbone in one step, of both models; and of models that a user has changed.
"""

from __future__ import annotations

import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import trl
from peft import LoraConfig
from transformers import GraniteConfig, GraniteForCausalLM, TrainerCallback

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.logit_scaling_ranks import NAME, SCALING, TINY
from rlhf_patches.proving import states
from tests.patches.trl import no_alarms_ranks as runs

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class UnscaledForCausalLM(GraniteForCausalLM):
    """A user's, whose forward gives the head's own products."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.scaled(super().forward(*args, **kwargs))

    @staticmethod
    def scaled(found: Any) -> Any:
        if found.logits is not None:
            found.logits = found.logits * SCALING
        return found


class MyGraniteForCausalLM(GraniteForCausalLM):
    """A user's, with Granite's forward."""


def granite(kind: type = GraniteForCausalLM, scaling: float = SCALING, **settings: Any) -> Any:
    torch.manual_seed(0)
    options = {"num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1}
    model: Any = kind(GraniteConfig(**TINY, **options, logits_scaling=scaling))
    with torch.no_grad():
        model.lm_head.weight.normal_().div_(SCALING / scaling)
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def with_a_forward(model: Any) -> Any:
    """Its logits are the head's own products."""
    released = model.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return UnscaledForCausalLM.scaled(released(*args, **kwargs))

    model.forward = types.MethodType(forward, model)
    return model


class Gradients(TrainerCallback):
    """Of the layers, whose weights both models have."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.found = [
            float(each.grad.double().norm()) for name, each in named if each.grad is not None and "layers" in name
        ]


def step(kind: str, data: Any, make: Callable[[], Any], more: dict[str, Any] | None = None, **settings: Any) -> Any:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    gradients = Gradients()
    options: dict[str, Any] = {
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 0.0,
        "per_device_train_batch_size": 2,
        **settings,
    }
    options["gradient_accumulation_steps"] = 1
    given: dict[str, Any] = {**(more or {}), "callbacks": [gradients]}
    if kind == "GRPO":
        trainer = small.rollouts(
            kind,
            runs.Path(),
            [runs.of_some_words],
            policy=make(),
            more=given,
            ddp_backend=None,
            **{**small.STEPS, **options},
        )
    else:
        if kind in ("DPO", "KTO") and "peft_config" not in given:
            given["ref_model"] = reference(make)
        trainer = runs.made(kind, data, model=make, more=given, **options)
    if hasattr(type(trainer), "_chunked_logps") or hasattr(type(trainer), "_get_per_token_logps_and_entropies"):
        # 1.14's own chunked head; as an argument it needs Liger's package.
        trainer.use_liger_kernel = True
        trainer._forward_redirection = importlib.import_module("trl.models.utils")._ForwardRedirection()
    trainer.train()
    log = trainer.state.log_history[0]
    return {"log": {name: log[name] for name in ("loss", "entropy") if name in log}, "gradients": gradients.found}


def reference(make: Callable[[], Any]) -> Any:
    """Another than the policy: else DPO's loss says nothing of it."""
    model = make()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    return model


def sft() -> Any:
    chunked: dict[str, Any] = {"loss_type": "chunked_nll"} if "chunked_nll" in str(trl.SFTConfig.__doc__) else {}
    return functools.partial(step, "SFT", runs.TEXT, **chunked)


TRAINERS: dict[str, Callable[..., Any]] = {
    "SFT": lambda make: sft()(make),
    "SFT, LoRA": lambda make: sft()(make, more={"peft_config": LORA}),
    "DPO": lambda make: step("DPO", runs.PREFERENCES, make),
    "DPO, compiled": lambda make: step(
        "DPO", runs.PREFERENCES, make, torch_compile=True, torch_compile_backend="eager"
    ),
    "KTO": lambda make: step("KTO", runs.LABELS, make),
    "GRPO": lambda make: step("GRPO", None, make),
}
USERS: dict[str, Callable[[], Any]] = {
    "own forward": functools.partial(granite, UnscaledForCausalLM),
    "own forward of an instance": lambda: with_a_forward(granite()),
    "own output_multiplier": functools.partial(granite, output_multiplier=1 / 16),
    "own logit_scale": functools.partial(granite, logit_scale=1 / SCALING),
    "own subclass": functools.partial(granite, MyGraniteForCausalLM),
    "without a factor": functools.partial(granite, scaling=1.0),
}


def observe(cases: list[str]) -> dict[str, Any]:
    found = {}
    for case in cases:
        if case in TRAINERS:
            found[case] = TRAINERS[case](granite)
            found[f"{case}, right"] = TRAINERS[case](functools.partial(granite, scaling=1.0))
        else:
            found[case] = sft()(USERS[case])
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*TRAINERS, *USERS])
    options = parser.parse_args()
    os.chdir(states.folder())
    states.report_cases(NAME, observe, options.cases, options.out)
