"""What TRL's trainers have in common: their models, where a release has them, and a run of one."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hunt import hf_trainer, tiny_text
from hunt.hf_trainer import PAD, VOCABULARY
from hunt.outcomes import Outcome
from hunt.trainers import CannotRun

COMMON = hf_trainer.ARGUMENTS | {"rows", "order", "dtype", "lora", "dropout", "attention", "evaluated"}
"""Settings that every trainer here takes."""
STEPS = frozenset({"micro_batch", "accumulation", "ranks"})
"""Those of one more loss of a trainer that has been looked at with all of them."""

SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "pad_token_id": PAD, "eos_token_id": tiny_text.END, "bos_token_id": None}
SMALL |= {"initializer_range": 0.3}  # so that what a token is told by another one is no rounding
FEW = {**SMALL, "num_key_value_heads": 2}
LINEAR: dict[str, Any] = {
    **FEW,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
LINEAR |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
MAMBA: dict[str, Any] = {**FEW, "head_dim": 8, "num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_head": 8}
MAMBA |= {"mamba_d_state": 8, "mamba_expand": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": FEW,
    "Mixtral": {**FEW, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "GptOss": {
        **FEW,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention"],
    },
    "RecurrentGemma": {**FEW, "block_types": ["attention"], "attention_window_size": 64, "logits_soft_cap": 3.0},
    "ModernBertDecoder": {**SMALL, "bos_token_id": 2, "layer_types": ["full_attention"]},
    "Mamba": {**SMALL, "state_size": 4, "use_cache": False},
    "Qwen3_5": LINEAR,
    "Qwen3Next": {**LINEAR, **EXPERTS},
    "OlmoHybrid": LINEAR,
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 32},
    "NemotronH": {
        **{**FEW, "head_dim": 8, "num_hidden_layers": 2, "mamba_num_heads": 4, "mamba_head_dim": 8},
        **{"ssm_state_size": 8, "n_groups": 1, "layers_block_type": ["linear_attention", "full_attention"]},
    },
    "Lfm2": {**LINEAR, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Jamba": {
        **FEW,
        "num_hidden_layers": 2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "num_experts": 2,
        "output_router_logits": False,
    }
    | {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "Granite": {**FEW, "logits_scaling": 4.0},
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": PAD}
    | {"eos_token_id": tiny_text.END, "bos_token_id": None, "initializer_range": 0.3, "n_positions": 64},
}


def model(
    family: str = "Llama",
    *,
    head: str = "ForCausalLM",
    seed: int = 1,
    dropout: float = 0.0,
    attention: str = "eager",
    dtype: str = "float32",
    lora: bool = False,
    **more: Any,
) -> Any:
    """One layer, with the same weights for the same seed."""
    import torch
    import transformers

    head = "LMHeadModel" if family == "GPT2" else head
    if not hasattr(transformers, family + head):
        raise CannotRun(f"transformers has no {family + head}")
    torch.manual_seed(seed)
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if family == "GPT2" else ("attention_dropout",)
    options = {**OPTIONS[family], **dict.fromkeys(dropouts, dropout), "attn_implementation": attention, **more}
    if dtype == "float64" and family in ("GptOss", "Mixtral", "Qwen3Next", "Jamba"):
        options["experts_implementation"] = "eager"  # the grouped product has no float64
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    made = getattr(transformers, family + head)(config(**options))
    return hf_trainer.prepared(made, dtype=dtype, lora=lora)


def classes(kind: str) -> tuple[Any, Any]:
    """Configuration and trainer of that name, from where the release has them."""
    import trl

    for module in ("trl", f"trl.experimental.{kind.lower()}", "trl.experimental.online_dpo"):
        try:
            found = trl if module == "trl" else importlib.import_module(module)
            return getattr(found, f"{kind}Config"), getattr(found, f"{kind}Trainer")
        except (ImportError, AttributeError):
            continue
    raise CannotRun(f"trl {trl.__version__} has no {kind}Trainer")


def run(
    kind: str,
    rows: Sequence[Mapping[str, Any]],
    build_model: Callable[..., Any],
    settings: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    others: Callable[[], Mapping[str, Any]] = dict,
    around: Callable[[Any], Any] = lambda trainer: trainer,
) -> Outcome:
    """The outcome of a run.

    Args:
        kind: ``SFT``, say.
        rows: of the data set, in the order of the settings.
        build_model: takes those of the settings that are a model's.
        settings: those of COMMON that are given.
        options: of the trainer's configuration.
        others: makes the trainer's other arguments.
        around: makes of the trainer's class the one to use.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()  # no fingerprints of tokenizers, which take longer than a step
    config, trainer = classes(kind)
    chosen = functools.partial(hf_trainer.chosen, settings)
    rows = [*rows] if settings.get("order", "given") == "given" else [*rows][::-1]
    evaluated = settings.get("evaluated", 0)
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := (options or {}).keys() - known:
        raise CannotRun(f"this {config.__name__} has no {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        given = {**hf_trainer.arguments(folder, **chosen(hf_trainer.GIVEN)), **(options or {})}

        def build() -> Any:
            return around(trainer)(
                model=build_model(**chosen(hf_trainer.MODEL)),
                args=config(**given),
                train_dataset=datasets.Dataset.from_list(rows),
                eval_dataset=datasets.Dataset.from_list(rows[:evaluated]) if evaluated else None,
                processing_class=tiny_text.tokenizer(),
                **others(),
            )

        return hf_trainer.outcome(build, evaluated=evaluated, **chosen({"resume_at", "steps"}))


def split(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """A prompt of two tokens or three, and an answer of one to six."""
    plain = [tiny_text.plain(token) for token in tokens]
    at = 3 if len(plain) > 4 and len(plain) % 2 else 2
    return plain[:at], plain[at:]
