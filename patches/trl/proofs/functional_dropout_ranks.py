"""DPO's first step with disable_dropout, and that of a model without dropout in float64: ``--out FOLDER [CASE...]``.

Each case before apply() of trl-functional-dropout, after it, and after revert().
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    TrainerCallback,
)

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-functional-dropout"
SIZE: dict[str, Any] = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
ROWS = [
    {"prompt": "w1 w2 w3", "chosen": " w4 w5 w6 w7", "rejected": " w8 w9"},
    {"prompt": "w10 w11", "chosen": " w12 w13", "rejected": " w14 w15 w16 w17"},
]
BETA = 0.1


def opt(**settings: Any) -> Any:
    return OPTForCausalLM(OPTConfig(**SIZE, **TOKENS, ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=64))


def seed_oss(**settings: Any) -> Any:
    return SeedOssForCausalLM(
        SeedOssConfig(**SIZE, **TOKENS, intermediate_size=32, num_key_value_heads=2, head_dim=8, **settings)
    )


def llama(**settings: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZE, **TOKENS, intermediate_size=32, **settings))


MODELS: dict[str, Callable[[], Any]] = {
    "OPT": opt,
    "Seed-OSS": seed_oss,
    "Llama, attention_dropout": lambda: llama(attention_dropout=0.1),
    "Llama": llama,
}
KEPT = {"OPT, dropout kept": opt}
CASES = (*MODELS, *KEPT)


class _Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.found = {name: each.grad.double() for name, each in named if each.grad is not None}


def exact_gradient(model: Any, dataset: Any) -> dict[str, torch.Tensor]:
    """Of DPO where policy and reference are equal: half of beta times that of the difference."""
    exact = copy.deepcopy(model).double().eval()
    loss = torch.zeros((), dtype=torch.float64)
    ids = "ids" if "prompt_ids" in dataset.column_names else "input_ids"  # until 0.28
    for row in dataset:
        prompt = row[f"prompt_{ids}"]
        for answer, sign in (("chosen", -1), ("rejected", 1)):
            tokens = torch.tensor([prompt + row[f"{answer}_{ids}"]])
            logits = exact(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
            answers = tokens[0, len(prompt) :, None]
            loss = loss + sign * logits.log_softmax(-1).gather(-1, answers).sum() * BETA / 2 / len(dataset)
    loss.backward()
    return {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}


def step(make: Callable[[], Any], out: Any, **settings: Any) -> dict[str, Any]:
    """How far loss and gradient of the first step are from those without dropout; and the model's settings."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    import trl
    from datasets import Dataset

    torch.manual_seed(0)
    model = make()
    exact, reference = copy.deepcopy(model), copy.deepcopy(model)
    options = {**small.STEPS, "output_dir": str(out / "trainer"), "max_steps": 1, "logging_steps": 1}
    options |= {"learning_rate": 0.0, "per_device_train_batch_size": 2, "beta": BETA, **settings}
    gradients = _Gradients()
    trainer = trl.DPOTrainer(
        model,
        ref_model=reference,
        args=trl.DPOConfig(**options),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=small.tokenizer(),
        callbacks=[gradients],
    )
    torch.manual_seed(1)
    trainer.train()
    right = exact_gradient(exact, trainer.train_dataset)
    found = torch.cat([gradients.found[name].flatten() for name in right])
    expected = torch.cat([each.flatten() for each in right.values()])
    own = [module for module in model.modules() if any("drop" in name for name in vars(module))]
    return {
        "loss": float(trainer.state.log_history[0]["loss"]) - math.log(2),
        "error": float((found - expected).norm() / expected.norm()),
        "gradient": [float(value).hex() for value in found[::97]],
        "left": sum(
            isinstance(value, float) and value > 0
            for module in own
            for name, value in vars(module).items()
            if "drop" in name
        ),
        "config": {name: value for name, value in model.config.to_dict().items() if "drop" in name},
    }


def of_case(case: str, out: Any) -> dict[str, Any]:
    if case in KEPT:
        return step(KEPT[case], out, disable_dropout=False)
    return step(MODELS[case], out)


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    states.report_cases(
        NAME, lambda cases: {case: of_case(case, options.out) for case in cases}, options.cases, options.out
    )


if __name__ == "__main__":
    main()
