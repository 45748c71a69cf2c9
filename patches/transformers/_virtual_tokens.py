"""Whether PEFT puts virtual tokens before a causal model's first token, which its loss then predicts."""

from __future__ import annotations

import sys
from typing import Any

from . import _known_loss, _known_trainer

# known: of these PEFT's forward puts virtual tokens and as many ignored labels before a row, in all of its releases.
_TYPES = ("PROMPT_TUNING", "P_TUNING")
_HOOKING = ("torch", "accelerate", "deepspeed", "peft", "transformers")
_METHODS = ("training_step", "get_batch_samples", "_get_num_items_in_batch", "prediction_step")


def predicted(trainer: Any, labels: Any) -> Any:
    """The labels that a loss of a causal model predicts: all of them behind virtual tokens, otherwise not the first."""
    return labels if _has_prompt(trainer.model) and _is_known(trainer) else labels[..., 1:]


def of_prompts(self: Any) -> bool | None:
    """Trainer: False without virtual tokens; otherwise None, since the labels decide."""
    return False if not self._loss_shifts_labels or _has_prompt(self.model) is False else None


def _has_prompt(model: Any) -> bool | None:
    """Whether virtual tokens predict the first label; None for a forward other than PEFT's own."""
    peft = sys.modules.get("peft")
    kind = getattr(peft, "PeftModelForCausalLM", None)
    if kind is None:
        return False
    for each in _wrappers(model):
        if isinstance(each, kind):
            config = each.peft_config.get(each.active_adapter)
            if getattr(getattr(config, "peft_type", None), "name", None) not in _TYPES:
                return False
            # A subclass of it may have its own forward.
            return True if type(each) is kind and _is_its_own(each, kind) else None
    return False


def _is_its_own(model: Any, kind: type) -> bool:
    """Whether a model runs the forward of its class: PEFT's ``disable_adapter`` assigns another one."""
    function, released = model.forward, vars(kind).get("forward")
    for _ in range(32):  # accelerate's autocast and hooks are around it
        if getattr(function, "__self__", model) is not model:
            return False
        function = getattr(function, "__func__", function)
        if function is released:
            return True
        # known: update_wrapper's note of what is within; other wrappers than accelerate's are found by _known_loss
        function = getattr(function, "__dict__", {}).get("__wrapped__")
    return False


def _wrappers(model: Any) -> list[Any]:
    """A model's wrappers, the outermost first, and the model within."""
    inner = _known_loss.unwrapped(model)
    modules = []
    for each in model.modules():
        modules.append(each)
        if each is inner:
            break
    return modules


def _is_known(trainer: Any) -> bool:
    """Whether all code between the count and the loss is known, with no user code in between."""
    return (
        trainer.compute_loss_func is trainer.label_smoother is None
        and _known_trainer.maker(trainer) in ("transformers", "SFTTrainer")
        and all(_known_loss.author(getattr(trainer, name)) in ("transformers", "trl") for name in _METHODS)
        and all(
            _known_loss.author(hook) in _HOOKING
            for each in _wrappers(trainer.model)
            for hook in each._forward_pre_hooks.values()
        )
        and not _known_loss.unknown(trainer.model)
    )
