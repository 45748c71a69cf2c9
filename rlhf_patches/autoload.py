"""Enables the site hook for a whole environment, without an environment variable: for container images."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import settings, site_hook
from .definitions import registry
from .definitions.registry import Registered
from .runs import hook_files

_MODE = 0o644

# A .pth file's code must be one line. Every interpreter reads it, so it is compiled only on demand.
# ``fullname`` is `site`'s name of the file: its current path, also in a moved environment. ``unset`` replaces an unset
# variable: if the hook stays off, `site_hook.install` checks whether another variable is a mistake.
_LINE = (
    "import os; os.environ.get('RLHF_PATCHES_AUTOLOAD', {unset}) in ('', '0', False) or "
    "exec({start!r}, {{'file': locals().get('fullname', 'the .pth file')}})\n"
)
_START = """\
try:
 from rlhf_patches.site_hook import install
 install({default!r}, {watch})
except Exception as error:
 exec({broken!r})"""
# Code that works without the package, which may be removed. An environment's .pth files can run twice.
_BROKEN = """\
import os, sys
def given(name, default=''):
 return os.environ.get('RLHF_PATCHES_' + name, default).strip().lower() not in ('', '0', 'false', 'no', 'off')
if given('AUTOLOAD', {default!r}) and not hasattr(sys, '_rlhf_patches_not_active'):
 text = '[rlhf_patches] NOT ACTIVE, although {although}: %s: %s. {remedy}' % (type(error).__name__, error, file)
 sys._rlhf_patches_not_active = text
 try:
  sys.stderr.write(text + '\\n')
 except Exception:
  pass
 if given('STRICT') or given('VERIFY'):
  more = [name.strip().partition('.')[0] for name in os.environ.get('RLHF_PATCHES_WATCH', '').split(',')]
  watched = {{*{watched}, *more}} - sys.stdlib_module_names
  class Refuse:
   def find_spec(name, path=None, target=None):
    if name.partition('.')[0] in watched and 'rlhf_patches.engine' not in sys.modules:
     raise RuntimeError(text + '. RLHF_PATCHES_STRICT or _VERIFY is set, so %s is not imported' % name)
  sys.meta_path.insert(0, Refuse)"""

# ``fullname``, as in a .pth file: the files to delete if the package is removed, this module and the .start file.
_MODULE = """\
# fmt: off
# ruff: noqa
"Written by rlhf-patches. PYTEST_DONT_REWRITE: pytest would say that it was imported before."
def install():
    fullname = __file__[:-2] + '*'
    {line}
"""


class AutoloadError(RuntimeError):
    """The environment cannot be changed; the message gives an alternative."""


@dataclass(frozen=True)
class Autoload:
    """The state of the hook in this environment."""

    switched_on: bool
    file: Path
    variable: str | None
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        state = "on" if self.switched_on else "off"
        lines = [
            f"autoload is {state} for this environment ({self.file}{'' if self.switched_on else ' does not exist'})"
        ]
        lines += [f"but {problem}" for problem in self.problems]
        if self.variable is not None:
            lines.append(f"RLHF_PATCHES_AUTOLOAD={self.variable} is set and decides for this process's children")
        return "\n".join(lines)


def status() -> Autoload:
    """Return whether `on` was called for this environment, and whether it works for all of its users."""
    file = hook_files.folder() / hook_files.SWITCHED_ON
    return Autoload(file.exists(), file, os.environ.get(settings.PREFIX + "AUTOLOAD"), tuple(problems(file)))


def on() -> Autoload:
    """Patch every process of this environment from now on; RLHF_PATCHES_AUTOLOAD=0 still turns it off.

    Raises:
        AutoloadError: site-packages cannot be written.
    """
    file = hook_files.folder() / hook_files.SWITCHED_ON
    try:
        text = line("1", watch_list(registry.load()[0]))
        if sys.version_info >= (3, 15):
            _write(file.with_suffix(".py"), module(text))
            _write(file.with_suffix(".start"), start(file.stem))
        _write(file, text)
    except OSError as error:
        raise AutoloadError(
            f"cannot write {file}: {error.strerror}. Run it as the owner of the environment, or set "
            "RLHF_PATCHES_AUTOLOAD=1 instead"
        ) from error
    return status()


def off() -> Autoload:
    """Undo `on`.

    Raises:
        AutoloadError: the file cannot be removed.
    """
    file = hook_files.folder() / hook_files.SWITCHED_ON
    try:
        for suffix in (".start", ".py", ".pth"):  # .start first: it names the .py
            file.with_suffix(suffix).unlink(missing_ok=True)
    except OSError as error:
        raise AutoloadError(
            f"cannot remove {file}: {error.strerror}. Run it as the owner of the environment"
        ) from error
    return status()


def line(default: str, watch: tuple[str, ...] = ()) -> str:
    """Return the content of a hook's .pth file. ``site_hook/rlhf_patches.pth`` is ``line("0")``; a test compares.

    Args:
        default: the value of an unset RLHF_PATCHES_AUTOLOAD, "1" or "0".
        watch: `watch_list`.
    """
    by_itself = default == "1"
    broken = _BROKEN.format(
        default=default,
        although="autoload is on" if by_itself else "RLHF_PATCHES_AUTOLOAD is set",
        remedy="Install rlhf-patches again, or delete %s"
        if by_itself
        else "Install rlhf-patches again (%s is left of it)",
        watched=ascii((*site_hook.WATCHED, *watch)),
    )
    unset = repr(default) if by_itself else "'RLHF_PATCHES_' in ' '.join(os.environ)"
    return _LINE.format(unset=unset, start=_START.format(default=default, watch=ascii(watch), broken=broken))


def module(text: str) -> str:
    """Return the module next to a hook's .pth file for PEP 829, whose .start file can only name a module's function.

    It is not a module of the package, which may be removed and must not be loaded if the hook is off. The wheel's is
    ``site_hook/rlhf_patches_start.py``, ``module(line("0"))``.

    Args:
        text: `line`.
    """
    return _MODULE.format(line=text.rstrip())


def start(name: str) -> str:
    """Return the .start file that names `module`, which is next to it as ``NAME.py``."""
    return f"{name}:install\n"


def problems(file: Path) -> list[str]:
    """Return why a hook's file does not work for every user, or is not safe, with remedies. Absent files have none."""
    texts = []
    remedy = (
        "`rlhf-patches autoload on` rewrites it"
        if file.name == hook_files.SWITCHED_ON
        else "set its mode to 644 (chmod)"
    )
    # The module's names by `on` and by the wheel.
    for path in (file, *map(file.with_suffix, (".start", ".py")), file.with_name(f"{file.stem}_start.py")):
        if not path.exists():
            continue
        state = path.stat()
        if state.st_mode & 0o444 != 0o444:
            texts.append(f"not every user can read {path}; the others silently run unpatched: {remedy}")
        if state.st_mode & stat.S_IWOTH:
            texts.append(f"every user can write {path}, and so change the code of other users' processes: {remedy}")
        if state.st_uid not in (0, path.parent.stat().st_uid):
            texts.append(f"{path} belongs to user {state.st_uid}, the environment does not: remove it, and {remedy}")
    return texts


def watch_list(registered: Iterable[Registered]) -> tuple[str, ...]:
    """Return the top-level modules that installed plugins patch and that are not in the site hook's list."""
    tops = {module.partition(".")[0] for item in registered for module in item.patch.modules}
    return tuple(sorted(top for top in tops - set(site_hook.WATCHED) if settings.watchable(top)))


def _write(file: Path, text: str) -> None:
    # Replaced atomically: another interpreter may be starting. Readable by all, with any umask.
    handle, temporary = tempfile.mkstemp(".tmp", f"{file.name}.", file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            os.fchmod(handle, _MODE)
            stream.write(text)
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)
