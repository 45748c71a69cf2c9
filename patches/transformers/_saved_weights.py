"""Weights of a checkpoint whose names or shapes differ from the model's, since saving has converted them.

Transformers converts a model's weights when it saves them (a mixture's experts, one tensor in the model, become
separate tensors), and again when `from_pretrained` reads them. This module converts them back for an existing model,
by transformers' own operations. It loads the result only if saving it would give this very checkpoint, bit for bit.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers

import rlhf_patches

logger = logging.getLogger("rlhf_patches")
Weights = dict[str, Any]


def converted(model: Any, saved: Weights, result: Any) -> Any:
    """Load the weights that ``model.load_state_dict(saved, False)`` could not, and return its result without them.

    Args:
        model: the model to load.
        saved: the checkpoint's weights.
        result: the result of that call.
    """
    return _repaired(model, lambda: saved, result)


def converted_shards(model: Any, folder: Any, result: Any) -> Any:
    """The same after ``load_sharded_checkpoint(model, folder, ...)``."""
    return _repaired(model, lambda: _of_shards(folder), result)


def _repaired(model: Any, read: Callable[[], Weights], result: Any) -> Any:
    # A tied weight is missing in every checkpoint; a converted weight is present under another name.
    if not (getattr(result, "missing_keys", None) and getattr(result, "unexpected_keys", None)):
        rlhf_patches.decided("transformers-resume-weights", False)
        return result
    if not isinstance(model, transformers.PreTrainedModel):
        return result
    try:
        convert = _converted if importlib.util.find_spec("transformers.core_model_loading") else _renamed
        found = convert(model, read())
        if found is None:  # saving converts no weight of this model
            return result
        own = model.state_dict()
        if wrong := _misfit(model, own, found, result):
            return _left(result, wrong)
    except Exception as error:  # these operations do not support the model or the file
        return _left(result, f"{type(error).__name__}: {error}")
    model.load_state_dict(found, strict=False)  # writes: loading the checkpoint's weights is the repair
    rlhf_patches.decided("transformers-resume-weights", True)
    missing = [key for key in result.missing_keys if key not in found]
    return torch.nn.modules.module._IncompatibleKeys(missing, [])


def _left(result: Any, why: str) -> Any:
    logger.warning(
        "transformers-resume-weights: the checkpoint does not contain these weights of the model under their names, "
        "and they are not loaded: %s (%s)",
        ", ".join(result.missing_keys),
        why,
    )
    return result


def _misfit(model: Any, own: Weights, found: Weights, result: Any) -> str:
    """Why the converted weights cannot be loaded; empty if they can."""
    if any(type(tensor) is not torch.Tensor for tensor in (*own.values(), *found.values())):
        return "they are not plain tensors"
    if strange := [key for key in found if key not in own or found[key].shape != own[key].shape]:
        return f"the checkpoint's {strange[0]} has no place in the model"
    places = {_place(own[key]) for key in found}
    ignored = model._keys_to_ignore_on_save or ()
    for key in result.missing_keys:
        if key not in found and key not in ignored and _place(own[key]) not in places:
            return f"{key} is not in the checkpoint"
    return ""


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    """The same value for tied weights."""
    return tensor.data_ptr(), tensor.shape


def _of_shards(folder: Any) -> Weights:
    from safetensors.torch import load_file

    if os.path.exists(os.path.join(folder, "pytorch_model.bin.index.json")):
        raise ValueError("its shards are pickled")  # or may be: it is unknown which of the two were loaded
    with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as file:
        names = set(json.load(file)["weight_map"].values())
    return {key: tensor for name in sorted(names) for key, tensor in load_file(os.path.join(folder, name)).items()}


def _converted(model: Any, saved: Weights) -> Weights | None:
    """The model's weights, converted from the saved ones; None if saving does not convert."""
    from transformers import conversion_mapping, core_model_loading

    steps = getattr(model, "_weight_conversions", None)
    if steps is None:
        steps = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        # As saving does: it is unknown whether the names of a model that was never loaded had a prefix.
        prefix = getattr(core_model_loading, "PrefixChange", ())
        steps = [step for step in steps if not isinstance(step, prefix)]
    if not steps:
        return None
    steps = copy.deepcopy(steps)  # they record their matches
    converters = [step for step in steps if isinstance(step, core_model_loading.WeightConverter)]
    renamings = [step for step in steps if isinstance(step, core_model_loading.WeightRenaming)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    parts: dict[str, Any] = {}
    for key in sorted(saved, key=core_model_loading.dot_natural_key):  # experts in the order of their numbers
        name, pattern = core_model_loading.rename_source_key(key, renamings, converters)
        if pattern is None:
            part, pattern = core_model_loading.WeightRenaming(key, name), key
        else:
            part = copy.deepcopy(by_pattern[pattern])
        parts.setdefault(name, part).add_tensor(name, key, pattern, saved[key])
    found: Weights = {}
    for name, part in parts.items():
        whole = part.convert(name, model=model, config=model.config)
        if isinstance(whole, tuple):  # 5.0.0 also returns errors
            whole, _ = whole
        found |= {key: each[0] if isinstance(each, list) else each for key, each in whole.items()}
    _check(core_model_loading.revert_weight_conversion(model, found), saved)
    return found


def _check(again: Weights, saved: Weights) -> None:
    """Raise unless saving reproduces the checkpoint."""
    if set(again) != set(saved):
        raise ValueError(f"saved, {sorted(set(again) ^ set(saved))[0]} would be another weight")
    for key, tensor in saved.items():
        if again[key].shape != tensor.shape or again[key].dtype != tensor.dtype or not _same(again[key], tensor):
            raise ValueError(f"saved, {key} would have other values")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: a NaN equals itself."""
    return bool(torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other))))


def _renamed(model: Any, saved: Weights) -> Weights | None:
    """The same in transformers 4, which converts only names: each weight under its saved name."""
    rules = [(new, re.sub(r"\(.*\)", "", old.lstrip("^"))) for old, new in model._checkpoint_conversion_mapping.items()]
    if not rules:
        return None
    keys = {
        key: next((to for new, old in rules if (to := re.sub(new, old, key)) != key), key) for key in model.state_dict()
    }
    found = {key: saved[name] for key, name in keys.items() if name in saved}
    if len(found) != len(saved) or {keys[key] for key in found} != set(saved):
        raise ValueError("the names that saving gives are not those of the checkpoint")
    return found
