"""The reference loss of a causal model: the cross entropy in float64, from the logits of a plain forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import pieces, window
from .labels import IGNORED
from .relation import Relation, Verdict

NAME = "reference loss"
_CROSS_ENTROPIES = (None, "nll", "chunked_nll")
"""Values of SFT's ``loss_type``."""


def unknown(trainer: Any, model: torch.nn.Module, inputs: Any) -> str:
    """Return why the loss may not be the next token's mean cross entropy; empty if it is."""
    if not isinstance(inputs, Mapping):
        return f"the micro-batch is a {type(inputs).__name__}, not a mapping"
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor) and ids.shape == labels.shape):
        return "the micro-batch has no labels of the shape of input_ids"
    if why := pieces.unknown(trainer, model):
        return why
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = pieces.kind(model).__name__
    of_loss = getattr(pieces.base(model), "loss_type", None)  # None: the default, a causal model's
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or "ForCausalLM" not in str(of_loss or "ForCausalLM"):
        return f"{kind} is not known to predict the next token"
    if (loss := getattr(trainer.args, "loss_type", None)) not in _CROSS_ENTROPIES:
        return f"loss_type is {loss}"
    return ""


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> float:
    """Return the mean over labels other than -100, each predicted from the tokens before it.

    Args:
        logits: batch x tokens x vocabulary.
        labels: batch x tokens.
        smoothing: the weight of the mean over the vocabulary (``label_smoothing_factor``).
    """
    wanted = labels[:, 1:].to(logits.device)
    there = wanted != IGNORED
    scores = logits[:, :-1][there].double().log_softmax(-1)
    own = -scores.gather(-1, wanted[there][:, None]).mean()
    return float((1 - smoothing) * own - smoothing * scores.mean())


def judge(loss: float, expected: float, noise: float) -> Relation:
    """Compare a micro-batch's loss with the reference loss."""
    apart = abs(loss - expected) / (abs(expected) or 1.0)
    if apart <= window.limit(noise):
        return Relation(NAME, Verdict.HOLDS, f"{apart:.0e}")
    text = f"the loss is {loss:.6g}; the cross entropy of the logits and labels is {expected:.6g}"
    return Relation(NAME, Verdict.DEVIATES, f"{apart:.2g}", text)
