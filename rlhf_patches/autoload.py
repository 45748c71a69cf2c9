"""Switching the site hook on for a whole environment, without an environment variable: for container images."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import plugins, settings, site_hook
from .plugins import Registered

# Sorts after an editable install's own .pth, which has to come first.
_NAME = "rlhf_patches_autoload"
_LINE = (
    "import sys; exec(\"try:\\n from rlhf_patches.site_hook import install; install('1', {watch!r})\\n"
    "except Exception as e:\\n sys.stderr.write('[rlhf_patches] NOT ACTIVE, although autoload is on: %s: %s\\\\n'"
    ' % (type(e).__name__, e))")\n'
)


class AutoloadError(RuntimeError):
    """The environment cannot be switched; the message says what to do instead."""


@dataclass(frozen=True)
class Autoload:
    """How the hook stands in this environment."""

    switched_on: bool
    file: Path
    variable: str | None

    def __str__(self) -> str:
        state = "on" if self.switched_on else "off"
        lines = [
            f"autoload is {state} for this environment ({self.file}{'' if self.switched_on else ' does not exist'})"
        ]
        if self.variable is not None:
            lines.append(f"RLHF_PATCHES_AUTOLOAD={self.variable} is set and decides for this process's children")
        return "\n".join(lines)


def status() -> Autoload:
    """Whether `on` was called for this environment."""
    file = _folder() / f"{_NAME}.pth"
    return Autoload(file.exists(), file, os.environ.get(settings.PREFIX + "AUTOLOAD"))


def on() -> Autoload:
    """Patch every process of this environment from now on; RLHF_PATCHES_AUTOLOAD=0 still turns it off.

    Raises:
        AutoloadError: site-packages cannot be written.
    """
    file = _folder() / f"{_NAME}.pth"
    try:
        _write(file, _LINE.format(watch=watch_list(plugins.load()[0])))
        if sys.version_info >= (3, 15):  # PEP 829: where a .start file exists, import lines of the .pth are ignored
            _write(file.with_suffix(".start"), "rlhf_patches.site_hook:install_always\n")
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
    file = _folder() / f"{_NAME}.pth"
    try:
        for name in (file, file.with_suffix(".start")):
            name.unlink(missing_ok=True)
    except OSError as error:
        raise AutoloadError(
            f"cannot remove {file}: {error.strerror}. Run it as the owner of the environment"
        ) from error
    return status()


def hook_file() -> Path | None:
    """The hook of this environment, `on`'s before the wheel's; None in an editable install without `on`."""
    # Where `on` writes, or beside the package (a wheel, also one in the user's own site-packages).
    for folder in dict.fromkeys((_folder(), Path(__file__).resolve().parent.parent)):
        for name in (_NAME, "rlhf_patches"):
            if (folder / f"{name}.pth").exists():
                return folder / f"{name}.pth"
    return None


def watch_list(registered: Iterable[Registered]) -> tuple[str, ...]:
    """Top-level modules that installed plugins patch and the site hook does not know of."""
    tops = {module.partition(".")[0] for item in registered for module in item.patch.modules}
    return tuple(sorted(top for top in tops - set(site_hook.WATCHED) if settings.watchable(top)))


def _write(file: Path, text: str) -> None:
    # Replaced in one step: another interpreter may be starting.
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(sysconfig.get_path("purelib"))
