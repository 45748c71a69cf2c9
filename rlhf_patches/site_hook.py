"""Runs at the start of every interpreter of an environment where the hook is on: nothing but sys and os here.

A finder waits for the first import of a watched framework; only then is the engine loaded, right before the module
runs. Everything else (pip, a linter, a data script) runs as if this package were not there.
"""

import atexit
import os
import sys
from _thread import RLock, get_ident  # what threading has; threading itself need not be imported yet

from . import import_system, installed
from .import_system import no_signal

TYPE_CHECKING = False  # as in __init__: typing is not imported at run time
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

# Written by tools/derive.py: top-level modules of the built-in patches' targets, and torch, so that patches of other
# distributions for anything on top of torch are in time too. More names come from RLHF_PATCHES_WATCH, and from plugins
# that are installed.
WATCHED = (
    "torch",
    "accelerate",
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
# Python imports these at every start, mostly in vain. What they import is looked at.
_OF_SITE = ("sitecustomize", "usercustomize")
# Without them nobody could mend an environment in which a plugin is broken. No patch of a plugin is for them.
_OF_INSTALLERS = ("pip", "setuptools", "pkg_resources", "wheel", "rlhf_patches")
_OFF = ("", "0", "false", "no", "off")
_TIMEOUT = 60.0  # seconds
_looked = False


class NotActiveError(RuntimeError):
    """The engine could not be loaded, and the user has asked for a run that does not begin unpatched.

    No ImportError: ``try: import trl`` would take it for "there is no trl".
    """


class _FirstImport(import_system.Observer):
    """A meta path finder that finds nothing of its own, and loads the engine when a watched module is about to run."""

    def __init__(self, watched: frozenset[str]) -> None:
        self.watched = watched
        self._plugins: bool | None = None  # whether there may be any that have not been asked what they patch
        self._unknown = False  # what they patch: then anything can be it
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
            # It stands in front, but Python may have passed that place before it came there.
            return self._finder.find_spec(fullname, path, target)  # type: ignore[no-any-return]
        if self._loading_thread == get_ident() or (self._problem is not None and not _demanded()):
            return None
        spec = import_system.ask_the_others(self, fullname, path, target)
        if spec is not None and not import_system.observe(spec, self) and fullname.partition(".")[0] in self.watched:
            # Not remembered as the problem: the next framework may load the engine.
            self._go_on_without(
                f"the import of {fullname} cannot be watched, since its finder gives a {type(spec).__name__}, not a "
                "ModuleSpec as Python's own"
            )
        return spec

    def begins(self, spec: "ModuleSpec") -> None:
        """Load the engine, and have it announce this very module when it has run."""
        before = sys.modules.get(spec.name)
        if self._plugins:
            self._ask_plugins()
        if spec.name.partition(".")[0] in self.watched or self._unknown or self._passed():
            self.turns_lazy(spec)
        module = sys.modules.get(spec.name)
        # A plugin has imported it meanwhile. It must not run a second time: torch, for one, could not.
        if module is not before and module is not None:
            import_system.Instead(spec, module)

    def turns_lazy(self, spec: "ModuleSpec") -> None:
        """The engine must be there before the module runs."""
        self.load_engine()
        if self._finder is not None:
            self._finder.adopt(spec)

    def _may_concern(self, top: str) -> bool:
        """Whether the engine has to be there before a module runs; without an import, so that is not certain."""
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
        """What is waited for, and was imported and not seen: another finder has come in front of this one, say."""
        engine = getattr(sys.modules.get("rlhf_patches.engine.engine"), "engine", None)
        if self._finder is not None or (engine is not None and engine.is_called):  # here, or by the user
            return []
        return [name for name in sorted(self.watched) if _is_imported(name)]

    def _ask_plugins(self) -> None:
        """Wait for what installed plugins patch, too.

        Where one cannot say what it patches, or RLHF_PATCHES_PLUGINS is wrong, any import may be of what it patches. So
        the engine is loaded at the next one, and says what is wrong, or raises it.
        """
        with import_system.loading():
            if not self._lock.acquire(timeout=_TIMEOUT):
                return
            try:
                if self._plugins and self._loading_thread != get_ident():
                    self._loading_thread = get_ident()
                    try:
                        from .definitions import registry

                        found, failures = registry.listed()
                        modules = [name for patch, _ in found for name in patch.modules]
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
            SettingsError, PatchError, VerifyError: as `rlhf_patches.apply`. Every import of a framework raises it
                anew, in case the first one is caught.
            NotActiveError: the engine could not be loaded, and RLHF_PATCHES_STRICT or RLHF_PATCHES_VERIFY is set.
        """
        if self._loading_thread == get_ident():
            return  # a plugin imports a framework
        with import_system.loading():  # while this thread waits, too: it holds the lock of its framework's module
            self._load_engine()

    def _load_engine(self) -> None:
        # Another thread that imports a framework meanwhile has to wait, or its import would go unpatched. It does
        # not wait for ever: a plugin may import what that thread is just importing.
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
        except no_signal(Exception, SystemExit) as error:  # a file that is named like a dependency does what it likes
            self._problem = (
                f"the engine could not be loaded, {type(error).__name__}: {error}. Is rlhf-patches installed with all "
                "that it depends on, and is no file of yours named as these are (logging.py, say)?"
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
            # The user asked for what cannot be, or for strictness: the run must not begin.
            raise
        except no_signal(Exception) as error:
            if _demanded() and not isinstance(error, ImportError):  # VerifyError, say
                raise
            self._go_on_without(f"{type(error).__name__}: {error}")
        self._finder = import_hooks.finder

    def _go_on_without(self, problem: str) -> None:
        if _demanded():
            raise NotActiveError(
                f"RLHF_PATCHES_{_demanded()} is set, and rlhf_patches is NOT ACTIVE: {problem}. To run unpatched, set "
                "RLHF_PATCHES_AUTOLOAD=0"
            )
        if not self._complained:  # one line, however many modules a framework has
            self._complained = True
            _complain(f"NOT ACTIVE: {problem}")

    def at_exit(self) -> None:
        """Say that a framework was imported past us; where a patched run is demanded, by the exit status, too."""
        passed = self._passed()
        if not passed or self._complained:
            return
        first: Any = sys.meta_path[0] if sys.meta_path else self
        kind = first if isinstance(first, type) else type(first)
        by = "" if first is self else f" (in front of it is {kind.__module__}.{kind.__qualname__})"
        _complain(
            f"NOT ACTIVE: imported past the site hook{by}: {', '.join(passed)}. Call rlhf_patches.apply() after that "
            "import, or in front of whatever imports it in a way of its own"
        )
        if _demanded():
            from . import exit_status

            exit_status.fail()

    def _after_fork(self) -> None:
        if self._loading_thread != get_ident():  # a plugin may fork, and go on in the child
            self._lock, self._loading_thread = RLock(), None


def _plugins_installed() -> bool:
    """Whether a distribution other than ours may list patches that may be used; nothing is imported.

    Where the path has more than folders only importlib.metadata can tell. It is asked when the plugins are.
    """
    named = os.environ.get("RLHF_PATCHES_PLUGINS", "").strip().lower()
    if named:  # and an error if it is not installed
        return named != "none"
    return installed.others_bring_patches(sys.path) is not False


def _is_our_command() -> bool:
    """Whether this is ``rlhf-patches``, which says what is wrong with a plugin, and patches nothing."""
    command: str = (getattr(sys, "argv", None) or [""])[0]
    return os.path.basename(command) == "rlhf-patches" or command.endswith(os.path.join("rlhf_patches", "__main__.py"))


def _is_imported(name: str) -> bool:
    """Whether a module was found and run, and not put into sys.modules by hand, as stand-ins of tests are."""
    try:  # without attribute access: that makes a lazy module run
        spec = object.__getattribute__(sys.modules[name], "__dict__").get("__spec__")
    except (KeyError, AttributeError):
        return False
    return getattr(spec, "loader", None) is not None


def _demanded() -> str | None:
    """The variable that asks for a run which is patched or does not begin; None if neither is set."""
    for name in ("STRICT", "VERIFY"):
        if os.environ.get(f"RLHF_PATCHES_{name}", "").strip().lower() not in _OFF:
            return name
    return None


def install(default: str = "0", watch: tuple[str, ...] = ()) -> None:
    """Wait for the first import of a framework, if RLHF_PATCHES_AUTOLOAD (``default`` when unset) says so.

    In a virtual environment a ``.pth`` file can be executed twice; the second time does nothing.
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
        _complain(f"RLHF_PATCHES_WATCH names {', '.join(sorted(standard))} of the standard library: not waited for")
    finder = _FirstImport(names - standard)
    sys.meta_path.insert(0, finder)
    atexit.register(finder.at_exit)
    run = os.environ.get("RLHF_PATCHES_RUN")
    if run:  # `rlhf-patches run` looks at its end whether there was such a process
        try:
            os.utime(run)
        except OSError:  # another host, or the run is over
            pass


def _look_for_mistakes() -> None:
    """The hook is off, nobody said so, and other variables are set: one of no meaning is said at once.

    The others are looked at when the process ends. Whoever calls `apply` sets them rightly, and may call it after a
    framework's import: before the end nobody can tell.
    """
    global _looked
    if _looked or _is_our_command() or "rlhf_patches" in sys.orig_argv:  # which says it itself
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
    """At the end: a framework was imported, and nobody has loaded the engine for which these variables are."""
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
        if isinstance(finder, _FirstImport) and (not only_if_late or any(n in sys.modules for n in finder.watched)):
            finder.load_engine()


def _complain(message: str) -> None:
    try:
        sys.stderr.write(f"[rlhf_patches] {message}\n")
    except Exception:  # there is no standard error, or it is full
        pass
