"""``NAME==VERSION`` as a wheel in a cache, fetched by pip, which knows the user's index, proxy and certificates."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ..guards import stores

# A wheel is read, not installed: one for another Python, or for another kind of machine, tells as much.
_PYTHONS = ("3.12", "3.11", "3.10", "3.9", "3.8", "3.13", "3.14")
_PLATFORMS = tuple(
    f"{platform}_{machine}"
    for machine in ("x86_64", "aarch64")
    for platform in ("linux", "manylinux2014", "manylinux_2_24", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34")
)
_MOST_VERSIONS = 10  # named where one does not exist

# `python -m pip` would import what lies in the working directory, perhaps a checkout that the user does not trust yet.
_RUN_PIP = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; sys.argv[0] = 'pip'; import runpy; "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


class DownloadError(RuntimeError):
    """A release could not be fetched; the message says what pip said, and what to do."""


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/rlhf-patches``, as the XDG specification has it."""
    return Path(stores.folder() or Path.home() / ".cache" / "rlhf-patches")


def found(text: str, cache: Path | None = None) -> str:
    """The path of a release: ``text`` itself, or that of the wheel that it names (`fetch`).

    What exists on disk, or looks like a path, is never looked for on an index.

    Raises:
        DownloadError: as `fetch`.
    """
    is_path = os.path.lexists(text) or os.sep in text or text.endswith((".whl", ".zip", ".tar.gz", ".tgz"))
    return text if is_path else str(fetch(text, cache))


def fetch(text: str, cache: Path | None = None) -> Path:
    """The wheel of ``NAME==VERSION``, from ``cache`` if it is there already.

    Only wheels: to unpack an sdist, pip runs code from it.

    Args:
        text: what to fetch.
        cache: a folder; None means `default_cache`, or one of this process where that cannot be written.

    Raises:
        DownloadError: the text is not ``NAME==VERSION``, or pip found no wheel.
    """
    name, version = parse(text)
    folder = place(cache or default_cache(), name, version)
    for wheel in sorted(folder.glob("*.whl")):
        return wheel
    try:
        return put(folder, lambda incoming: _by_pip(name, version, str(incoming)))
    except OSError as error:
        if cache is None:
            temporary = tempfile.mkdtemp(prefix="rlhf-patches-")
            atexit.register(shutil.rmtree, temporary, ignore_errors=True)
            return fetch(text, Path(temporary))
        raise DownloadError(f"the cache {cache} cannot be used: {error}; choose another with --cache") from error


def place(cache: Path, name: str, version: str) -> Path:
    """The folder of a cache that has the files of a release."""
    return cache / "wheels" / name / version


def put(folder: Path, get: Callable[[Path], Path]) -> Path:
    """Have ``get`` make a file in the folder that it is given, and move it into ``folder``. Returns where it is then.

    A run that is interrupted leaves nothing: no half a file that looks like one, and no folder that was not there.
    """
    new = [made for made in (folder, *folder.parents) if not made.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside its place, then renamed.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".incoming-") as incoming:
            file = get(Path(incoming))
            os.replace(file, folder / file.name)
            return folder / file.name
    except BaseException:
        for made in new:
            with contextlib.suppress(OSError):  # another process may have put something there
                made.rmdir()
        raise


def _by_pip(name: str, version: str, incoming: str) -> Path:
    said = _pip(f"{name}=={version}", incoming)
    if not any(Path(incoming).iterdir()) and _is_missing(said):
        for python in _PYTHONS:
            _pip(f"{name}=={version}", incoming, "--python-version", python, *_each("--platform", _PLATFORMS))
            if any(Path(incoming).iterdir()):
                break
    wheels = sorted(Path(incoming).glob("*.whl"))
    if not wheels and "Retrying" in said:
        why = next(line for line in said.splitlines() if "Retrying" in line).partition(" after ")[2]
        raise DownloadError(f"pip could not reach an index for {name}=={version}. pip said: {why}")
    if not wheels:
        raise DownloadError(
            f"pip found no wheel of {name}=={version}. If there is an sdist, download it from the index and give "
            f"its path (pip would run code from it just to fetch it). pip said: {_last_error(said)}"
        )
    return wheels[0]


def parse(text: str) -> tuple[str, str]:
    """Name (normalised) and version of ``NAME==VERSION``.

    Raises:
        DownloadError: it is anything else.
    """
    problem = f"{text!r} is no existing path and no NAME==VERSION, such as 'verl==0.9.1'"
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise DownloadError(problem) from error
    pins = [pin for pin in requirement.specifier if pin.operator == "==" and not pin.version.endswith(".*")]
    if len(requirement.specifier) != 1 or not pins or requirement.extras or requirement.marker or requirement.url:
        raise DownloadError(problem)
    return canonicalize_name(requirement.name), pins[0].version


def _each(option: str, values: tuple[str, ...]) -> list[str]:
    return [part for value in values for part in (option, value)]


def _pip(requirement: str, folder: str, *options: str) -> str:
    """Download one wheel without dependencies; returns what pip wrote to stderr."""
    arguments = ["download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"]
    arguments += ["--disable-pip-version-check", "--dest", folder, *options, "--", requirement]
    for pip, where in _pips(folder):
        done = subprocess.run(
            [*pip, *arguments], cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        if "No module named pip" not in done.stderr:
            break
    else:
        raise DownloadError(
            f"{sys.executable} has no pip to fetch {requirement} with, and there is no uv: install either, or give "
            "the wheel's path"
        )
    if done.returncode:
        for half in Path(folder).iterdir():
            half.unlink()
    return done.stderr


def _pips(folder: str) -> Iterator[tuple[list[str], str | None]]:
    """What may run pip, and in which folder: this interpreter, the one it was made from, or uv, which fetches it."""
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", None) or sys.executable)):
        yield [python, "-c", _RUN_PIP], None
    uv = shutil.which("uv")
    if uv:  # not in the working directory, whose configuration it would read
        yield [uv, "tool", "run", "--quiet", "pip"], folder


def _is_missing(said: str) -> bool:
    """Whether the index answered but has no wheel for this Python and machine."""
    return "No matching distribution" in said and "Retrying" not in said


def _last_error(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith("ERROR: ")]
    _, listed, versions = said.partition("(from versions: ")
    there = versions.partition(")")[0].split(", ")
    more = f". The newest wheels are {', '.join(there[-_MOST_VERSIONS:])}" if listed and there != ["none"] else ""
    return (lines[-1].removeprefix("ERROR: ") if lines else said.strip()[-200:] or "nothing") + more
