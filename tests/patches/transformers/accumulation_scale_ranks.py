"""Steps of small models by ``Trainer`` over several micro-batches, on each of one or two ranks: ``--out FOLDER``.

As the proof of transformers-accumulation-scale: more models, losses and arguments, transformers-moe-aux-loss as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from rlhf_patches.patches.transformers.proofs import accumulation_scale_ranks
from rlhf_patches.patches.transformers.proofs.accumulation_scale_ranks import (
    LABELS,
    LLAMA,
    LLAMA_CLASSIFIER,
    RANKS,
    SIZES,
    T5,
    Case,
    Kind,
    Terms,
    aligned,
    class_of,
    flat,
    llama_classifier,
    words_of,
)

COEFFICIENT, SMOOTHING = 0.5, 0.1
BERT: dict[str, Any] = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert_classifier() -> Any:
    config = transformers.BertConfig(**BERT, num_labels=LABELS, problem_type="single_label_classification")
    return transformers.BertForSequenceClassification(config)


def bert_masked() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def mixtral() -> Any:
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    routed = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, **mixture, **routed))


def lora(model: Any, targets: list[str]) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False))


def number_of(_number: int, _ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn((), generator=generator)


def classes_of(_number: int, _ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2, (LABELS,), generator=generator).float()


def shifted(outputs: Any, labels: torch.Tensor) -> Terms:
    return flat(outputs.logits[:, :-1], labels[:, 1:])


def smoothed(outputs: Any, labels: torch.Tensor) -> Terms:
    logits, labels = outputs.logits[:, :-1].flatten(0, -2), labels[:, 1:].flatten()
    kept = labels != -100
    each = -torch.log_softmax(logits[kept], -1)
    right = each[torch.arange(len(each)), labels[kept]]
    return Terms(((1 - SMOOTHING) * right + SMOOTHING * each.mean(-1)).sum(), int(kept.sum()))


def routed(outputs: Any, labels: torch.Tensor) -> Terms:
    terms = shifted(outputs, labels)
    return Terms(terms.total, terms.items, COEFFICIENT * outputs.aux_loss)


def classes(outputs: Any, labels: torch.Tensor) -> Terms:
    logits = outputs.logits.double()
    total = functional.softplus(logits) - labels.double() * logits
    return Terms(total.sum(), labels.numel())


def squares(outputs: Any, labels: torch.Tensor) -> Terms:
    return Terms((outputs.logits.squeeze(-1) - labels.double()).square().sum(), labels.numel())


def of_items(window: Sequence[Sequence[Terms]], case: Case) -> list[torch.Tensor]:
    """Over the window's items, on all ranks or on each, and the mean of what is a mean already."""
    items: list[float] = [sum(each.items for each in own) for own in window]
    if case.arguments.get("average_tokens_across_devices", True):
        items = [sum(items) / len(items)] * len(items)
    parts = [torch.stack([torch.as_tensor(each.part) for each in own]).mean() for own in window]
    return [
        torch.stack([each.total for each in own]).sum() / number + part
        for own, number, part in zip(window, items, parts, strict=True)
    ]


CLASSIFIER = Kind(bert_classifier, class_of, aligned)


MASKED = Kind(bert_masked, words_of, aligned)


REGRESSION = Kind(lambda: llama_classifier("regression"), number_of, squares)


SEVERAL = Kind(lambda: llama_classifier("multi_label_classification"), classes_of, classes)


CAUSAL = Kind(llama, words_of, shifted, of_items)


MIXTURE = Kind(mixtral, words_of, routed, of_items)


SMOOTHED = Kind(llama, words_of, smoothed, of_items)


SMOOTHED_MIXTURE = Kind(mixtral, words_of, smoothed, of_items)


APART = {"average_tokens_across_devices": False}


UNSOUGHT = {"ddp_find_unused_parameters": False}


SMOOTH = {"label_smoothing_factor": SMOOTHING}


EACH = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


BY_ACCELERATE = {
    "gradient_accumulation_steps": 1,
    "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}},
}


BFLOAT16 = {"bf16": True}


def checkpoints(*, reentrant: bool) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


MEANS = {
    "T5": Case(T5, 4),
    "T5, one micro-batch": Case(T5, 1),
    "T5, it learns": Case(T5, 3, 5, rate=0.1),
    "T5, tokens not averaged": Case(T5, 3, 5, arguments=APART),
    "T5, parameters not looked for": Case(T5, 4, arguments=UNSOUGHT),
    "T5, each batch synchronized": Case(T5, 4, arguments=EACH),
    "T5, static graph": Case(T5, 3, 5, arguments={**EACH, **UNSOUGHT, "ddp_static_graph": True}),
    "T5, LoRA": Case(T5, 4, wrap=lambda model: lora(model, ["q", "v"])),
    "BERT masked": Case(MASKED, 3, 5),
    "BERT classifier, accelerate's steps": Case(CLASSIFIER, 4, arguments=BY_ACCELERATE),
    "BERT classifier, evaluated": Case(CLASSIFIER, 3, 5, evaluate=True),
    "Llama classifier": Case(LLAMA_CLASSIFIER, 4),
    "Llama classifier, checkpoints": Case(LLAMA_CLASSIFIER, 4, arguments=checkpoints(reentrant=False)),
    "Llama classifier, reentrant checkpoints": Case(LLAMA_CLASSIFIER, 4, arguments=checkpoints(reentrant=True)),
    "Llama regression": Case(REGRESSION, 4),
    "Llama multi-label": Case(SEVERAL, 4),
    "T5, bfloat16": Case(T5, 4, arguments=BFLOAT16),
    "Llama multi-label, bfloat16": Case(SEVERAL, 4, arguments=BFLOAT16),
    "T5, bfloat16 weights": Case(T5, 4, wrap=lambda model: model.bfloat16()),
}


WINDOWS = {
    "Llama": Case(CAUSAL, 4),
    "Llama, one micro-batch": Case(CAUSAL, 1),
    "Llama, it learns": Case(CAUSAL, 3, 5, rate=0.1),
    "Llama, tokens not averaged": Case(CAUSAL, 3, 5, arguments=APART),
    "Llama, label smoothing": Case(SMOOTHED, 3, 5, arguments=SMOOTH),
    "Llama, evaluated": Case(CAUSAL, 3, 5, evaluate=True),
    "Llama, bfloat16": Case(CAUSAL, 4, arguments=BFLOAT16),
    "Mixtral, label smoothing": Case(SMOOTHED_MIXTURE, 3, 5, arguments=SMOOTH),
}


PARTS = {
    "Mixtral": Case(MIXTURE, 4),
    "Mixtral, it learns": Case(MIXTURE, 3, 5, rate=0.1),
    "Mixtral, tokens not averaged": Case(MIXTURE, 3, 5, arguments=APART),
    "Mixtral, parameters not looked for": Case(MIXTURE, 4, arguments=UNSOUGHT),
    "Mixtral, LoRA": Case(MIXTURE, 4, wrap=lambda model: lora(model, ["q_proj"])),
    "Mixtral, bfloat16": Case(MIXTURE, 4, arguments=BFLOAT16),
}


ALONE = {
    "a short batch": Case(CLASSIFIER, 3, 5, short=True),  # elsewhere accelerate fills it up
    **{name: MEANS[name] for name in ("T5", "T5, it learns", "BERT masked", "Llama regression", "Llama multi-label")},
    **{name: MEANS[name] for name in ("T5, one micro-batch", "BERT classifier, accelerate's steps")},
    **{name: WINDOWS[name] for name in ("Llama", "Llama, it learns", "Llama, label smoothing")},
    **{name: PARTS[name] for name in ("Mixtral", "Mixtral, it learns")},
}


def main() -> None:
    accumulation_scale_ranks.main(ALONE if RANKS == 1 else {**MEANS, **WINDOWS, **PARTS}, PARTS)
