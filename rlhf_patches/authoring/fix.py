"""Convert an upstream fix, a unified diff, to rewrites, and list the parts that cannot be converted."""

from __future__ import annotations

import ast
import email.parser
import email.policy
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..definitions.changes import Rewrite
from ..guards import sources
from ..guards.places import FunctionNode, NotFound, Source, Unreadable
from . import draft
from .draft import Inexpressible
from .upstream import Upstream

if TYPE_CHECKING:
    from unidiff.patch import PatchedFile

_INSTEAD = "Wrap or Replace the functions"
_USES = "a Rewrite's `uses` brings what its replacement needs"
LARGEST = 8 * 2**20
"""Bytes of a diff."""
_MOST_HUNKS, _MOST_LINES = 200, 1000
"""The most lines of one file that are drafted: a fix has some tens, and drafting takes quadratic time."""
_NOT_OF_THE_PACKAGE = {"test", "tests", "testing", "doc", "docs", "examples", "benchmarks", ".github"}


class FixError(Exception):
    """The diff cannot be read; the message has the reason."""


@dataclass
class Hunk:
    """A hunk of a fix.

    Attributes:
        label: the file and lines, as in the diff.
        drafted: the functions whose change is drafted.
        open: parts that are not drafted, each with the reason and an alternative.
        notes: parts that need no change.
    """

    label: str
    drafted: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Fix(NamedTuple):
    """The draft of a fix.

    Attributes:
        subject: the subject of the commit message, if the diff has one.
        rewrites: by target; none for a function that is drafted only in part.
        nodes: the functions, by target.
        modules: the modules of its files.
        hunks: the result for each hunk.
        skipped: files that are not code of a package, each with the reason.
    """

    subject: str
    rewrites: dict[str, tuple[Rewrite, ...]]
    nodes: dict[str, FunctionNode]
    modules: list[Source]
    hunks: list[Hunk]
    skipped: list[str]


def check_it_can_be_read() -> None:
    """Check that unidiff is installed, before fetching a release or waiting for standard input.

    Raises:
        FixError: unidiff is not installed.
    """
    try:
        import unidiff.patch  # noqa: F401
    except ImportError as error:
        raise FixError(
            "--from-diff needs unidiff, which reads diffs (the extra `author`) and is not installed here: "
            "python -m pip install unidiff"
        ) from error


def read(text: str, upstream: Upstream) -> Fix:
    """Draft rewrites for a unified diff: git format-patch, git diff, GitHub's .diff.

    Args:
        text: the diff.
        upstream: the code to repair.

    Raises:
        FixError: the text is not a unified diff.
        UpstreamError: a module cannot be read.
    """
    fix = Fix(_subject(text), {}, {}, [], [], [])
    files = _parsed(text)
    if not files:
        raise FixError("the input has no hunk: expected a unified diff by `git format-patch` or `git diff`")
    for file in files:
        why = _skipped(file)
        if why:
            fix.skipped.append(f"{file.path}: {why}")
            continue
        source = _module(file.path, upstream)
        if source is None:
            fix.skipped.append(f"{file.path}: there is no such module {upstream.where}")
        else:
            fix.modules.append(source)
            _File(source, fix).read(file)
    return fix


def _parsed(text: str) -> list[Any]:
    from unidiff.errors import UnidiffParseError
    from unidiff.patch import PatchSet

    try:
        return list(PatchSet(text))
    except UnidiffParseError as error:
        raise FixError(f"the input is not a valid unified diff: {error}") from error


def _subject(text: str) -> str:
    head = text.partition("\ndiff ")[0].partition("\n---")[0]
    if not head.startswith("From "):
        return ""
    subject = email.parser.HeaderParser(policy=email.policy.default).parsestr(head.partition("\n")[2])["Subject"] or ""
    subject = " ".join(str(subject).split())
    return subject.partition("] ")[2] if subject.startswith("[PATCH") else subject


def _skipped(file: PatchedFile) -> str:
    folders, name = posixpath.split(file.path)
    if not name.endswith(".py"):
        return "not Python"
    if set(folders.split("/")) & _NOT_OF_THE_PACKAGE or name.startswith("test_") or name == "conftest.py":
        return "tests, documentation or examples"
    if file.is_added_file:
        return "a new module: put the parts that the fix needs into your package, and name them in `uses`"
    if file.is_removed_file:
        return "removed, which needs no patch"
    if not len(file):
        return "no hunk: renamed, its mode changed, or a merge (`git diff MERGE^ MERGE`)"
    return ""


def _module(path: str, upstream: Upstream) -> Source | None:
    """The module of a repository's file: the longest suffix of its path that is a module."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    for first in range(len(parts)):
        name = ".".join(parts[first:])
        # A suffix that begins within a package is not a module.
        if all(part.isidentifier() for part in parts[first:]) and (first == 0 or "." in name):
            try:
                return upstream.source(name)
            except NotFound:
                continue
    return None


class _Change(NamedTuple):
    """The lines that a hunk removes and adds, counted from 1."""

    hunk: Hunk
    removed: list[int]
    added: list[int]


class _File:
    """One file of a fix."""

    def __init__(self, source: Source, fix: Fix) -> None:
        self.source, self.fix = source, fix
        self.outcomes: dict[str, _Outcome] = {}

    def read(self, file: PatchedFile) -> None:
        """Draft the changes of its hunks."""
        lines = sum(map(len, file))
        if len(file) > _MOST_HUNKS or lines > _MOST_LINES:
            why = f"{len(file)} hunks of {lines} lines: expected {_MOST_HUNKS} of {_MOST_LINES} at most; {_INSTEAD}"
            self.fix.hunks.append(Hunk(file.path, open=[why]))
            return
        fixed, changes = self._applied(file)
        self.fix.hunks.extend(change.hunk for change in changes)
        if fixed is None:
            return
        new = self.source._replace(text=fixed)
        try:
            before, after = _Outline(sources.parse(self.source)), _Outline(sources.parse(new))
        except Unreadable as error:
            for change in changes:
                change.hunk.open.append(str(error))
            return
        for change in changes:
            removed, added = before.owners(self.source.text, change.removed), after.owners(fixed, change.added)
            for owner in dict.fromkeys([*removed, *added]):
                self._record(change.hunk, owner, before, after, new)

    def _applied(self, file: PatchedFile) -> tuple[str | None, list[_Change]]:
        """The text with all hunks applied; None if one does not fit."""
        lines = self.source.text.split("\n")
        result, at, changes, fits = [], 0, [], True
        for each in file:
            label = (
                f"{file.path} @@ -{each.source_start},{each.source_length} +{each.target_start},{each.target_length} @@"
            )
            change = _Change(Hunk(label), [], [])
            changes.append(change)
            old = [_text(line) for line in each if line.is_context or line.is_removed]
            start = _place(lines, old, each.source_start - 1, at)
            if start is None:
                fits = False
                new = [_text(line) for line in each if line.is_context or line.is_added]
                there = new and _place(lines, new, each.source_start - 1, 0) is not None
                change.hunk.open.append(
                    "the code already has this change" if there else f"its lines do not match {self.source.filename}"
                )
                continue
            result += lines[at:start]
            at = start
            for line in each:
                if line.is_added:
                    result.append(_text(line))
                    change.added.append(len(result))
                elif line.is_removed:
                    at += 1
                    change.removed.append(at)
                elif line.is_context:
                    result.append(lines[at])
                    at += 1
        if not fits:
            for change in changes:
                change.hunk.open = change.hunk.open or ["another hunk of this file does not fit, so none is drafted"]
            return None, changes
        return "\n".join(result + lines[at:]), changes

    def _record(self, hunk: Hunk, owner: _Owner, before: _Outline, after: _Outline, new: Source) -> None:
        """Record the result for a hunk's lines in one function, or outside of functions."""
        if not owner.is_function:
            hunk.open.append(f"{self.source.module}: {owner.what}")
            return
        target = f"{self.source.module}:{owner.what}"
        if owner.what not in after.functions:
            hunk.notes.append(f"{target} is removed, which needs no patch")
        elif owner.what not in before.functions:
            hunk.open.append(f"{target} is new: put it into your package; {_USES}")
        else:
            outcome = self._drafted(target, owner.what, new)
            getattr(hunk, outcome.kind).append(outcome.text)

    def _drafted(self, target: str, qualname: str, new: Source) -> _Outcome:
        if target not in self.outcomes:
            try:
                drafted = draft.rewrites(target, self.source, new)
            except (Inexpressible, NotFound) as error:
                self.outcomes[target] = _Outcome("open", f"{target}: {error}")
            else:
                if drafted:
                    self.fix.rewrites[target] = drafted
                    self.fix.nodes[target] = sources.find_function(self.source, qualname)
                    self.outcomes[target] = _Outcome("drafted", target)
                else:
                    note = f"{target}: only comments, docstring or annotations, which need no patch"
                    self.outcomes[target] = _Outcome("notes", note)
        return self.outcomes[target]


class _Outcome(NamedTuple):
    kind: str
    text: str


def _text(line: Any) -> str:
    return str(line.value).rstrip("\r\n")


def _place(lines: list[str], old: list[str], stated: int, at: int) -> int | None:
    """The position of a hunk's lines at or after ``at``, nearest to the stated one."""
    if not old:
        return max(stated + 1, at)
    places = [i for i in range(at, len(lines) - len(old) + 1) if lines[i : i + len(old)] == old]
    return min(places, key=lambda place: abs(place - stated), default=None)


class _Owner(NamedTuple):
    what: str
    is_function: bool = False


class _Outline:
    """The owner of each line of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self._spans: list[tuple[int, int, _Owner]] = []
        self.functions: set[str] = set()
        for node, owner in _owned(tree, ""):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            self._spans.append((first, node.end_lineno or first, owner))
            if owner.is_function:
                self.functions.add(owner.what)

    def owners(self, text: str, numbers: list[int]) -> Iterator[_Owner]:
        """The innermost owner of each line; blank lines and comments outside functions have none."""
        lines = text.split("\n")
        for number in numbers:
            around = [(end - start, owner) for start, end, owner in self._spans if start <= number <= end]
            owner = min(around, key=lambda item: item[0], default=(0, _Owner("")))[1]
            if owner.is_function or lines[number - 1].partition("#")[0].strip():
                yield owner


def _owned(scope: ast.AST, prefix: str) -> Iterator[tuple[ast.stmt, _Owner]]:
    """Functions, and statements outside of functions, including those of classes."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, _Owner(prefix + node.name, True)
        elif isinstance(node, ast.ClassDef):
            inner = _owned(node, f"{prefix}{node.name}.")
            reason = f"code of the class {prefix}{node.name}, which exists before it can be patched"
            reason += ": Wrap or Replace its methods"
            yield node, _Owner(reason)
            yield from ((each, owner if owner.is_function else _Owner(reason)) for each, owner in inner)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, _Owner(f"an import: {_USES}")
        elif isinstance(node, ast.stmt):
            reason = "code that runs once, at import, before it can be patched: Wrap or Replace its users"
            yield node, _Owner(reason)
            yield from _owned(node, prefix)
