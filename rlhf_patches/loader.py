"""A loader in front of the real one. In a module of its own because wrapt imports asyncio: `imports` loads this only
when the first watched module is found, which spares ``apply()`` a sixth of its time."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from .sources import namespace_of, spec_of


class AnnouncingLoader(wrapt.ObjectProxy):  # type: ignore[misc, type-arg, unused-ignore]
    """Calls ``done(module)`` after the real loader has run; every other attribute is the real loader's."""

    def __init__(self, loader: Any, done: Callable[[ModuleType], None]) -> None:
        super().__init__(loader)
        self._self_done = done

    def exec_module(self, module: ModuleType) -> None:
        loader = self.__wrapped__
        spec = spec_of(module)
        # The module shall see the real loader (inspect and pkgutil look at it).
        if spec is not None and spec.loader is self:  # type: ignore[comparison-overlap, unused-ignore]
            spec.loader = loader
        if namespace_of(module).get("__loader__") is self:
            module.__loader__ = loader
        loader.exec_module(module)
        self._self_done(module)
