"""Being told when a module has been imported, whatever the order.

A finder in front of all others puts a loader around the real one of every watched module; so first imports, imports
tried again after a failure, and reloads are one case. Two more have their place below: a module that is half
imported when we start to watch it, and a lazy one that has not run yet.

wrapt's post-import hooks are not used: they do not fire on a reload, are lost when anybody's hook raises, and make
a lazy module load at once.

Callbacks must not raise, unless the import is meant to fail.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from .sources import spec_of

Callback = Callable[[str, ModuleType], None]

_watched: dict[str, tuple[Callback, ...]] = {}


def watch(name: str, callback: Callback) -> None:
    """Call ``callback(name, module)`` after every import or reload of a module from now on.

    A module that is imported to its end already is the caller's to look at; one that is half imported, or lazy,
    is announced when it is done.
    """
    _watched[name] = (*(known for known in _watched.get(name, ()) if known != callback), callback)
    _finder.install()
    module = sys.modules.get(name)
    spec = spec_of(module)
    if module is None or spec is None:
        return
    if _is_lazy(module):
        _announce_after_loading(name, spec)
    elif _is_initialising(module):
        _announce_after_initialising(name, spec)


def unwatch(name: str, callback: Callback) -> None:
    """Stop telling this callback of a module."""
    _watched[name] = tuple(known for known in _watched.get(name, ()) if known != callback)
    if not _watched[name]:
        del _watched[name]


def is_ready(module: ModuleType) -> bool:
    """Whether a module in ``sys.modules`` has been executed to its end."""
    return not _is_lazy(module) and not _is_initialising(module)


def _announce(name: str, module: ModuleType) -> None:
    for callback in _watched.get(name, ()):
        # A module may have put something else into its place.
        callback(name, sys.modules.get(name, module))


# ---------------------------------------------------------------------------------------- first import, reload


class _Finder:
    """Stands in front, lets the other finders find a watched module, and has its loader announce it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking = threading.local()

    def install(self) -> None:
        """Go to the front, also when somebody else has gone there since."""
        with self._lock:
            if _position(self) != 0:
                sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # The finders that we ask may themselves ask all of sys.meta_path (wrapt's does).
        if fullname not in _watched or getattr(self._asking, "name", None) == fullname:
            return None
        self._asking.name = fullname
        try:
            spec = self._ask_the_others(fullname, path, target)
        finally:
            self._asking.name = None
        if spec is not None:
            _announce_after_loading(fullname, spec)
        return spec

    def _ask_the_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path[_position(self) + 1 :]:
            # On a reload wrapt's finder would answer with the spec of the module as it was before.
            if target is not None and type(finder).__module__.startswith("wrapt."):
                continue
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None:
                return spec
        return None


def _position(wanted: object) -> int:
    # Not index(): it compares with ==, and other people's finders may define that.
    return next((index for index, finder in enumerate(sys.meta_path) if finder is wanted), -1)


_finder = _Finder()


def _announce_after_loading(name: str, spec: ModuleSpec) -> None:
    from .loader import AnnouncingLoader

    loader = spec.loader

    def done(module: ModuleType) -> None:
        own_spec = spec_of(module)
        if isinstance(loader, importlib.util.LazyLoader) and own_spec is not None and _is_lazy(module):
            _announce_after_loading(name, own_spec)  # the module itself has yet to run
        else:
            _announce(name, module)

    # Loaders without exec_module() (the protocol that ends with Python 3.15) are left alone.
    if hasattr(loader, "exec_module") and not isinstance(loader, AnnouncingLoader):
        spec.loader = AnnouncingLoader(loader, done)  # type: ignore[assignment, unused-ignore]


# ------------------------------------------------------------------------------------------ lazy modules


def _is_lazy(module: ModuleType) -> bool:
    return type(module) is importlib.util._LazyModule  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------- half-imported modules


def _is_initialising(module: ModuleType) -> bool:
    return bool(getattr(spec_of(module), "_initializing", False))


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
            if attribute != "_initializing" or value:
                super().__setattr__(attribute, value)
                return
            self.__class__ = own_class  # type: ignore[assignment]
            module = sys.modules.get(name)
            try:
                # Before the module counts as done: no other thread may find it done and unpatched.
                if module is not None:  # None: the import failed
                    _announce(name, module)
            except BaseException:  # the import is to fail, so the module must not stay
                sys.modules.pop(name, None)
                raise
            finally:
                setattr(self, attribute, value)

    Watching.__name__, Watching.__qualname__ = own_class.__name__, own_class.__qualname__
    spec.__class__ = Watching
    if not getattr(spec, "_initializing", False):  # it ended meanwhile, in another thread
        spec.__class__ = own_class
        module = sys.modules.get(name)
        if module is not None:
            _announce(name, module)
