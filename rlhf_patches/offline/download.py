"""``NAME==VERSION`` in a cache: a wheel, fetched by pip, which knows the user's index, proxy and certificates.

Where there is only an sdist, pip would run code from it just to fetch it, so `index` does that.
"""

from __future__ import annotations

import ast
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from . import index
from .bounded_http import IndexProblem
from .index import Index

# A wheel is read, not installed: one for another Python, or for another kind of machine, tells as much.
_PYTHONS = ("3.12", "3.11", "3.10", "3.9", "3.8", "3.13", "3.14")
_PLATFORMS = tuple(
    f"{platform}_{machine}"
    for machine in ("x86_64", "aarch64")
    for platform in ("linux", "manylinux2014", "manylinux_2_24", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34")
)
_MOST_VERSIONS = 10  # named where one does not exist
_SECONDS = 3600
"""For a wheel, however slowly it comes: pip itself has a limit for silence only."""

# `python -m pip` would import what lies in the working directory, perhaps a checkout that the user does not trust yet.
_RUN_PIP = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; sys.argv[0] = 'pip'; import runpy; "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


class DownloadError(RuntimeError):
    """A release could not be fetched; the message says what pip said, and what to do."""


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/rlhf-patches``, as the XDG specification has it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "rlhf-patches"


def found(text: str, cache: Path | None = None) -> str:
    """The path of a release: ``text`` itself, or that of what it names (`fetch`).

    What exists on disk, or looks like a path, is never looked for on an index.

    Raises:
        DownloadError: as `fetch`.
    """
    is_path = os.path.lexists(text) or os.sep in text or text.endswith((".whl", ".zip", ".tar.gz", ".tgz"))
    return text if is_path else str(fetch(text, cache))


def fetch(text: str, cache: Path | None = None) -> Path:
    """The wheel of ``NAME==VERSION``, or its sdist where there is no wheel, from ``cache`` if it is there already.

    Args:
        text: what to fetch.
        cache: a folder; None means `default_cache`, or one of this process where that cannot be written.

    Raises:
        DownloadError: the text is not ``NAME==VERSION``, or there is neither.
    """
    name, version = parse(text)
    folder = place(cache or default_cache(), name, version)
    for kind in ("*.whl", "*.tar.gz", "*.tgz", "*.zip"):
        for file in sorted(folder.glob(kind)):
            return file
    try:
        return index.put(folder, lambda incoming: _get(name, version, incoming))
    except OSError as error:
        if cache is None:
            temporary = tempfile.mkdtemp(prefix="rlhf-patches-")
            atexit.register(shutil.rmtree, temporary, ignore_errors=True)
            return fetch(text, Path(temporary))
        raise DownloadError(f"the cache {cache} cannot be used: {error}; choose another with --cache") from error


def place(cache: Path, name: str, version: str) -> Path:
    """The folder of a cache that has the files of a release."""
    return cache / "wheels" / name / version


def _get(name: str, version: str, incoming: Path) -> Path:
    """The wheel, or the sdist where there is no wheel."""
    said = _pip(f"{name}=={version}", str(incoming))
    source, release, why = None, None, "pip is told to use no index"
    if not any(incoming.iterdir()) and _is_missing(said):
        try:
            url = _index_of_pip(str(incoming))
            source = Index(url) if url else None
            release = source.release(name, version) if source else None
            why = f"{source.label} was asked, too" if source else why
        except IndexProblem as error:
            why = str(error)
        if release is None or release.file is None or not release.file.is_sdist:
            for python in _PYTHONS:
                _pip(f"{name}=={version}", str(incoming), "--python-version", python, *_each("--platform", _PLATFORMS))
                if any(incoming.iterdir()):
                    break
    for wheel in sorted(incoming.glob("*.whl")):
        return wheel
    if "Retrying" in said:
        why = next(line for line in said.splitlines() if "Retrying" in line).partition(" after ")[2]
        raise DownloadError(f"pip could not reach an index for {name}=={version}. pip said: {why}")
    if source is not None and release is not None and release.sdist is not None:
        try:
            return source.fetch(release.sdist, incoming)
        except IndexProblem as error:
            raise DownloadError(str(error)) from error
    raise DownloadError(
        f"there is neither a wheel nor an sdist of {name}=={version} ({why}). pip said: {_last_error(said)}. If there "
        "is one elsewhere, download it and give its path"
    )


def parse(text: str) -> tuple[str, str]:
    """Name (normalised) and version of ``NAME==VERSION``.

    Raises:
        DownloadError: it is anything else.
    """
    problem = f"{text!r:.300} is no existing path and no NAME==VERSION, such as 'verl==0.9.1'"
    try:
        requirement = Requirement(text)
    except (InvalidRequirement, RecursionError) as error:
        raise DownloadError(problem) from error
    pins = [pin for pin in requirement.specifier if pin.operator == "==" and not pin.version.endswith(".*")]
    if (
        len(text) > 200  # name and version become those of folders
        or len(requirement.specifier) != 1
        or not pins
        or requirement.extras
        or requirement.marker
        or requirement.url
    ):
        raise DownloadError(problem)
    return canonicalize_name(requirement.name), pins[0].version


def _each(option: str, values: tuple[str, ...]) -> list[str]:
    return [part for value in values for part in (option, value)]


def _pip(requirement: str, folder: str, *options: str) -> str:
    """Download one wheel without dependencies; returns what pip wrote to stderr."""
    arguments = ["download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"]
    arguments += ["--disable-pip-version-check", "--dest", folder, *options, "--", requirement]
    done = _run_pip(arguments, folder)
    if done is None:
        raise DownloadError(
            f"{sys.executable} has no pip to fetch {requirement} with, and there is no uv: install either, or give "
            "the wheel's path"
        )
    if done.returncode:
        for half in Path(folder).iterdir():
            half.unlink()
    return done.stderr


def _index_of_pip(folder: str) -> str | None:
    """The index that pip is configured with; None where it is to use none."""
    done = _run_pip(["config", "list"], folder)
    said = dict(line.partition("=")[::2] for line in (done.stdout if done else "").splitlines())

    def value(name: str) -> str:
        # Above all the environment, then what is for the command, then what is for all.
        found = next((said[f"{of}.{name}"] for of in (":env:", "download", "global") if f"{of}.{name}" in said), "''")
        try:
            return str(ast.literal_eval(found))
        except (SyntaxError, ValueError):
            return found

    if value("no-index").lower() in ("1", "true", "yes", "y", "on", "t"):
        return None
    return value("index-url") or index.PYPI


def _run_pip(arguments: Sequence[str], folder: str) -> subprocess.CompletedProcess[str] | None:
    for pip, where in _pips(folder):
        try:
            done = subprocess.run(
                [*pip, *arguments],
                cwd=where,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise DownloadError(f"pip {arguments[0]} has not come to an end within {_SECONDS} seconds") from error
        if "No module named pip" not in done.stderr:
            return done
    return None


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
