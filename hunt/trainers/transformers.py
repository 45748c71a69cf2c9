"""transformers' Trainer with models of most heads, one layer each."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

from hunt import hf_trainer
from hunt.hf_trainer import IGNORED, PAD, VOCABULARY
from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "pad_token_id": PAD}
FEW = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": PAD}
STATE = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "pad_token_id": PAD}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
T5 |= {"decoder_start_token_id": PAD}
BART = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
CLASSES = 3
# Two layers share the keys and values of two others.
SHARED: dict[str, Any] = {**FEW, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 8, "sliding_window": 4}
SHARED |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "initializer_range": 0.3}
SHARED |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
SPARSE: dict[str, Any] = {"intermediate_size": [16] * 4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4}


def bert(dropout: float) -> dict[str, Any]:
    return {**SMALL, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "num_labels": CLASSES}


def gpt2(dropout: float) -> dict[str, Any]:
    return {**GPT2, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)}


# By name: configuration, head, and how dropout is set; what a row's labels are follows from the head.
MODELS: dict[str, Any] = {
    "llama": ("Llama", "ForCausalLM", lambda dropout: {**FEW, "attention_dropout": dropout}),
    "gpt2": ("GPT2", "LMHeadModel", gpt2),
    "mixtral": ("Mixtral", "ForCausalLM", lambda dropout: {**FEW, **EXPERTS, "attention_dropout": dropout}),
    "mamba": ("Mamba", "ForCausalLM", lambda _: STATE),
    "gemma3n": ("Gemma3n", "ForCausalLM", lambda dropout: {**SHARED, **SPARSE, "attention_dropout": dropout}),
    "gemma4": ("Gemma4", "ForCausalLM", lambda dropout: {**SHARED, "global_head_dim": 8, "attention_dropout": dropout}),
    "t5": ("T5", "ForConditionalGeneration", lambda dropout: {**T5, "dropout_rate": dropout}),
    "bart": ("Bart", "ForConditionalGeneration", lambda dropout: {**BART, "dropout": dropout}),
    "bert-masked": ("Bert", "ForMaskedLM", bert),
    "bert-classes": ("Bert", "ForSequenceClassification", bert),
    "bert-tokens": ("Bert", "ForTokenClassification", bert),
    "llama-classes": ("Llama", "ForSequenceClassification", lambda _: {**FEW, "num_labels": CLASSES}),
    "llama-regression": (
        "Llama",
        "ForSequenceClassification",
        lambda _: {**FEW, "num_labels": 1, "problem_type": "regression"},
    ),
    "llama-tokens": (
        "Llama",
        "ForTokenClassification",
        lambda _: {**FEW, "classifier_dropout": 0.0, "num_labels": CLASSES},
    ),
    "smoothed": ("Llama", "ForCausalLM", lambda dropout: {**FEW, "attention_dropout": dropout}),
}


def made(name: str, dropout: float, attention: str) -> Any:
    """A model with the same weights every time."""
    import torch
    import transformers

    family, head, options = MODELS[name]
    if not hasattr(transformers, family + head):
        raise CannotRun(f"transformers has no {family + head}")
    torch.manual_seed(1)
    more = {} if family == "Mamba" else {"attn_implementation": attention}
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config(**options(dropout), **more)
    return getattr(transformers, family + head)(config)


def labeled(name: str, row: Any) -> dict[str, Any]:
    """A row with labels: the same number in each for what is a mean over a micro-batch by its definition."""
    tokens, head = row["input_ids"], MODELS[name][1]
    if head == "ForSequenceClassification":
        labels: Any = 0.1 * tokens[0] if name == "llama-regression" else tokens[0] % CLASSES
    elif head in ("ForCausalLM", "LMHeadModel"):
        labels = [IGNORED, *tokens[1:]] if row["counts"] else [IGNORED] * len(tokens)
    elif head == "ForConditionalGeneration":
        labels = tokens[:3]
    else:
        chosen = [token % CLASSES for token in tokens] if "tokens" in name else tokens
        labels = [*chosen[:3], *[IGNORED] * (len(tokens) - 3)]
    return {"input_ids": tokens, "labels": labels}


def collate(batch: list[Any], *, padding: int, side: str, encoder: bool) -> dict[str, Any]:
    """Padded to the longest and ``padding`` more."""
    import torch

    width = padding + max(len(row["input_ids"]) for row in batch)

    def filled(values: Any, with_: int) -> Any:
        rest = [with_] * (width - len(values))
        return [*rest, *values] if side == "left" else [*values, *rest]

    tokens = torch.tensor([filled(row["input_ids"], PAD) for row in batch])
    mask = torch.tensor([filled([1] * len(row["input_ids"]), 0) for row in batch])
    first = batch[0]["labels"]
    if isinstance(first, list):
        each = [row["labels"] if encoder else filled(row["labels"], IGNORED) for row in batch]
    else:
        each = [row["labels"] for row in batch]
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor(each)}


# How samples are drawn, where not by a sampler with a seed, in the names of either release.
DRAWN: dict[str, Any] = {
    "by-length": {"train_sampling_strategy": "group_by_length", "group_by_length": True},
    "without-a-seed": {"accelerator_config": {"use_seedable_sampler": False}},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
}


def streamed(rows: list[Any]) -> Any:
    """A data set without a length."""
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows)

    return Stream()


COMMON = hf_trainer.ARGUMENTS | hf_trainer.ROWS | (hf_trainer.MODEL - {"attention"})


LABELED = [f"transformers/{name}" for name, (_, head, _) in MODELS.items() if head in ("ForCausalLM", "LMHeadModel")]


@trainer(*(each for name in MODELS if (each := f"transformers/{name}") not in LABELED), takes=COMMON - {"others"})
@trainer(*LABELED[1:], takes=COMMON)
@trainer(LABELED[0], takes=COMMON | {"drawn_by", "frequencies", "bf16"})
def heads(
    *, name: str, padding: int = 0, side: str = "right", evaluated: int = 0, attention: str = "eager", **settings: Any
) -> Outcome:
    import transformers

    drawn, fields = settings.get("drawn_by", ""), transformers.TrainingArguments.__dataclass_fields__
    chosen = functools.partial(hf_trainer.chosen, settings)
    with tempfile.TemporaryDirectory() as folder:
        data = [labeled(name, row) for row in hf_trainer.rows(**chosen(hf_trainer.ROWS))]
        encoder = MODELS[name][1] == "ForConditionalGeneration"

        def build() -> Any:
            model = made(name, settings.get("dropout", 0.0), attention)
            return transformers.Trainer(
                model=hf_trainer.prepared(model, **chosen({"dtype", "lora"})),
                args=transformers.TrainingArguments(
                    **hf_trainer.arguments(folder, **chosen(hf_trainer.GIVEN)),
                    label_smoothing_factor=0.1 if name == "smoothed" else 0.0,
                    **hf_trainer.chosen(DRAWN.get(drawn, {}), fields),
                ),
                train_dataset=streamed(data) if drawn == "streamed" else data,
                eval_dataset=data[:evaluated] or None,
                data_collator=functools.partial(collate, padding=padding, side=side, encoder=encoder),
            )

        return hf_trainer.outcome(build, evaluated=evaluated, **chosen({"resume_at", "steps", "frequencies"}))
