"""How transformers' own models make logits of the output head's products, where TRL's head does not."""

from __future__ import annotations

import functools
from typing import Any

import rlhf_patches

from .. import _released
from .._adapters import base_model

_NAME = "trl-logit-scaling"
_DIVIDES = (
    *("GraniteForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSWAForCausalLM"),
    *("GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM", "MiniCPM3ForCausalLM"),
    *("Granite4VisionForConditionalGeneration", "GraniteDoclingForConditionalGeneration"),
)
_MULTIPLIES = ("HyperCLOVAXForCausalLM", "HyperCLOVAXVisionV2ForConditionalGeneration")
_INKLING = ("InklingForCausalLM", "InklingForConditionalGeneration")
_WRAP_FORWARDS = ("transformers", "accelerate", "trl", "torch", "peft", "deepspeed", "liger_kernel")
"""Packages that assign a forward to a model; theirs calls the class's, or is TRL's own head."""
_CAPS = {"RecurrentGemmaForCausalLM": "logits_soft_cap", "xLSTMForCausalLM": "output_logit_soft_cap"}
"""The setting of a cap by the class whose forward reads it; TRL reads ``final_logit_softcapping`` alone."""


def scale(model: Any, config: Any) -> Any:
    """``config.logit_scale``, which TRL reads; for a model of transformers without it, the factor of its forward.

    Args:
        model: a causal language model, without PEFT's wrapper.
        config: its text config.

    Returns:
        None for a model without a factor, as TRL expects.
    """
    own = _scale(model, config)
    rlhf_patches.decided(_NAME, _is_wrong(model, config, own))
    return own


def scale_or_one(model: Any, config: Any) -> Any:
    """The same for releases before 1.11.0, which take 1 for a config that has no ``logit_scale``."""
    own = scale(model, config)
    return 1.0 if own is None and not hasattr(config, "logit_scale") else own


def scale_of_student(model: Any, config: Any) -> Any:
    """The same for the student of ``DistillationTrainer``, which may have PEFT's wrapper; its teacher decides."""
    return _scale(base_model(model), config)


def scale_of_teacher(model: Any, config: Any, student: Any, student_config: Any) -> Any:
    """The same for the teacher."""
    own = _scale(base_model(model), config)
    rlhf_patches.decided(
        _NAME,
        _is_wrong(base_model(model), config, own)
        or _is_wrong(base_model(student), student_config, scale_of_student(student, student_config)),
    )
    return own


def cap(model: Any, config: Any) -> Any:
    """``config.final_logit_softcapping``, which TRL reads; without it, the cap of the model's own forward, or None."""
    released = getattr(config, "final_logit_softcapping", None)
    name = _CAPS.get(_author(model))
    return released if released is not None or name is None else getattr(config, name)


def cap_within(model: Any, config: Any) -> Any:
    """The same for a model that may have PEFT's wrapper."""
    return cap(base_model(model), config)


def _scale(model: Any, config: Any) -> Any:
    released = getattr(config, "logit_scale", None)
    if released is None and getattr(config, "output_multiplier", None) is not None:
        return None  # TRL reads that next
    return released if released is not None else _factor(model, config)


def _is_wrong(model: Any, config: Any, own: Any) -> bool:
    """Whether TRL's own logits are others than those of the model's forward, which scales with ``own``."""
    if getattr(config, "final_logit_softcapping", None) is None and cap(model, config) is not None:
        return True
    is_read = getattr(config, "logit_scale", None) is not None
    return not is_read and own is not None and own != 1 and bool(_released_scale(config) != own)


def _author(model: Any) -> str:
    """The class whose forward a model has; empty for a forward that is not transformers' own."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    is_theirs = _released.is_released(vars(owner)["forward"], ("transformers",))
    own = vars(model).get("forward")  # accelerate and TRL assign one as well
    if isinstance(own, functools.partial):
        own = own.func
    is_theirs = is_theirs and (own is None or _released.is_released(own, _WRAP_FORWARDS))
    # known: transformers' class, by the module that defines the forward; a user's forward is another one
    return owner.__name__ if is_theirs and owner.__module__.startswith("transformers.models.") else ""


def _factor(model: Any, config: Any) -> float | None:
    """The factor of a model's own forward; None without one, and for a setting with which that forward raises."""
    author = _author(model)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    divisor = factor = None
    if author in _DIVIDES:
        divisor = config.logits_scaling
    elif author in _INKLING:
        divisor = config.logits_mup_width_multiplier
    elif author in _MULTIPLIES:
        factor = config.logits_scaling
    elif author == "FalconH1ForCausalLM":
        factor = getattr(model, "_orig_mod", model).model.lm_head_multiplier  # its forward does not read the config
    if divisor:
        return float(1 / divisor)
    return None if factor is None else float(factor)


def _released_scale(config: Any) -> Any:
    """What TRL itself reads of these settings: nothing before 1.15."""
    from packaging.version import Version
    from trl import __version__

    if Version(__version__) < Version("1.15.0"):
        return None
    multiplier = getattr(config, "lm_head_multiplier", None)
    scaling = getattr(config, "logits_scaling", None)
    if multiplier is not None or scaling is None:
        return multiplier
    return scaling if config.model_type == "hyperclovax" else 1 / scaling
