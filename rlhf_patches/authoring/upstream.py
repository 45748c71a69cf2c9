"""The code that a patch is written for: the installed one, or one release; read as text, never imported."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from ..definitions.guard import Guard
from ..guards import locating, sources, versions
from ..guards.places import FunctionNode, NotFound, Source, Unreadable
from ..guards.versions import Verdict
from ..offline import archive, download, members
from ..offline.archive import Release


class UpstreamError(Exception):
    """The release, module or function does not exist; the message names it."""


class Owner(NamedTuple):
    """The distribution of a file; its version is None if the metadata has no PEP 440 version."""

    distribution: str
    version: str | None

    def __str__(self) -> str:
        return f"{self.distribution} {self.version or '(no version)'}"


class Upstream(NamedTuple):
    """The installed code (``release`` is None), or one release."""

    release: Release | None

    @property
    def where(self) -> str:
        """The place, for messages."""
        return "installed here" if self.release is None else f"in {self.release.label}"

    def source(self, module: str) -> Source:
        """The text of a module.

        Raises:
            NotFound: the module does not exist.
            UpstreamError: the module exists and cannot be read.
        """
        try:
            return locating.read_module(module) if self.release is None else self.release.source(module)
        except (Unreadable, members.ReleaseError) as error:
            raise UpstreamError(str(error)) from error

    def function(self, target: str) -> tuple[Source, FunctionNode]:
        """The function ``MODULE:FUNC``, and its module.

        Raises:
            UpstreamError: the function does not exist, or the name is not a function's.
        """
        module, _, qualname = target.partition(":")
        if not module or not qualname:
            raise UpstreamError(f"{target!r} is not a function: expected MODULE:FUNC, such as pkg.mod:Class.method")
        try:
            source = self.source(module)
            if qualname not in sources.functions_of(source):
                raise NotFound(f"{qualname} is not defined in {module}{self._instead(source, qualname)}")
            return source, sources.find_function(source, qualname)
        except (NotFound, Unreadable) as error:
            raise UpstreamError(str(error)) from error

    def _instead(self, source: Source, qualname: str) -> str:
        """A suggestion for a function that the module does not define; empty if there is none."""
        home = self._home(source, qualname, set())
        if home is not None:
            return f", which imports it: it is defined in {home}"
        owner = qualname.rpartition(".")[0]
        for node in ast.walk(sources.parse(source)):
            if isinstance(node, ast.ClassDef) and owner.rpartition(".")[2] == node.name and node.bases:
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                return f": if {owner} inherits it (from {bases}), name the class that defines it"
        near = difflib.get_close_matches(qualname, sources.functions_of(source), n=3)
        return f"; similar names: {', '.join(near)}" if near else ""

    def _home(self, source: Source, qualname: str, seen: set[str]) -> str | None:
        """The ``MODULE:FUNC`` that ``qualname`` is by the module's imports, including those for type checkers."""
        if qualname in sources.functions_of(source):
            return f"{source.module}:{qualname}"
        seen.add(source.module)
        first, dot, rest = qualname.partition(".")
        is_package = os.path.basename(source.filename) == "__init__.py"
        package = source.module if is_package else source.module.rpartition(".")[0]
        for node in ast.walk(sources.parse(source)):
            if not isinstance(node, ast.ImportFrom):
                continue
            for name in [name for name in node.names if first == (name.asname or name.name)]:
                with contextlib.suppress(NotFound, Unreadable, UpstreamError, ImportError):
                    module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                    home = None if module in seen else self._home(self.source(module), name.name + dot + rest, seen)
                    if home is not None:
                        return home
        return None

    def owner(self, source: Source) -> Owner | None:
        """The distribution whose metadata list a module's file; None if none or several do."""
        if self.release is None:
            return _owner_of(source.filename)
        if os.path.isdir(self.release.label):
            owner = _owner_of(source.filename, [self.release.label])
            if owner is not None:
                return owner
        return _owner(*self.release.claims[0]) if len(self.release.claims) == 1 else None


def open_upstream(release: str | None) -> Upstream:
    """The installed code for None, else a wheel, an sdist, a directory, or ``NAME==VERSION``.

    Raises:
        UpstreamError: the release does not exist.
    """
    try:
        return Upstream(None if release is None else archive.open_release(download.path_of(release)))
    except (members.ReleaseError, download.DownloadError) as error:
        raise UpstreamError(str(error)) from error


def _owner(name: str, version: str | None) -> Owner | None:
    """The owner by its metadata, if valid for a generated file; None if the name is not valid."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        return None
    try:
        return Owner(name, str(Version(version)) if version else None)
    except ValueError:  # InvalidVersion, or more digits than Python converts
        return Owner(name, None)


def _owner_of(file: str, path: Sequence[str] | None = None) -> Owner | None:
    copies = list(_copies(path))
    owners = {owner for owner, _, listed in copies if listed(file)}
    if not owners:  # an editable install lists the files that point to its folder
        owners = {owner for owner, root, _ in copies if not _is_in(file, root) and _is_editable(owner, file)}
    return owners.pop() if len(owners) == 1 else None


def _copies(path: Sequence[str] | None) -> Iterable[tuple[Owner, str, _Lists]]:
    for copy in importlib.metadata.distributions(path=[entry or os.curdir for entry in path or sys.path]):
        try:
            name, version = copy.metadata["Name"], copy.metadata["Version"]
            root = os.path.realpath(str(copy.locate_file("")))
            listed = copy.read_text("RECORD") or copy.read_text("installed-files.txt") or ""
        except Exception:  # a damaged folder
            continue
        owner = _owner(name or "", version)
        if owner:
            yield owner, root, _Lists(root, listed)


class _Lists(NamedTuple):
    root: str
    record: str

    def __call__(self, file: str) -> bool:
        real = os.path.realpath(file)
        if not _is_in(real, self.root):
            return False
        # Searched as text: torch's list has 15,000 lines, and there are hundreds of distributions.
        return f"\n{Path(real).relative_to(self.root).as_posix()}," in f"\n{self.record}"


def _is_in(file: str, root: str) -> bool:
    return os.path.realpath(file).startswith(os.path.join(root, ""))


def _is_editable(owner: Owner, file: str) -> bool:
    return versions.judge_file(Guard(owner.distribution, ""), file).verdict is Verdict.AFFECTED
