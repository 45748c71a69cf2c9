"""Runs at the start of every interpreter of an environment with the hook on, so it imports only sys and os.

A finder waits for the first import of a watched framework, and loads the engine right before the module runs. Other
programs (pip, a linter, a data script) are not affected.
"""

import atexit
import os
import sys
from _thread import RLock, get_ident  # threading's primitives, without importing threading

from . import import_system, installed
from .import_system import no_signal

TYPE_CHECKING = False  # as in __init__: typing is not imported at run time
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

# Written by tools/derive.py: top-level modules of the built-in patches' targets, and torch, so that other
# distributions' patches for packages that use torch are applied in time. RLHF_PATCHES_WATCH and installed plugins add
# more names.
WATCHED = (
    "torch",
    "accelerate",
    "datasets",
    "deepspeed",
    "math_verify",
    "megatron",
    "nemo_rl",
    "openrlhf",
    "peft",
    "skyrl",
    "slime",
    "slime_plugins",
    "swift",
    "transformer_engine",
    "transformers",
    "trl",
    "verl",
    "vllm",
)
# Python tries to import these at every start. Their own imports are observed.
_OF_SITE = ("sitecustomize", "usercustomize")
# Required to repair an environment with a broken plugin. No plugin patches them.
_OF_INSTALLERS = ("pip", "setuptools", "pkg_resources", "wheel", "rlhf_patches")
_OFF = ("", "0", "false", "no", "off")
_TIMEOUT = 60.0  # seconds
_looked = False


class NotActiveError(RuntimeError):
    """The engine could not be loaded, and the user requires a patched run.

    Not an ImportError: ``try: import trl`` would treat it as a missing trl.
    """


class _FirstImport(import_system.Observer):
    """A meta path finder that locates no modules itself, and loads the engine before a watched module runs."""

    def __init__(self, watched: frozenset[str]) -> None:
        self.watched = watched
        self._plugins: bool | None = None  # whether there may be plugins whose targets are not known yet
        self._unknown = False  # whether the targets are unknown: then any import may be one
        self._lock = RLock()
        self._loading_thread: int | None = None
        self._finder: Any = None  # the engine's, once the patches are applied
        self._problem: str | None = None
        self._complained = False
        os.register_at_fork(after_in_child=self._after_fork)

    def find_spec(self, fullname: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if target is not None or not self._may_concern(fullname.partition(".")[0]):
            return None
        if self._finder is not None:
            # It is the first finder, but Python may have passed that position before.
            return self._finder.find_spec(fullname, path, target)  # type: ignore[no-any-return]
        if self._loading_thread == get_ident() or (self._problem is not None and not _demanded()):
            return None
        spec = import_system.ask_the_others(self, fullname, path, target)
        if spec is not None and not import_system.observe(spec, self) and fullname.partition(".")[0] in self.watched:
            # Not stored as the problem: the next framework may load the engine.
            self._go_on_without(
                f"the import of {fullname} cannot be watched: its finder returns a {type(spec).__name__}, not a "
                "ModuleSpec"
            )
        return spec

    def begins(self, spec: "ModuleSpec") -> None:
        """Load the engine, which announces this module when it has run."""
        before = sys.modules.get(spec.name)
        if self._plugins:
            self._ask_plugins()
        if spec.name.partition(".")[0] in self.watched or self._unknown or self._passed():
            self.turns_lazy(spec)
        module = sys.modules.get(spec.name)
        # A plugin has imported it meanwhile. It must not run again: torch, for example, cannot.
        if module is not before and module is not None:
            import_system.Instead(spec, module)

    def turns_lazy(self, spec: "ModuleSpec") -> None:
        """Load the engine before the module runs."""
        self.load_engine()
        if self._finder is not None:
            self._finder.adopt(spec)

    def _may_concern(self, top: str) -> bool:
        """Whether the engine may have to be loaded before a module runs; determined without an import."""
        if top in self.watched:
            return True
        if top.startswith("_") or top in _OF_SITE or top in _OF_INSTALLERS or top in sys.stdlib_module_names:
            return False
        if self._finder is not None or self._loading_thread == get_ident() or _is_our_command():
            return False
        if self._plugins is None:
            self._plugins = _plugins_installed()
        return self._plugins or self._unknown or (sys.meta_path[0] is not self and bool(self._passed()))

    def _passed(self) -> list[str]:
        """Return the watched modules that were imported unnoticed, for example because of another first finder."""
        engine = getattr(sys.modules.get("rlhf_patches.engine.engine"), "engine", None)
        if self._finder is not None or (engine is not None and engine.is_called):  # here, or by the user
            return []
        return [name for name in sorted(self.watched) if _is_imported(name)]

    def _ask_plugins(self) -> None:
        """Also watch the targets of installed plugins.

        If a plugin's targets are unknown, or RLHF_PATCHES_PLUGINS is invalid, any import may be a target. So the engine
        is loaded at the next import, and reports or raises the error.
        """
        with import_system.loading():
            if not self._lock.acquire(timeout=_TIMEOUT):
                return
            try:
                if self._plugins and self._loading_thread != get_ident():
                    self._loading_thread = get_ident()
                    try:
                        from .definitions import registry

                        patches, failures = registry.listed()
                        modules = [name for patch, _ in patches for name in patch.modules]
                        self.watched |= {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
                        self._unknown = bool(failures)
                    except no_signal(Exception, SystemExit):
                        self._unknown = True
                    finally:
                        self._loading_thread = None
                    self._plugins = False
            finally:
                self._lock.release()

    def load_engine(self) -> None:
        """Load the engine and apply the patches, once.

        Raises:
            SettingsError, PatchError, VerifyError: see `rlhf_patches.apply`. Every import of a framework raises it
                again, in case the first one is caught.
            NotActiveError: the engine could not be loaded, and RLHF_PATCHES_STRICT or RLHF_PATCHES_VERIFY is set.
        """
        if self._loading_thread == get_ident():
            return  # a plugin imports a framework
        with import_system.loading():  # also while this thread waits: it holds the lock of its framework's module
            self._load_engine()

    def _load_engine(self) -> None:
        # Another thread that imports a framework meanwhile must wait, or its import would be unpatched. The wait has a
        # timeout: a plugin may import the module that the other thread is importing.
        if not self._lock.acquire(timeout=_TIMEOUT):
            self._go_on_without(f"another thread has been loading the engine for {_TIMEOUT:.0f} s")
            return
        try:
            if self._problem is not None:
                self._go_on_without(self._problem)
            elif self._finder is None:
                self._loading_thread = get_ident()
                self._apply()
        finally:
            self._loading_thread = None
            self._lock.release()

    def _apply(self) -> None:
        try:
            from . import api, settings
            from .definitions import status
            from .engine import import_hooks, log

            log.logger()  # imports logging
        except no_signal(Exception, SystemExit) as error:  # a user's file with a dependency's name may raise anything
            self._problem = (
                f"the engine could not be loaded, {type(error).__name__}: {error}. Are all dependencies of "
                "rlhf-patches installed, and does no file of yours have the name of one (such as logging.py)?"
            )
            self._go_on_without(self._problem)
            return
        try:
            log.configure(default="warning")
            rehearsal = settings.rehearse()
            if "without" not in rehearsal:
                api.apply()
            if rehearsal:
                from .rehearsal import start

                start.arm()
        except (settings.SettingsError, status.PatchError):
            # Invalid settings, or strict mode: the run must not start.
            raise
        except no_signal(Exception) as error:
            if _demanded() and not isinstance(error, ImportError):  # such as VerifyError
                raise
            self._go_on_without(f"{type(error).__name__}: {error}")
        self._finder = import_hooks.finder

    def _go_on_without(self, problem: str) -> None:
        if _demanded():
            raise NotActiveError(
                f"RLHF_PATCHES_{_demanded()} is set, and rlhf_patches is NOT ACTIVE: {problem}. To run unpatched, set "
                "RLHF_PATCHES_AUTOLOAD=0"
            )
        if not self._complained:  # one line for all modules of a framework
            self._complained = True
            _complain(f"NOT ACTIVE: {problem}")

    def at_exit(self) -> None:
        """Report that a framework was imported without the hook; also by the exit status if patches are required."""
        passed = self._passed()
        if not passed or self._complained:
            return
        first: Any = sys.meta_path[0] if sys.meta_path else self
        kind = first if isinstance(first, type) else type(first)
        by = "" if first is self else f" (in front of it is {kind.__module__}.{kind.__qualname__})"
        _complain(
            f"NOT ACTIVE: imported without the site hook{by}: {', '.join(passed)}. Call rlhf_patches.apply() after "
            "that import, or before the code that imports it in another way"
        )
        if _demanded():
            from .engine import exit_status

            exit_status.fail()

    def _after_fork(self) -> None:
        if self._loading_thread != get_ident():  # a plugin may fork, and continue in the child
            self._lock, self._loading_thread = RLock(), None


def _plugins_installed() -> bool:
    """Whether another distribution may provide allowed patches; nothing is imported.

    If the path has entries other than folders, only importlib.metadata knows. It is used when the plugins are loaded.
    """
    named = os.environ.get("RLHF_PATCHES_PLUGINS", "").strip().lower()
    if named:  # and an error if it is not installed
        return named != "none"
    return installed.others_bring_patches(sys.path) is not False


def _is_our_command() -> bool:
    """Whether this is the ``rlhf-patches`` command, which reports broken plugins and patches nothing."""
    command: str = (getattr(sys, "argv", None) or [""])[0]
    return os.path.basename(command) == "rlhf-patches" or command.endswith(os.path.join("rlhf_patches", "__main__.py"))


def _is_imported(name: str) -> bool:
    """Whether a module was really imported, and not put into sys.modules by hand, as tests do."""
    try:  # without attribute access, which loads a lazy module
        spec = object.__getattribute__(sys.modules[name], "__dict__").get("__spec__")
    except (KeyError, AttributeError):
        return False
    return getattr(spec, "loader", None) is not None


def _demanded() -> str | None:
    """Return the variable that requires a patched run; None if neither is set."""
    for name in ("STRICT", "VERIFY"):
        if os.environ.get(f"RLHF_PATCHES_{name}", "").strip().lower() not in _OFF:
            return name
    return None


def install(default: str = "0", watch: tuple[str, ...] = ()) -> None:
    """Wait for the first import of a framework, if RLHF_PATCHES_AUTOLOAD (``default`` if unset) is on.

    In a virtual environment a ``.pth`` file can run twice; the second run does nothing.
    """
    value = os.environ.get("RLHF_PATCHES_AUTOLOAD", default).strip().lower()
    if value in _OFF:
        if "RLHF_PATCHES_AUTOLOAD" not in os.environ:
            _look_for_mistakes()
        return
    if any(type(finder).__name__ == _FirstImport.__name__ for finder in sys.meta_path):
        return
    extra = os.environ.get("RLHF_PATCHES_WATCH", "").split(",")
    names = frozenset(name.strip().partition(".")[0] for name in (*WATCHED, *watch, *extra) if name.strip())
    standard = names & sys.stdlib_module_names
    if standard:  # the first import of a framework raises a SettingsError for it
        _complain(f"RLHF_PATCHES_WATCH names {', '.join(sorted(standard))} of the standard library: ignored")
    finder = _FirstImport(names - standard)
    sys.meta_path.insert(0, finder)
    atexit.register(finder.at_exit)
    run = os.environ.get("RLHF_PATCHES_RUN")
    if run:  # `rlhf-patches run` checks at its end whether there was such a process
        try:
            os.utime(run)
        except OSError:  # another host, or the run is over
            pass


def _look_for_mistakes() -> None:
    """Report unknown variables at once if the hook is off because RLHF_PATCHES_AUTOLOAD is unset.

    The other variables are checked at exit: they are valid if `apply` is called, which may be after a framework's
    import.
    """
    global _looked
    if _looked or _is_our_command() or "rlhf_patches" in sys.orig_argv:  # which reports it itself
        return
    _looked = True
    from . import settings

    unknown = settings.unknown(os.environ)
    if unknown:
        _complain("; ".join(unknown) + ". RLHF_PATCHES_AUTOLOAD is not set: nothing is patched without apply()")
    asking = settings.asking(os.environ)
    if asking:
        atexit.register(_say_unpatched, asking)


def _say_unpatched(variables: "list[str]") -> None:
    """At exit, report that a framework was imported and the engine was not, although variables are set."""
    imported = [name for name in WATCHED if name != "torch" and _is_imported(name)]  # torch: a launcher's, inductor's
    if not imported or "rlhf_patches.engine.engine" in sys.modules:
        return
    from . import ranks

    if ranks.is_launcher():
        return
    if ranks.place().rank in (None, "0"):
        _complain(
            f"NOT ACTIVE, although {', '.join(variables)} is set: {', '.join(imported)} ran unpatched, since "
            "RLHF_PATCHES_AUTOLOAD is not set and apply() was not called"
        )


def setup_ray_worker() -> None:
    """Ray's ``worker_process_setup_hook``, which runs before a worker's first task: `install`, if no .pth has run it.

    Raises:
        SettingsError: Ray has already imported a framework, and a variable is invalid.
        PatchError: Ray has already imported a framework, and in strict mode a patch is refused or failed.
    """
    install(default="1")
    load_now(only_if_late=True)


def load_now(only_if_late: bool = False) -> None:
    """If the hook waits for the first import of a framework, load the engine now.

    Args:
        only_if_late: only if that import was before the hook.

    Raises:
        SettingsError: as on that import.
        PatchError: as on that import.
    """
    for finder in list(sys.meta_path):
        if isinstance(finder, _FirstImport) and (not only_if_late or any(n in sys.modules for n in finder.watched)):
            finder.load_engine()


def _complain(message: str) -> None:
    try:
        sys.stderr.write(f"[rlhf_patches] {message}\n")
    except Exception:  # standard error is missing or full
        pass
