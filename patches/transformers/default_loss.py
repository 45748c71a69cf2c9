"""The loss of models whose ``loss_type`` names none."""

from __future__ import annotations

from typing import Any

from transformers.loss.loss_utils import ForCausalLMLoss

from . import known_loss

# Every class of 5.10.1 to 5.23.0 whose forward gives its labels to `self.loss_function`, and whose name tells no loss.
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


def loss_of(model: Any, found: Any) -> Any:
    """What ``LOSS_MAPPING`` was ``found`` to have for a model's ``loss_type``, or else the one that the model takes."""
    if found is not None:
        return found
    inner = known_loss.unwrapped(model)
    if hasattr(inner, "_loss_function"):  # somebody has set it
        return found
    has_forward = next((each for each in type(inner).__mro__ if "forward" in vars(each)), type(inner))
    # known: classes of transformers' own modules, read in each release of the guard
    is_known = has_forward.__name__ in _CLASSES and has_forward.__module__.startswith("transformers.models.")
    return ForCausalLMLoss if is_known else found
