"""The loss and gradient of an SFT step, and the model's own in float64, on one rank: ``--out FOLDER``.

Of models whose forward scales or caps their logits, each before apply() of trl-logit-scaling, after it, and after
revert(). The loss type is TRL's chunked one, or the default where that has none.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    TrainerCallback,
)

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-logit-scaling"
SCALING, CAP = 8.0, 0.5
TEXTS = ("w1 w2 w3 w4 w5", "w6 w7 w8 w9 w10")
TINY = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def granite() -> Any:
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**TINY, num_key_value_heads=2, logits_scaling=SCALING))
    return spread(model)


def recurrent_gemma() -> Any:
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        **TINY | {"num_hidden_layers": 2}, logits_soft_cap=CAP, block_types=("recurrent", "attention")
    )
    return spread(RecurrentGemmaForCausalLM(config))


def spread(model: Any) -> Any:
    """With logits of size 1 and more: a new model's are nearly 0, scaled or not."""
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


MODELS = {"Granite": granite, "RecurrentGemma": recurrent_gemma, "Qwen2": small.model}


class _Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.found = {name: each.grad.double() for name, each in named if each.grad is not None}


def step(model: Any, **settings: Any) -> dict[str, Any]:
    """A step with two texts: its loss, and how far loss and gradient are from the model's own in float64."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    import trl
    from datasets import Dataset

    exact = copy.deepcopy(model).double()
    texts = Dataset.from_list([{"text": text} for text in TEXTS])
    if "chunked_nll" in str(trl.SFTConfig.__doc__):
        settings.setdefault("loss_type", "chunked_nll")
    options = {**small.STEPS, "output_dir": "trainer", "max_steps": 1, "logging_steps": 1, "learning_rate": 0.0}
    options |= {"per_device_train_batch_size": 2, "packing": False, **settings}
    gradients = _Gradients()
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(**options),
        train_dataset=texts,
        processing_class=small.tokenizer(),
        callbacks=[gradients],
    )
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    labels = batch["labels"][:, 1:]
    logits = exact(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    tokens = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = -tokens[labels != -100].mean()
    loss.backward()
    difference = total = 0.0
    for name, parameter in exact.named_parameters():
        if parameter.grad is not None:
            difference += float((gradients.found[name] - parameter.grad).square().sum())
            total += float(parameter.grad.square().sum())
    found = float(trainer.state.log_history[0]["loss"])
    return {"loss": found, "own loss": float(loss), "gradient": (difference / total) ** 0.5}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*MODELS])
    options = parser.parse_args()
    os.chdir(states.folder())
    states.report_cases(NAME, lambda cases: {case: step(MODELS[case]()) for case in cases}, options.cases, options.out)
