"""Runs at the start of every interpreter of an environment where the hook is on: nothing but sys and os here.

A finder waits for the first import of a watched framework; only then is the engine loaded. Everything else
(pip, a linter, a data script) runs as if this package were not there.
"""

import os
import sys
from _thread import RLock  # what threading.RLock is; threading itself need not be imported yet

TYPE_CHECKING = False  # as in __init__: typing is not imported at run time
if TYPE_CHECKING:
    from typing import Any

# Top-level modules of the built-in patches' targets (a test compares), and torch, so that patches of other
# distributions for anything on top of torch are in time too. More names come from RLHF_PATCHES_WATCH.
WATCHED = ("torch", "megatron", "slime", "swift", "verl", "trl", "skyrl", "nemo_rl")
_OFF = ("", "0", "false", "no", "off")
_PATIENCE = 120.0  # seconds


class _FirstImport:
    """A meta path finder that finds nothing. It leaves as soon as the engine is there."""

    def __init__(self, watched: frozenset[str]) -> None:
        self._watched = watched
        self._lock = RLock()
        self._done = False

    def find_spec(self, fullname: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if fullname.partition(".")[0] not in self._watched:
            return None
        self._load_engine()
        # Python is walking through sys.meta_path for this import, and the engine's finder, now in front, is already
        # behind it: without asking again, the very module that loads the engine would go unpatched.
        for finder in list(sys.meta_path):
            if type(finder).__module__ == "rlhf_patches.imports":
                return finder.find_spec(fullname, path, target)
        return None

    def _load_engine(self) -> None:
        # Another thread that imports a framework meanwhile has to wait, or its import would go unpatched. It does
        # not wait for ever: a plugin may import what that thread is just importing.
        if not self._lock.acquire(timeout=_PATIENCE):
            _complain(f"another thread has been loading the engine for {_PATIENCE:.0f} s; going on UNPATCHED")
            return
        try:
            if not self._done:
                self._done = True  # first: what follows may itself import a watched module
                self._apply()
        finally:
            self._lock.release()
        if self._done:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def _apply(self) -> None:
        try:
            from rlhf_patches import log, public, reporting, settings
        except Exception as error:
            _complain(f"NOT ACTIVE, the installation is incomplete: {type(error).__name__}: {error}")
            return
        try:
            log.configure(default="warning")
            public.apply()
        except (settings.SettingsError, reporting.PatchError):
            # The user asked for what cannot be, or for strictness. The run must not begin: every import of a
            # framework raises this, in case somebody catches the first one.
            self._done = False
            raise
        except Exception as error:
            _complain(f"NOT ACTIVE: {type(error).__name__}: {error}")


def install(default: str = "0", watch: tuple[str, ...] = ()) -> None:
    """Wait for the first import of a framework, if RLHF_PATCHES_AUTOLOAD (``default`` when unset) says so.

    In a virtual environment a ``.pth`` file can be executed twice; the second time does nothing.
    """
    value = os.environ.get("RLHF_PATCHES_AUTOLOAD", default).strip().lower()
    if value in _OFF or any(type(finder).__name__ == _FirstImport.__name__ for finder in sys.meta_path):
        return
    if value not in ("1", "true", "yes", "on"):
        _complain(f"RLHF_PATCHES_AUTOLOAD is {value!r}; expected 1 or 0. Taken as 1")
    extra = os.environ.get("RLHF_PATCHES_WATCH", "").split(",")
    names = frozenset(name.strip().partition(".")[0] for name in (*WATCHED, *watch, *extra) if name.strip())
    sys.meta_path.insert(0, _FirstImport(names))


def install_always() -> None:
    """`install` where ``rlhf-patches autoload on`` was run: on unless RLHF_PATCHES_AUTOLOAD=0."""
    install(default="1")


def setup_ray_worker() -> None:
    """Ray's ``worker_process_setup_hook``, which runs before a worker's first task: `install`, where no .pth has.

    Raises:
        SettingsError: Ray has imported a framework before, and a variable is wrong.
        PatchError: the same in strict mode, and a patch is refused or failed.
    """
    install(default="1")
    load_now(only_if_late=True)


def load_now(only_if_late: bool = False) -> None:
    """Where the hook waits for the first import of a framework: do now what that import would do.

    Args:
        only_if_late: do it only if that import was before the hook.

    Raises:
        SettingsError: as that import would.
        PatchError: as that import would.
    """
    for finder in list(sys.meta_path):
        if isinstance(finder, _FirstImport) and (not only_if_late or any(n in sys.modules for n in finder._watched)):
            finder._load_engine()


def _complain(message: str) -> None:
    sys.stderr.write(f"[rlhf_patches] {message}\n")
