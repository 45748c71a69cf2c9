"""Import hooks: callbacks after the import of a module, in any order.

A finder before all others observes the specs of watched modules (`import_system`), so first imports, repeated imports
after a failure, and half-imported modules are one case. Reloads and lazy modules are handled below.

wrapt's post-import hooks are not used: they do not fire on a reload, are lost when any hook raises, and load a lazy
module at once.

Callbacks must not raise, unless the import should fail.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .. import import_system
from ..guards.locating import namespace_of, spec_of

Callback = Callable[[str, ModuleType], None]

_watched: dict[str, tuple[Callback, ...]] = {}


def watch(name: str, callback: Callback) -> None:
    """Call ``callback(name, module)`` after every import or reload of a module from now on.

    The caller handles a module that is already imported; a half-imported or lazy module is announced when it is done.
    """
    _watched[name] = (*(known for known in _watched.get(name, ()) if known != callback), callback)
    finder.install()
    _notice_reloads()
    module = sys.modules.get(name)
    spec = spec_of(module)
    if module is None or spec is None:
        return
    if _is_lazy(module):
        finder.turns_lazy(spec)
    elif import_system.is_initializing(module):
        import_system.observe(spec, finder)
        if not import_system.is_initializing(module):  # it ended meanwhile, in another thread
            import_system.stop_observing(spec)
            finder.ends(spec)


def unwatch(name: str, callback: Callback) -> None:
    """Stop calling this callback for a module."""
    _watched[name] = tuple(known for known in _watched.get(name, ()) if known != callback)
    if not _watched[name]:
        del _watched[name]


def is_ready(module: ModuleType) -> bool:
    """Whether a module in ``sys.modules`` has been fully executed."""
    return not _is_lazy(module) and not import_system.is_initializing(module)


def _is_lazy(module: ModuleType | None) -> bool:
    return type(module) is importlib.util._LazyModule  # type: ignore[attr-defined]


def _announce(name: str) -> None:
    # The module's lock is held here; a child that is forked now must import the module again.
    with import_system.loading():
        for callback in _watched.get(name, ()):
            # A module may have replaced itself. None: its import failed.
            module = sys.modules.get(name)
            if module is not None:
                callback(name, module)


# ------------------------------------------------------------------------------- first imports


class _Finder(import_system.Observer):
    """The first finder; it lets the other finders find a watched module. It takes no lock: see `import_system`."""

    def install(self) -> None:
        """Move to the front, also if another finder is there now."""
        # Not index(): it compares with ==, which other finders may define.
        place = next((index for index, other in enumerate(sys.meta_path) if other is self), None)
        if place is None:
            sys.meta_path.insert(0, self)
        elif place:
            # The list keeps its length: another thread may iterate over it, and would skip a finder after a removal.
            sys.meta_path[: place + 1] = [self, *sys.meta_path[:place]]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if target is not None:  # reloads are handled below
            return None
        if fullname not in _watched:
            return None
        spec = import_system.ask_the_others(self, fullname, path, target)
        if spec is not None:
            self.adopt(spec)
        return spec

    def adopt(self, spec: ModuleSpec) -> None:
        """Announce the module of another finder's spec, if it is watched."""
        if spec.name in _watched:
            import_system.observe(spec, self)

    def ends(self, spec: ModuleSpec) -> None:
        if not _is_lazy(sys.modules.get(spec.name)):
            _announce(spec.name)

    def turns_lazy(self, spec: ModuleSpec) -> None:
        _announce_after_running(spec)


finder = _Finder()


# ------------------------------------------------------------------------------- reloads


class _Reloading(dict[str, ModuleType]):
    """Replaces importlib's record of running reloads; an entry is deleted when its reload ends."""

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        _announce(name)


def _notice_reloads() -> None:
    # Without such a record in a later Python, a patched function that a reload has replaced is reported as failed.
    reloading: Any = getattr(importlib, "_RELOADING", None)
    if type(reloading) is dict:
        importlib._RELOADING = _Reloading(reloading)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------- lazy modules


def _announce_after_running(spec: ModuleSpec) -> None:
    """Announce a lazy module when it has run, by a temporary wrapper of its loader's function."""
    loader: Any = spec.loader
    run = getattr(loader, "exec_module", None)
    waiting: set[str] | None = getattr(run, "_rlhf_patches_waiting", None)
    if waiting is not None:
        waiting.add(spec.name)
        return
    waiting = {spec.name}

    def exec_module(module: ModuleType) -> None:
        name = namespace_of(module).get("__name__")
        if waiting == {name}:  # one loader may have several lazy modules
            del loader.exec_module
        run(module)  # type: ignore[misc]
        if name in waiting:
            waiting.discard(name)
            _announce(name)

    # Warnings and tracebacks skip this frame like the import system's own.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap_external>")
    exec_module._rlhf_patches_waiting = waiting  # type: ignore[attr-defined]
    if not isinstance(loader, type):
        try:
            loader.exec_module = exec_module
        except AttributeError:  # the next report states that the import was missed
            pass
