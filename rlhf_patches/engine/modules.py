"""The target modules of patches: whether they are imported, and their text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from ..guards import locating
from ..guards.places import Source, Unreadable
from . import import_hooks

if TYPE_CHECKING:
    from ..definitions.listed import ListedVariant
    from ..definitions.variant import Variant


def has_begun(variant: Variant | ListedVariant, ready: Mapping[str, ModuleType]) -> bool:
    """Whether enough of a variant's modules are imported to apply it, or a part of it."""
    return (any if variant.independent else all)(name in ready for name in variant.modules)


def is_ready(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and import_hooks.is_ready(module)


def source_of(ready: Mapping[str, ModuleType], name: str) -> Source:
    from ..guards import known

    spec = locating.spec_of(ready[name]) if name in ready else locating.locate(name)
    if spec is None:
        raise Unreadable(f"module {name} has no __spec__, so its source file is unknown")
    return known.look_up(locating.read(spec))


def origin_of(module: ModuleType) -> str | None:
    return getattr(locating.spec_of(module), "origin", None) or locating.namespace_of(module).get("__file__")


def is_main(spec: ModuleSpec) -> bool:
    """Whether a module's file is the main program, by ``python file.py`` or ``python -m module``."""
    main = locating.namespace_of(sys.modules.get("__main__")).get("__file__")
    return main is not None and spec.origin is not None and locating.real_path(main) == locating.real_path(spec.origin)
