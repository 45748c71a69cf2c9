"""Being told when a module has been imported, whatever the order.

wrapt's post-import hooks tell of a first import. Four cases need more, and each has its place below: a module
that is half imported when we start to watch it, a lazy one that has not run yet, a reload, and an import that
is tried again after it failed (wrapt forgets its hooks then).

Callbacks must not raise, unless the import is meant to fail.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

Callback = Callable[[str, ModuleType], None]

_watched: dict[str, Callback] = {}
_armed: set[str] = set()
_registering = threading.local()


def watch(name: str, callback: Callback) -> None:
    """Call ``callback(name, module)`` after every import or reload of a module from now on.

    A module that is imported to its end already is the caller's to look at; one that is half imported, or lazy,
    is announced when it is done.
    """
    _watched[name] = callback
    _finder.install()
    module = sys.modules.get(name)
    if module is None:
        _arm(name)
    elif not is_ready(module):
        _when_ready(name, module)


def unwatch(name: str) -> None:
    """Stop telling of a module."""
    _watched.pop(name, None)


def is_ready(module: ModuleType) -> bool:
    """Whether a module in ``sys.modules`` has been executed to its end."""
    return not _is_lazy(module) and not _is_initialising(module)


def _announce(name: str, module: ModuleType) -> None:
    callback = _watched.get(name)
    if callback is not None:
        callback(name, module)


def _when_ready(name: str, module: ModuleType) -> None:
    if _is_lazy(module):
        _announce_after_loading(name, object.__getattribute__(module, "__spec__"))
    elif _is_initialising(module):
        _announce_after_initialising(name, module.__spec__)  # type: ignore[arg-type]
    else:
        _announce(name, module)


# ------------------------------------------------------------------------------------------ first import


def _arm(name: str) -> None:
    if name in _armed:
        return
    _armed.add(name)
    _registering.active = True
    try:
        wrapt.register_post_import_hook(functools.partial(_imported, name), name)
    finally:
        _registering.active = False


def _imported(name: str, module: ModuleType) -> None:
    _armed.discard(name)
    if getattr(_registering, "active", False):
        # wrapt calls back within the registration when another thread has begun the import just now.
        _when_ready(name, module)
    else:
        _announce(name, module)


# ------------------------------------------------------------------------- reload, and import tried again


class _Finder:
    """Stands before wrapt's finder, finds nothing itself on a first import, and re-arms what wrapt has forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def install(self) -> None:
        with self._lock:
            if self in sys.meta_path:
                return
            # wrapt puts its finder in front at its first registration; ours has to stand before it.
            wrapt.register_post_import_hook(lambda module: None, "__rlhf_patches_never_imported__")
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _watched:
            return None
        if target is None:
            if fullname not in sys.modules:
                _arm(fullname)
            return None
        for finder in sys.meta_path:
            # wrapt's finder would answer with the spec of the module as it was before.
            if finder is self or type(finder).__module__.startswith("wrapt."):
                continue
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None:
                _announce_after_loading(fullname, spec)
                return spec
        return None


_finder = _Finder()


class _AnnouncingLoader(wrapt.ObjectProxy):  # type: ignore[misc, type-arg, unused-ignore]
    """A loader that announces its module; every other attribute is the real loader's."""

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(loader)
        self._self_name = name

    def exec_module(self, module: ModuleType) -> None:
        loader = self.__wrapped__
        spec = object.__getattribute__(module, "__spec__")
        # The module shall see the real loader (inspect and pkgutil look at it).
        if spec is not None and spec.loader is self:
            spec.loader = loader
        if object.__getattribute__(module, "__dict__").get("__loader__") is self:
            module.__loader__ = loader
        loader.exec_module(module)
        _announce(self._self_name, module)


def _announce_after_loading(name: str, spec: ModuleSpec) -> None:
    if spec.loader is not None and not isinstance(spec.loader, _AnnouncingLoader):
        spec.loader = _AnnouncingLoader(spec.loader, name)  # type: ignore[assignment, unused-ignore]


# ------------------------------------------------------------------------------------------ lazy modules


def _is_lazy(module: ModuleType) -> bool:
    return type(module) is importlib.util._LazyModule  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------- half-imported modules


def _is_initialising(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _announce_after_initialising(name: str, spec: ModuleSpec) -> None:
    """Announce when the import system marks the import that is under way as over.

    There is no event for that: it sets ``spec._initializing`` to False at the very end, whether the import
    succeeded or not. The spec gets a class that notices, and its own class back right after.
    """
    own_class = type(spec)
    if getattr(own_class, "_rlhf_patches_watches", False):
        return

    class Watching(own_class):  # type: ignore[misc, valid-type]
        _rlhf_patches_watches = True

        def __setattr__(self, attribute: str, value: object) -> None:
            super().__setattr__(attribute, value)
            if attribute == "_initializing" and not value:
                self.__class__ = own_class  # type: ignore[assignment]
                module = sys.modules.get(name)
                if module is None:  # the import failed; it may be tried again
                    _arm(name)
                else:
                    _announce(name, module)

    Watching.__name__, Watching.__qualname__ = own_class.__name__, own_class.__qualname__
    spec.__class__ = Watching
    if not getattr(spec, "_initializing", False):  # it ended meanwhile, in another thread
        spec.__class__ = own_class
        module = sys.modules.get(name)
        if module is not None:
            _announce(name, module)
