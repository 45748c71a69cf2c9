"""The loss of models whose ``loss_type`` matches none, and whether a trainer's count omits its first label."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary
from transformers.loss import loss_utils

from . import _known_loss, _known_trainer

# Every class of 5.10.1 to 5.23.0 whose forward passes its labels to `self.loss_function`, and whose name has no loss.
_CLASSES = (
    "BertGenerationDecoder",
    "BertLMHeadModel",
    "CTRLLMHeadModel",
    "EvollaForProteinText2Text",
    "GPT2LMHeadModel",
    "IdeficsForVisionText2Text",
    "NemotronH_Omni_Reasoning_V3",
    "OpenAIGPTLMHeadModel",
    "ReformerModelWithLMHead",
)
_HOOKING = ("torch", "accelerate", "deepspeed", "peft", "transformers")
_METHODS = ("training_step", "get_batch_samples", "_get_num_items_in_batch", "prediction_step")

_told = WeakIdKeyDictionary()
"""Trainers for which `loss_of` returned another loss than the release."""


def loss_of(trainer: Any, model: Any, own_loss: Any, found: Any) -> Any:
    """The loss that ``LOSS_MAPPING`` has for a model's ``loss_type``, or else the loss that the model uses.

    Args:
        trainer: a Trainer under construction.
        model: its model, without PEFT's wrapper.
        own_loss: its ``compute_loss_func``.
        found: the entry of ``LOSS_MAPPING``; None if the name has no loss.
    """
    if found is not None or own_loss is not None or not _is_known(trainer, model):
        return found
    _told[trainer] = None
    return loss_utils.ForCausalLMLoss


def shifts(trainer: Any) -> bool:
    """``trainer._loss_shifts_labels``; if ``loss_of`` has set it, whether it is still true."""
    answer = trainer._loss_shifts_labels
    if not answer or trainer not in _told:
        return bool(answer)
    # Whether the smoother shifts depends on the name of the class.
    return trainer.compute_loss_func is trainer.label_smoother is None and _is_known(trainer, trainer.model)


def of_others(self: Any) -> bool | None:
    """Trainer: False if its model is of none of these classes; otherwise None, since its labels decide.

    None too for user code's forward, which may call one of these, unless the first label is omitted.
    """
    kind = _with_forward(_known_loss.unwrapped(self.model))
    if kind.__name__ in _CLASSES:  # known: `_is_known` looks at no other class
        return None
    # known: transformers' own other classes, which were read
    return False if kind.__module__.partition(".")[0] == "transformers" or self._loss_shifts_labels else None


def _with_forward(model: Any) -> type:
    """The class that defines a model's forward."""
    return next((each for each in type(model).__mro__ if "forward" in vars(each)), type(model))


def _is_known(trainer: Any, model: Any) -> bool:
    """Whether all code that computes the loss is known to omit the first label, with no user code in between."""
    inner = _known_loss.unwrapped(model)
    has_forward = _with_forward(inner)
    # known: classes of transformers' own modules, read in each release of the guard
    is_read = has_forward.__name__ in _CLASSES and has_forward.__module__.startswith("transformers.models.")
    return (
        is_read
        and not hasattr(inner, "_loss_function")
        and loss_utils.LOSS_MAPPING.get("ForCausalLM") is loss_utils.ForCausalLMLoss
        and _known_trainer.maker(trainer) in ("transformers", "SFTTrainer")
        and all(_known_loss.author(getattr(trainer, name)) in ("transformers", "trl") for name in _METHODS)
        and not _changes_labels(trainer.model, inner)
        and not _known_loss.unknown(trainer.model)
    )


def _changes_labels(model: Any, inner: Any) -> bool:
    """Whether something puts labels before the first: PEFT's virtual tokens, or possibly a hook."""
    peft = sys.modules.get("peft")
    for each in model.modules():
        is_pefts = peft is not None and isinstance(each, peft.PeftModel | peft.PeftMixedModel)
        if is_pefts and any(config.is_prompt_learning for config in each.peft_config.values()):
            return True
        if any(_known_loss.author(hook) not in _HOOKING for hook in each._forward_pre_hooks.values()):
            return True
        if each is inner:
            return False
    return True
