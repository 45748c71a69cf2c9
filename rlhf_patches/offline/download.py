"""Fetch ``NAME==VERSION`` into a cache: a wheel by pip, which knows the user's index, proxy and certificates.

If there is only an sdist, `index` fetches it, because pip would run code from it.
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

# Wheels are read, not installed: a wheel for another Python or machine serves as well.
_PYTHONS = ("3.12", "3.11", "3.10", "3.9", "3.8", "3.13", "3.14")
_PLATFORMS = tuple(
    f"{platform}_{machine}"
    for machine in ("x86_64", "aarch64")
    for platform in ("linux", "manylinux2014", "manylinux_2_24", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34")
)
_MOST_VERSIONS = 10  # listed if the requested one does not exist
_SECONDS = 3600
"""Limit for a wheel: pip itself only limits the time without data."""

# `python -m pip` would import modules from the working directory, which may be an untrusted checkout.
_RUN_PIP = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; sys.argv[0] = 'pip'; import runpy; "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


class DownloadError(RuntimeError):
    """A release could not be fetched; the message has pip's error and what to do."""


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/rlhf-patches``, by the XDG specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "rlhf-patches"


def path_of(text: str, cache: Path | None = None) -> str:
    """The path of a release: ``text`` itself, or the fetched file (`fetch`).

    An existing file, or text that looks like a path, is never looked up on an index.

    Raises:
        DownloadError: see `fetch`.
    """
    is_path = os.path.lexists(text) or os.sep in text or text.endswith((".whl", ".zip", ".tar.gz", ".tgz"))
    return text if is_path else str(fetch(text, cache))


def fetch(text: str, cache: Path | None = None) -> Path:
    """The wheel of ``NAME==VERSION``, or its sdist if it has no wheel, from ``cache`` if present.

    Args:
        text: the requirement.
        cache: a folder; None means `default_cache`, or a temporary folder if that cannot be written.

    Raises:
        DownloadError: the text is not ``NAME==VERSION``, or the release has neither wheel nor sdist.
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
    """The folder of a release's files in a cache."""
    return cache / "wheels" / name / version


def _get(name: str, version: str, incoming: Path) -> Path:
    """The wheel, or the sdist if there is no wheel."""
    stderr = _pip(f"{name}=={version}", str(incoming))
    source, release, why = None, None, "pip is configured without an index"
    if not any(incoming.iterdir()) and _is_missing(stderr):
        try:
            url = _index_of_pip(str(incoming))
            source = Index(url) if url else None
            release = source.release(name, version) if source else None
            why = f"{source.label} has none, too" if source else why
        except IndexProblem as error:
            why = str(error)
        if release is None or release.file is None or not release.file.is_sdist:
            for python in _PYTHONS:
                _pip(f"{name}=={version}", str(incoming), "--python-version", python, *_each("--platform", _PLATFORMS))
                if any(incoming.iterdir()):
                    break
    for wheel in sorted(incoming.glob("*.whl")):
        return wheel
    if "Retrying" in stderr:
        why = next(line for line in stderr.splitlines() if "Retrying" in line).partition(" after ")[2]
        raise DownloadError(f"pip could not reach an index for {name}=={version}: {why}")
    if source is not None and release is not None and release.sdist is not None:
        try:
            return source.fetch(release.sdist, incoming)
        except IndexProblem as error:
            raise DownloadError(str(error)) from error
    raise DownloadError(
        f"there is neither a wheel nor an sdist of {name}=={version} ({why}). pip's error: {_last_error(stderr)}. "
        "If one exists elsewhere, download it and give its path"
    )


def parse(text: str) -> tuple[str, str]:
    """Name (normalized) and version of ``NAME==VERSION``.

    Raises:
        DownloadError: the text is something else.
    """
    problem = f"{text!r:.300} is neither an existing path nor NAME==VERSION, such as 'verl==0.9.1'"
    try:
        requirement = Requirement(text)
    except (InvalidRequirement, RecursionError) as error:
        raise DownloadError(problem) from error
    pins = [pin for pin in requirement.specifier if pin.operator == "==" and not pin.version.endswith(".*")]
    if (
        len(text) > 200  # name and version become folder names
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
            f"{sys.executable} has no pip to fetch {requirement}, and uv is not installed: install either, or give "
            "the wheel's path"
        )
    if done.returncode:
        for half in Path(folder).iterdir():
            half.unlink()
    return done.stderr


def _index_of_pip(folder: str) -> str | None:
    """The index that pip is configured with; None if it uses none."""
    done = _run_pip(["config", "list"], folder)
    configured = dict(line.partition("=")[::2] for line in (done.stdout if done else "").splitlines())

    def value(name: str) -> str:
        # The environment takes precedence, then the command's configuration, then the global one.
        keys = [f"{of}.{name}" for of in (":env:", "download", "global")]
        literal = next((configured[key] for key in keys if key in configured), "''")
        try:
            return str(ast.literal_eval(literal))
        except (SyntaxError, ValueError):
            return literal

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
            raise DownloadError(f"pip {arguments[0]} did not finish within {_SECONDS} seconds") from error
        if "No module named pip" not in done.stderr:
            return done
    return None


def _pips(folder: str) -> Iterator[tuple[list[str], str | None]]:
    """Commands that may run pip, and their folder: this interpreter, its base interpreter, or uv, which fetches pip."""
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", None) or sys.executable)):
        yield [python, "-c", _RUN_PIP], None
    uv = shutil.which("uv")
    if uv:  # not in the working directory: uv would read its configuration
        yield [uv, "tool", "run", "--quiet", "pip"], folder


def _is_missing(stderr: str) -> bool:
    """Whether the index responded but has no wheel for this Python and machine."""
    return "No matching distribution" in stderr and "Retrying" not in stderr


def _last_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR: ")]
    _, listed, versions = stderr.partition("(from versions: ")
    there = versions.partition(")")[0].split(", ")
    more = f". The newest wheels are {', '.join(there[-_MOST_VERSIONS:])}" if listed and there != ["none"] else ""
    return (lines[-1].removeprefix("ERROR: ") if lines else stderr.strip()[-200:] or "nothing") + more
