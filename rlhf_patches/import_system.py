"""The common code of our two finders, which avoids deadlocks. It imports only sys, os, and C modules.

Python calls ``find_spec`` while it holds the global import lock. An import or a wait there deadlocks if another thread
imports something at that moment: that thread waits for the lock, and we wait for its module.
So a finder only calls the other finders and observes the spec. The import system marks a spec when its module is about
to run (``_initializing = True``) and when it is done; at both moments it holds only that module's lock. The loader is
unchanged, and no frame of ours is on the stack while the module runs.
"""

import os
import sys
from _signal import NSIG, getsignal  # type: ignore[import-not-found]
from _thread import _local, get_ident

TYPE_CHECKING = False  # as in __init__: typing is not imported at run time
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType
    from typing import Any, TypeVar

    Raised = TypeVar("Raised", bound=BaseException)

# ------------------------------------------------------------------------------------------ finding


_asking = _local()


def ask_the_others(finder: object, fullname: str, path: "Any", target: "Any") -> "ModuleSpec | None":
    """Return the spec of the finders after this one; None if one of them calls all finders in turn (wrapt's does)."""
    asked: set[tuple[int, str]] = _asking.__dict__.setdefault("asked", set())
    question = (id(finder), fullname)
    if question in asked:
        return None
    asked.add(question)
    try:
        behind = False
        for other in list(sys.meta_path):
            # Not index(): it compares with ==, which other finders may define.
            if other is finder:
                behind = True
            elif behind:
                spec = _ask(other, fullname, path, target)
                if spec is not None:
                    return spec
        return None
    finally:
        asked.discard(question)


def _ask(finder: "Any", fullname: str, path: "Any", target: "Any") -> "ModuleSpec | None":
    if hasattr(finder, "find_spec"):
        return finder.find_spec(fullname, path, target)  # type: ignore[no-any-return]
    # Before Python 3.12 a finder may have find_module() instead.
    find_module: Any = getattr(sys.modules["_frozen_importlib"], "_find_spec_legacy", None)
    return find_module(finder, fullname, path) if find_module is not None else None


# ------------------------------------------------------------------------------------------ observing


class Observer:
    """Callbacks during an import. Only the module's own lock is held."""

    def begins(self, spec: "ModuleSpec") -> None:
        """The module is about to run, and is not in ``sys.modules`` yet. An exception fails the import."""

    def ends(self, spec: "ModuleSpec") -> None:
        """The module has run, and other threads still wait for it; or it has failed, and has been removed."""

    def turns_lazy(self, spec: "ModuleSpec") -> None:
        """The module uses importlib.util.LazyLoader: it will run later, without the callbacks above."""


class _Observed:
    """A base that precedes a spec's own class during its import."""

    _rlhf_patches_own_class: type
    _rlhf_patches_observers: "list[Observer]"

    def __setattr__(self, attribute: str, value: "Any") -> None:
        observers = self._rlhf_patches_observers  # may grow meanwhile
        if attribute == "_initializing" and value:
            for observer in observers:
                observer.begins(self)  # type: ignore[arg-type]
        elif attribute == "_initializing":
            stop_observing(self)
            try:
                for observer in observers:
                    observer.ends(self)  # type: ignore[arg-type]
            except BaseException:  # the import fails, so the module must not remain
                sys.modules.pop(self.name, None)  # type: ignore[attr-defined]
                raise
            finally:
                # Last: no other thread may see the finished module before the waiting threads.
                setattr(self, attribute, value)
            return
        super().__setattr__(attribute, value)
        if attribute == "loader_state":
            for observer in observers:
                observer.turns_lazy(self)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: "Any") -> "Any":
        """Copy and pickle it as its own class."""
        own_class = self._rlhf_patches_own_class
        return own_class.__new__, (own_class,), vars(self)


def observe(spec: "ModuleSpec", observer: Observer) -> bool:
    """Notify the observer of this spec's import; return False if the spec is not one of Python's own."""
    own_class = type(spec)
    if issubclass(own_class, _Observed):
        if not any(known is observer for known in own_class._rlhf_patches_observers):
            own_class._rlhf_patches_observers.append(observer)
        return True
    names = {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__, "__doc__": own_class.__doc__}
    ours = {"_rlhf_patches_own_class": own_class, "_rlhf_patches_observers": [observer]}
    try:
        spec.__class__ = type(own_class.__name__, (_Observed, own_class), {**names, **ours})
    except no_signal(Exception):  # TypeError for another layout, or an exception of the class
        return False
    return True


class Instead:
    """A loader that replaces a module that is about to run by another module."""

    def __init__(self, spec: "ModuleSpec", module: "Any") -> None:
        self._spec, self._loader, self._module = spec, spec.loader, module
        spec.loader = self  # type: ignore[assignment]

    def exec_module(self, _: object) -> None:
        self._spec.loader = self._loader
        sys.modules[self._spec.name] = self._module


def stop_observing(spec: object) -> None:
    """Restore a spec's own class."""
    if isinstance(spec, _Observed):
        spec.__class__ = spec._rlhf_patches_own_class


# ------------------------------------------------------------------------------------------ signals


def no_signal(*kinds: "type[Raised]") -> "tuple[type[Raised], ...]":
    """For ``except no_signal(Exception):``, which does not catch the exceptions of a signal handler.

    A handler runs between any two steps of the main thread, including ours. Its ``sys.exit`` on SIGTERM, or its timeout
    on SIGALRM, is for the user's code and unrelated to our operation.

    Args:
        kinds: the exceptions to catch otherwise.
    """
    _note_handlers()  # there may be a new one
    error: BaseException | None = sys.exc_info()[1]
    while error is not None:
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code in _handlers:
                if error is not sys.exc_info()[1]:
                    raise error
                return ()
            step = step.tb_next
        error = error.__cause__  # until Python 3.11, an exception in __set_name__ is the cause of a RuntimeError
    return kinds


_handlers: "set[CodeType]" = set()
"""Code of all signal handlers seen so far: a handler may replace itself before it raises."""


def _note_handlers() -> None:
    for number in range(1, NSIG):
        handler: Any = getsignal(number)
        for _ in range(4):  # a function or method, or an object or partial that wraps one
            if handler is None or isinstance(handler, int):
                break
            code = getattr(handler, "__code__", None)
            if code is not None:
                _handlers.add(code)
                break
            handler = getattr(handler, "func", None) or getattr(type(handler), "__call__", None)  # noqa: B004


# ------------------------------------------------------------------------------------------ forks


class loading:
    """A context in which this thread loads our modules, so that a child forked by another thread can load them too.

    Otherwise the modules that this thread imports would stay half-imported and locked in the child.
    """

    def __enter__(self) -> None:
        _note_handlers()
        thread = get_ident()
        _threads[thread] = _threads.get(thread, 0) + 1
        try:
            # From Python 3.13 on it replaces itself in sys.modules, and `from collections.abc import ...`, the first
            # import of our modules, fails if another thread is importing it; this import waits for that thread.
            import collections.abc  # noqa: F401
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        _threads[thread] -= 1
        if not _threads[thread]:
            del _threads[thread]


_threads: dict[int, int] = {}


def _forget_other_threads() -> None:
    """In a forked child, restart the imports of the loading threads, which do not exist there."""
    gone = {thread for thread in _threads if thread != get_ident()}
    if not gone:
        return
    # Private to the import system, but the only way; equal from 3.10 to 3.14.
    locks = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
    for name, reference in list(locks.items()):
        if getattr(reference(), "owner", None) in gone:
            del locks[name]
            if is_initializing(sys.modules.get(name)):
                del sys.modules[name]
                # pathlib and asyncio use submodule names that only the submodules' import binds. Submodules of other
                # packages stay: other code may hold their classes, and extension modules may load only once.
                if name in sys.stdlib_module_names:
                    for submodule in [other for other in sys.modules if other.startswith(name + ".")]:
                        del sys.modules[submodule]
    for thread in gone:
        del _threads[thread]


def is_initializing(module: object) -> bool:
    """Whether a module of ``sys.modules`` is half-imported."""
    try:  # without attribute access, which loads a lazy module
        spec = object.__getattribute__(module, "__dict__").get("__spec__")
    except AttributeError:
        return False
    return bool(getattr(spec, "_initializing", False))


os.register_at_fork(after_in_child=_forget_other_threads)
