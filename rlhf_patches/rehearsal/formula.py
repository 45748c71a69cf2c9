"""The loss of a causal model by its formula, in float64, from the logits of a plain forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import pieces, window
from .labels import IGNORED
from .relation import Relation, Verdict

NAME = "the loss by its formula"
_CROSS_ENTROPIES = (None, "nll", "chunked_nll")
"""Of SFT's ``loss_type``."""


def unknown(trainer: Any, model: torch.nn.Module, inputs: Any) -> str:
    """Why a loss is not known to be a mean cross entropy of the next token; empty where it is."""
    if not isinstance(inputs, Mapping):
        return f"the micro-batch is {type(inputs).__name__}, no mapping"
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor) and ids.shape == labels.shape):
        return "the micro-batch has no labels of its input_ids"
    if why := pieces.unknown(trainer, model):
        return why
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = pieces.kind(model).__name__
    of_loss = getattr(pieces.base(model), "loss_type", None)  # None: the default, a causal model's
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or "ForCausalLM" not in str(of_loss or "ForCausalLM"):
        return f"whether {kind} predicts the next token is not known"
    if (loss := getattr(trainer.args, "loss_type", None)) not in _CROSS_ENTROPIES:
        return f"the loss is {loss}"
    return ""


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> float:
    """The mean over labels that are not -100, each predicted from the tokens before it.

    Args:
        logits: batch x tokens x vocabulary.
        labels: batch x tokens.
        smoothing: the part of the vocabulary's mean, as ``label_smoothing_factor`` has it.
    """
    wanted = labels[:, 1:].to(logits.device)
    there = wanted != IGNORED
    scores = logits[:, :-1][there].double().log_softmax(-1)
    own = -scores.gather(-1, wanted[there][:, None]).mean()
    return float((1 - smoothing) * own - smoothing * scores.mean())


def judge(loss: float, expected: float, noise: float) -> Relation:
    """Hold a micro-batch's loss against its formula."""
    apart = abs(loss - expected) / (abs(expected) or 1.0)
    if apart <= window.limit(noise):
        return Relation(NAME, Verdict.HOLDS, f"{apart:.0e}")
    text = f"the loss is {loss:.6g}; the cross entropy of its logits and labels is {expected:.6g}"
    return Relation(NAME, Verdict.DEVIATES, f"{apart:.2g}", text)
