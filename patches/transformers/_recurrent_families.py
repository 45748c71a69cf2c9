"""Models of transformers with recurrent layers that ignore the borders of packed documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._adapters import base_model

FAMILIES = {
    "bailing_hybrid": "BailingHybrid",
    "granitemoehybrid": "GraniteMoeHybrid",
    "inkling": "Inkling",
    "inkling2": "Inkling2",
    "jamba": "Jamba",
    "kimi_linear": "KimiLinear",
    "lfm3": "Lfm3",
    "minimax": "MiniMax",
    "qwen4_exp": "Qwen4Exp",
    "recurrent_gemma": "RecurrentGemma",
    "zamba2": "Zamba2",
    "zaya": "Zaya",
    # These take no positions.
    "falcon_mamba": "FalconMamba",
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "rwkv": "Rwkv",
    "xlstm": "xLSTM",
}
_MODULES = {f"transformers.models.{name}.modeling_{name}" for name in FAMILIES}
_CLASSES = {f"transformers.models.{name}.modeling_{name}.{prefix}ForCausalLM" for name, prefix in FAMILIES.items()}
_BORDERS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")


def joins_documents(self: Any, inputs: Any) -> bool | None:
    """Trainer: whether its collator has joined several rows for such a model; None if that is not known."""
    model = base_model(self.model)
    cls = type(model)
    if f"{cls.__module__}.{cls.__qualname__}" not in _CLASSES:
        # A user's subclass, and another model of the family, may be affected.
        return None if any(each.__module__ in _MODULES for each in cls.__mro__) else False
    if not isinstance(inputs, Mapping) or any(inputs.get(name) is not None for name in _BORDERS):
        return None  # kernels may separate the documents
    if not _flattens(self.data_collator):
        return None
    ids = inputs.get("input_ids")
    one_row = ids is not None and ids.ndim == 2 and ids.shape[0] == 1
    return True if one_row and self.args.per_device_train_batch_size > 1 and model.training else None


def _flattens(collator: Any) -> bool:
    """A collator of transformers' or TRL's that makes one row of several."""
    cls = type(collator)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name == "transformers.data.data_collator.DataCollatorWithFlattening":
        return bool(getattr(collator, "return_position_ids", True))
    # known: both are TRL's own classes, by module and name
    own = ("trl.trainer.sft_trainer.DataCollatorForLanguageModeling",)
    return name in own and getattr(collator, "padding_free", None) is True
