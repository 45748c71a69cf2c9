"""The code of a patch, as text: its implementations, and the code of their own package that they use.

Nothing is imported: an implementation may need a framework that is not installed.
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..definitions.bug import KnownBug
from ..definitions.patch import Patch
from ..guards import locating, sources
from ..guards.places import FunctionNode, NotFound, Source, Unreadable

_BUILT_IN = "rlhf_patches.patches"


@dataclass
class Module:
    """A module's text, and the meaning of its names.

    Attributes:
        source: the text.
        defined: by name, the statements of the module that define it.
        loose: the statements that define no name; they run at import.
        imported: by name, a module and a name in it, or "" for the module itself.
    """

    source: Source
    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)
    loose: list[ast.stmt] = field(default_factory=list)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A statement of a patch's code.

    Attributes:
        module: the statement's module.
        name: the name that it defines; "" if none.
        node: the statement.
    """

    module: Module
    name: str
    node: ast.stmt


def pieces(patch: KnownBug) -> list[Piece]:
    """The code that may run once a patch is applied; empty for rewrites without `uses`."""
    roots = [*patch.implementations]
    if isinstance(patch, Patch) and patch.observations:
        roots.append(patch.observations)
    roots += [condition.predicate for condition in getattr(patch, "conditions", ()) if condition.predicate]
    pieces_by_place: dict[tuple[str, str], list[Piece]] = {}
    due = deque((module, qualname.partition(".")[0]) for module, _, qualname in (path.partition(":") for path in roots))
    while due:
        place = due.popleft()
        if place in pieces_by_place:
            continue
        pieces_by_place[place] = []
        module = module_of(place[0])
        if module is None:
            continue
        if (place[0], "") not in pieces_by_place:
            due.append((place[0], ""))
        statements = module.loose if not place[1] else module.defined.get(place[1], [])
        if not statements and place[1] in module.imported:
            due.append(_resolved(module.imported[place[1]]))
        pieces_by_place[place] = [Piece(module, place[1], node) for node in statements]
        for node in statements:
            due.extend(target for target in _used(module, node) if _is_own(target[0], place[0]))
    return list({id(each.node): each for some in pieces_by_place.values() for each in some}.values())


def module_of(name: str) -> Module | None:
    """A module by its text; None if it has none. Other checks require that implementations exist."""
    try:
        return _read(locating.read_module(name))
    except (NotFound, Unreadable):
        return None


def definition(module: Module, name: str) -> tuple[Module, FunctionNode] | None:
    """The function that a name of a module refers to, if it is of the same package."""
    for _ in range(5):  # from one module to the next
        if name in module.defined:
            node = module.defined[name][-1]
            return (module, node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
        where, name = _resolved(module.imported.get(name, ("", "")))
        imported = module_of(where) if name and _is_own(where, module.source.module) else None
        if imported is None:
            return None
        module = imported
    return None


def _is_own(module: str, of: str) -> bool:
    own = _BUILT_IN if of.startswith(f"{_BUILT_IN}.") else of.partition(".")[0]
    return f"{module}.".startswith(f"{own}.")


@functools.lru_cache(maxsize=64)
def _read(source: Source) -> Module:
    module = Module(source)
    tree = sources.parse(source)
    for node in _statements(tree.body):
        names = list(_names(node))
        for name in names:
            module.defined.setdefault(name, []).append(node)
        if not names and not isinstance(node, (ast.Import, ast.ImportFrom)):
            module.loose.append(node)
    is_package = source.filename.endswith("__init__.py")
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            for alias in each.names:
                first = alias.name.partition(".")[0]
                module.imported[alias.asname or first] = (alias.name if alias.asname else first, "")
        elif isinstance(each, ast.ImportFrom):
            parts = source.module.split(".")
            above = len(parts) - each.level + is_package
            base = ".".join([*(parts[:above] if each.level else ()), *([each.module] if each.module else ())])
            module.imported |= {alias.asname or alias.name: (base, alias.name) for alias in each.names}
    return module


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        handlers = [handler.body for handler in getattr(node, "handlers", [])]
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for each in [*inner, *handlers]:
                yield from _statements(each)
        else:
            yield node


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _used(module: Module, node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names of its own module and of imported modules that a statement uses."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            if each.id in module.defined:
                yield module.source.module, each.id
            elif each.id in module.imported:
                yield _resolved(module.imported[each.id])
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            where, name = _resolved(module.imported.get(each.value.id, ("", "")))
            if where and not name:
                yield where, each.attr


def _resolved(imported: tuple[str, str]) -> tuple[str, str]:
    """``from package import module`` imports a module if the package does not define that name."""
    where, name = imported
    if where and name and locating.exists(f"{where}.{name}"):
        return f"{where}.{name}", ""
    return imported
