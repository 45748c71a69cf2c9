"""Draft rewrites that turn a function into its fixed version. Drafts are proven: the resulting syntax trees are equal.

The smallest differing nodes of the two trees become patterns and replacements. If such a pattern also matches
elsewhere, or a replacement takes more lines than the node has, the enclosing node is used.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..definitions.changes import Rewrite
from ..definitions.errors import DefinitionError
from ..guards import fingerprints, patterns, shapes, sources
from ..guards.edits import NoEffect, Undefined, Unrecognized, edited
from ..guards.places import FunctionNode, Source
from . import snippets

_MOST_LINES = 12
"""The most lines of a pattern: a larger one fits no second release."""
_INSTEAD = "Wrap or Replace the function"


class Inexpressible(Exception):
    """No rewrite can make the change; the message has the reason and an alternative."""


@dataclass(frozen=True, eq=False)
class _Pair:
    """A node of the old tree, its counterpart in the new tree, and the enclosing pair."""

    old: ast.AST
    new: ast.AST
    around: _Pair | None = None


@dataclass(frozen=True, eq=False)
class _Site:
    """A node and its replacement: one expression for an expression, any number of statements for a statement."""

    old: snippets.Located
    new: tuple[ast.AST, ...]
    around: _Pair | None


def rewrites(target: str, old: Source, new: Source) -> tuple[Rewrite, ...]:
    """The rewrites that turn the function ``target`` of ``old`` into that of ``new``; empty if they are equal.

    Docstrings, annotations and comments do not count.

    Raises:
        Inexpressible: there are no such rewrites, or none that could be proven.
        NotFound, Unreadable: the function is not in both.
    """
    qualname = target.partition(":")[2]
    before, after = sources.find_function(old, qualname), sources.find_function(new, qualname)
    if fingerprints.fingerprint_of(before) == fingerprints.fingerprint_of(after):
        return ()
    parameters = fingerprints.signature_of(after)
    if fingerprints.signature_of(before) != parameters:
        raise Inexpressible(f"its parameters become {parameters}, which a change of its code cannot do: {_INSTEAD}")
    if not _same(before.decorator_list, after.decorator_list):
        raise Inexpressible(f"its decorators change, but they run before it can be patched: {_INSTEAD}")
    draft = _Draft(target, old, new, before, after)
    sites = list(_differences(_Pair(before, after)))
    while True:
        try:
            drafted = draft.of(sites)
            draft.prove(drafted, sites)
            return draft.distinguished(drafted, sites)
        except _TooSmall as error:
            sites = _larger(sites, error)


class _TooSmall(Exception):
    """These sites cannot be written as rewrites; the enclosing nodes may be."""

    def __init__(self, sites: Sequence[_Site], why: str) -> None:
        super().__init__(why)
        self.sites = sites


def _larger(sites: Sequence[_Site], error: _TooSmall) -> list[_Site]:
    """The sites, with the enclosing nodes in place of those that were too small."""
    kept = [site for site in sites if site not in error.sites]
    for site in error.sites:
        pair = site.around
        while pair is not None and not isinstance(pair.old, (ast.stmt, ast.expr)):
            pair = pair.around
        if pair is None or pair.around is None:  # the function itself
            raise Inexpressible(f"{error}: {_INSTEAD}") from error
        assert isinstance(pair.old, (ast.stmt, ast.expr))
        kept.append(_Site(pair.old, (pair.new,), pair.around))
    within = {id(node): site for site in kept for node in ast.walk(site.old) if node is not site.old}
    outermost = {id(site.old): site for site in kept if id(site.old) not in within}
    return list(outermost.values())


@dataclass(frozen=True)
class _Draft:
    target: str
    old: Source
    new: Source
    before: FunctionNode
    after: FunctionNode

    def of(self, sites: Sequence[_Site]) -> tuple[Rewrite, ...]:
        """A rewrite for each site; equal sites share one."""
        groups: dict[tuple[str, str], list[_Site]] = {}
        for site in sites:
            groups.setdefault((_key([site.old]), _key(site.new)), []).append(site)
        drafted = [self._rewrite(group) for group in groups.values()]
        return tuple(rewrite for _, rewrite in sorted(drafted, key=lambda item: item[0]))

    def _rewrite(self, group: list[_Site]) -> tuple[int, Rewrite]:
        site = group[0]
        starts = {snippets.index(self.old.text, each.old) for each in group}
        pattern = self._pattern(group, starts)
        lines = min(snippets.height(each.old) for each in group)
        for replacement in snippets.replacements(self.new.text, site.old, site.new):
            if replacement.count("\n") < lines:
                return min(starts), Rewrite(self.target, pattern, replacement, matches=len(group))
        raise _TooSmall(
            group, f"the replacement of line {site.old.lineno} needs more lines, and edits must not move lines"
        )

    def _pattern(self, group: list[_Site], starts: set[int]) -> str:
        why, too_long = "is not a pattern by itself", 0
        for pattern in snippets.patterns_of(self.old.text, group[0].old):
            lines = pattern.count("\n") + 1
            if lines > _MOST_LINES:
                too_long = lines
                continue
            try:
                matches = patterns.matches(self.old, self.before, pattern)
            except DefinitionError:
                continue
            places = {match.range().start.index for match in matches}
            if places == starts and len(matches) == len(starts):
                return pattern
            if starts < places:
                why = f"occurs {len(matches)} times, of which the fix changes {len(starts)}"
        if too_long:
            raise Inexpressible(f"the smallest possible rewrite has {too_long} lines: {_INSTEAD}")
        raise _TooSmall(group, f"the code in line {group[0].old.lineno} {why}")

    def prove(self, drafted: Sequence[Rewrite], sites: Sequence[_Site]) -> None:
        """Check that the engine accepts the rewrites, and that their result is the fixed function."""
        try:
            recognized = [shapes.recognize(rewrite, self.old) for rewrite in drafted]
            shapes.check_compiles(recognized, lines=True)
            edits = shapes.combined([item.edits for item in recognized], self.target)
        except Undefined as error:
            raise Inexpressible(f"{error}: write a Rewrite whose `uses` brings it") from error
        except (Unrecognized, NoEffect) as error:
            raise _TooSmall(sites, str(error)) from error
        text = self.old._replace(text=edited(self.old.text, edits))
        made = sources.find_function(text, self.target.partition(":")[2])
        if fingerprints.fingerprint_of(made) != fingerprints.fingerprint_of(self.after):
            raise _TooSmall(sites, "the result of the rewrites differs from the fix")

    def distinguished(self, drafted: tuple[Rewrite, ...], sites: Sequence[_Site]) -> tuple[Rewrite, ...]:
        """The rewrites, changed so that at least one of them does not match the fixed code."""
        if not all(map(self._fits_the_fix, drafted)):
            return drafted
        for node in (node for site in sites for new in site.new for node in [new, *ast.walk(new)]):
            if not isinstance(node, (ast.stmt, ast.expr)):
                continue
            for pattern in snippets.patterns_of(self.new.text, node):
                first = replace(drafted[0], unless=(pattern,))
                try:
                    shapes.recognize(first, self.old)
                except (Unrecognized, DefinitionError):
                    continue
                if not self._fits_the_fix(first):
                    return (first, *drafted[1:])
        raise Inexpressible(f"no pattern distinguishes the fixed code: {_INSTEAD}, which use fingerprints")

    def _fits_the_fix(self, rewrite: Rewrite) -> bool:
        try:
            shapes.recognize(rewrite, self.new)
        except (Unrecognized, DefinitionError):
            return False
        return True


# ------------------------------------------------------------------------------------------ differences


def _differences(pair: _Pair) -> Iterator[_Site]:
    """The smallest differing nodes of a pair that differs."""
    old, new = pair.old, pair.new
    if type(old) is not type(new) or isinstance(old, (ast.JoinedStr, ast.Constant)):
        yield from _whole(pair)
        return
    inner: list[_Site] = []
    for name, value in ast.iter_fields(old):
        other = getattr(new, name, None)
        if name in fingerprints.LEFT_OUT or _same(value, other):
            continue
        if isinstance(value, ast.AST) and isinstance(other, ast.AST) and value._fields:
            inner += _differences(_Pair(value, other, pair))
        elif isinstance(value, list) and isinstance(other, list) and value and other:
            if isinstance(value[0], ast.stmt):
                inner += _in_block(_code(old, name, value), _code(new, name, other), pair)
            elif len(value) == len(other) and all(isinstance(item, ast.AST) for item in (*value, *other)):
                for one, two in zip(value, other, strict=True):
                    if not _same(one, two):
                        inner += _differences(_Pair(one, two, pair))
            else:
                yield from _whole(pair)
                return
        else:
            yield from _whole(pair)
            return
    outermost = {id(site.old): site for site in inner}
    yield from (_whole(pair) if id(old) in outermost else inner)


def _whole(pair: _Pair) -> Iterator[_Site]:
    """The pair, or the nearest enclosing pair that has a position in the text.

    A name or constant alone is not used if the enclosing expression is on one line: ``int`` matches any use of it.
    """
    while not isinstance(pair.old, (ast.stmt, ast.expr)):
        assert pair.around is not None
        pair = pair.around
    around = pair.around
    if (
        isinstance(pair.old, (ast.Name, ast.Constant))
        and around is not None
        and isinstance(around.old, ast.expr)
        and isinstance(around.new, ast.expr)
        and snippets.height(around.old) == snippets.height(around.new) == 1
    ):
        yield _Site(around.old, (around.new,), around.around)
        return
    yield _Site(pair.old, (pair.new,), pair.around)


def _code(owner: ast.AST, name: str, body: list[ast.stmt]) -> list[ast.stmt]:
    if name == "body" and isinstance(owner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return fingerprints.without_docstring(body)
    return body


def _in_block(old: list[ast.stmt], new: list[ast.stmt], around: _Pair) -> Iterator[_Site]:
    """Statements whose number changes: each old statement becomes some of the new ones."""
    becomes: list[list[ast.stmt]] = [[] for _ in old]
    for tag, start, end, first, last in _aligned(old, new):
        if tag == "insert":
            before, after = start - 1, start
            if before < 0 or (
                after < len(old) and not snippets.fits(old[before], [*becomes[before], *new[first:last]])
            ):
                before = after
            if before < len(old):
                becomes[before] += new[first:last]
            continue
        # One by one; the last one takes the rest.
        pairs = min(end - start, last - first)
        for index in range(pairs):
            becomes[start + index].append(new[first + index])
        if last - first > pairs:
            becomes[start + pairs - 1] += new[first + pairs : last]
    if not new or not old or not any(becomes):
        yield from _whole(around)
        return
    for statement, others in zip(old, becomes, strict=True):
        if len(others) == 1 and type(statement) is type(others[0]):
            if not _same(statement, others[0]):
                yield from _differences(_Pair(statement, others[0], around))
        else:
            yield _Site(statement, tuple(others), around)


def _aligned(old: list[ast.stmt], new: list[ast.stmt]) -> Iterator[tuple[str, int, int, int, int]]:
    """difflib's opcodes for equal statements, and between these for statements with the same `_gist`."""
    for tag, start, end, first, last in _opcodes(old, new, fingerprints.canonical):
        if tag == "replace":
            for kind, *places in _opcodes(old[start:end], new[first:last], _gist):
                yield kind, places[0] + start, places[1] + start, places[2] + first, places[3] + first
        else:
            yield tag, start, end, first, last


def _opcodes(
    old: list[ast.stmt], new: list[ast.stmt], key: Callable[[ast.stmt], str]
) -> list[tuple[str, int, int, int, int]]:
    return list(difflib.SequenceMatcher(None, [*map(key, old)], [*map(key, new)], autojunk=False).get_opcodes())


def _gist(statement: ast.stmt) -> str:
    """The subject of a statement: the target of its assignment or call."""
    about: Any = getattr(statement, "targets", None) or getattr(statement, "target", None)
    if about is None and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        about = statement.value.func
    return f"{type(statement).__name__} {fingerprints.canonical(about)}"


def _same(one: object, other: object) -> bool:
    return fingerprints.canonical(one) == fingerprints.canonical(other)


def _key(nodes: Sequence[ast.AST]) -> str:
    return fingerprints.canonical(list(nodes))
