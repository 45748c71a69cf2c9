"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import ast
import re
from typing import Any

from . import layers_to_transform

_LAST, _NOT_AN_EXPERT = (
    re.compile(ast.literal_eval(each)) for each in (layers_to_transform._LAST, layers_to_transform._NOT_AN_EXPERT)
)
_EXPERT_OF_FIRST = re.compile(r"[^.]*\.(\d+)\.(?:.*\.)?\w*experts\.(\d+)\.")
"""A name that begins with the layers: neither expression sees their number, and the patch does not repair it."""


def taken_for_another_layer(config: Any, key: str) -> bool | None:
    """Whether a module that the configuration targets is adapted, or not, because of its expert's number.

    None if the configuration excludes the module, which PEFT looks at first, and for a wrong module that the patch does
    not repair.
    """
    try:
        layers = config.layers_to_transform
        if layers is None or config.layers_pattern or isinstance(config.target_modules, str):
            return False
        if key in config.target_modules or not key.endswith(tuple(f".{name}" for name in config.target_modules)):
            return False
        numbers = {int(found[1]) for found in (_LAST.match(key), _NOT_AN_EXPERT.match(key)) if found}
        if len(_selected(layers, numbers)) == 2:
            return None if _is_excluded(config, key) else True
        first = _EXPERT_OF_FIRST.match(key)
        # Of these two numbers the expert's counts.
        unrepaired = first and numbers == {int(first[2])} and len(_selected(layers, {*map(int, first.groups())})) == 2
        return None if unrepaired else False
    except (AttributeError, TypeError, re.error):  # such as that of a tuner without these settings
        return None


def stored_transposed(module: Any) -> bool | None:
    """Whether the layer is a Conv1D: None if it does not say."""
    transposed = getattr(module, "fan_in_fan_out", None)
    return None if transposed is None else bool(transposed)


def _selected(layers: Any, numbers: set[int]) -> set[bool]:
    return {number == layers if isinstance(layers, int) else number in layers for number in numbers}


def _is_excluded(config: Any, key: str) -> bool:
    excluded = getattr(config, "exclude_modules", None) or ()
    if isinstance(excluded, str):
        return bool(re.fullmatch(excluded, key))
    saved = getattr(config, "modules_to_save", None) or ()
    return any(key == name or key.endswith(f".{name}") for name in excluded) or any(
        re.match(rf"(^|.*\.){name}($|\..*)", key) for name in saved
    )
