"""Whether a patch's implementation exists and accepts its calls, from its text or from the object.

From text, only certain results are reported: a decorator, a class or `import *` may change any name.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any

from ..definitions.changes import Rewrite, Shape, Wrap
from . import locating, sources
from .places import FunctionNode, NotFound, Unreadable
from .shapes import Recognized

_Call = tuple[tuple[str, ...], dict[str, str]]

_WRAPS: _Call = (("wrapped", "instance", "args", "kwargs"), {})


class Unusable(Exception):
    """An implementation does not exist, or does not accept its calls; the message names it."""


class NotCallable(Exception):
    """A path leads to an object that is certainly not a function."""


class _Default:
    """A placeholder for every default value, which does not matter."""

    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()

Describe = Callable[[str], "Signature | None"]
"""Maps ``module:qualified.name`` to its parameters; None if they are unknown.

Raises `Unusable` if there is no such object, `NotCallable` if it is not a function.
"""


def check_usable(recognized: Sequence[Recognized], describe: Describe) -> None:
    """Check the implementations of a patch's changes.

    Args:
        recognized: the changes, as located in the text of their modules.
        describe: `of_text`, or a function that calls `of_object`.

    Raises:
        Unusable: an implementation does not exist, cannot be called, or takes other parameters.
    """
    for item in recognized:
        if isinstance(item.change, Rewrite):
            for path in item.change.uses.values():
                try:
                    describe(path)
                except NotCallable:  # a rewrite may use a constant
                    continue
        elif not isinstance(item.change, Shape):
            _check_call(item, item.change.implementation, describe)


def _check_call(item: Recognized, path: str, describe: Describe) -> None:
    try:
        signature = describe(path)
    except NotCallable as error:
        raise Unusable(f"{path} cannot be called: {error}") from error
    if signature is None:
        return
    if isinstance(item.change, Wrap):
        calls, arguments = [_WRAPS], f"({', '.join(_WRAPS[0])})"
    else:
        target = _signature(item.place.parameters, item.qualname.rpartition(".")[0])
        calls, arguments = list(_calls(target)), f"the parameters of {item.change.target}, {target}"
    try:
        for positional, keywords in calls:
            signature.bind(*positional, **keywords)
    except TypeError as error:
        raise Unusable(f"{path} takes {signature}, but is called with {arguments}") from error


def _calls(target: Signature) -> Iterator[_Call]:
    """Yield the smallest and the largest call of a trampoline with these parameters."""
    positional = [p.name for p in target.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name: "" for p in target.parameters.values() if p.kind is p.KEYWORD_ONLY}
    yield tuple(positional), dict(keywords)
    for p in target.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            # More than any function without *args accepts.
            positional += [p.name] * 256
        elif p.kind is p.VAR_KEYWORD:
            keywords["any_other_name_of_a_keyword"] = ""
    yield tuple(positional), keywords


def of_node(node: FunctionNode | ast.Lambda, owner: str = "") -> Signature:
    """Return the parameters of a function in a text, without annotations, and with ``...`` for every default.

    Args:
        node: the function.
        owner: the qualified name of its class, for private names.
    """
    return _signature(sources.parameters_of(node), owner)


def _signature(parameters: tuple[tuple[str, int, bool], ...], owner: str) -> Signature:
    private = f"_{owner.rpartition('.')[2].lstrip('_')}" if owner else ""
    converted = []
    for name, kind, has_default in parameters:
        mangled = private + name if name.startswith("__") and not name.endswith("__") else name
        converted.append(_parameter(mangled, kind, has_default))
    return Signature(converted)


def _parameter(name: str, kind: Any, has_default: bool = False) -> Parameter:
    return Parameter(name, kind, default=_DEFAULT if has_default else Parameter.empty)


# ------------------------------------------------------------------------------------------ the object


def of_object(implementation: Any) -> Signature | None:
    """Return the parameters of an object.

    Raises:
        NotCallable: it is not callable.
    """
    if not callable(implementation):
        raise NotCallable(f"it is {_a(type(implementation).__name__)}")
    try:
        signature = _unevaluated(implementation)
    except (TypeError, ValueError):  # some C functions
        return None
    return Signature(
        [_parameter(p.name, p.kind, p.default is not Parameter.empty) for p in signature.parameters.values()]
    )


def _unevaluated(implementation: Any) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        # Annotations may name objects that exist only for type checkers, so do not evaluate them.
        from annotationlib import Format

        return inspect.signature(implementation, annotation_format=Format.STRING)
    return inspect.signature(implementation)


def missing(path: str, error: Exception) -> Unusable | None:
    """Return the error if the import of an implementation failed because it does not exist; else None."""
    module, _, qualname = path.partition(":")
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        try:
            locating.locate(module)
        except NotFound as not_found:
            return Unusable(f"there is no {path}: {not_found}")
    if isinstance(error, AttributeError) and error.name and error.name in qualname.split("."):
        return _without(path, error.name)
    return None


def _without(path: str, name: str) -> Unusable:
    return Unusable(f"there is no {path}: {name} is not defined there")


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


# -------------------------------------------------------------------------------------------- the text


def of_text(path: str) -> Signature | None:
    """Return the parameters of an implementation that is not imported.

    Raises:
        Unusable: there is no such object.
        NotCallable: it is not a function.
    """
    module, _, qualname = path.partition(":")
    try:
        source = locating.read_module(module)
        scope: ast.AST = sources.parse(source)
    except NotFound as error:
        raise Unusable(f"there is no {path}: {error}") from error
    except Unreadable:
        return None
    *classes, last = qualname.split(".")
    if _is_dynamic(scope):
        return None
    for name in classes:
        bindings = _bound(scope, name)
        if not bindings and scope is sources.parse(source):
            _check_submodule(path, module, name)
        if len(bindings) != 1 or not isinstance(bindings[0], ast.ClassDef) or bindings[0].bases or bindings[0].keywords:
            return None
        scope = bindings[0]
        if scope.decorator_list:
            return None
    bindings = _bound(scope, last)
    if not bindings:
        if not classes:
            _check_submodule(path, module, last)
            return None
        raise _without(path, last)
    return _of_binding(bindings[0], ".".join(classes)) if len(bindings) == 1 else None


def _check_submodule(path: str, module: str, name: str) -> None:
    try:
        locating.locate(f"{module}.{name}")
    except NotFound as error:
        raise _without(path, name) from error


def _of_binding(node: ast.AST, owner: str) -> Signature | None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None if node.decorator_list else of_node(node, owner)
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    if isinstance(value, ast.Lambda):
        return of_node(value, owner)
    if isinstance(value, ast.Constant):
        raise NotCallable(f"it is {_a(type(value.value).__name__)}")
    for kind in (ast.List, ast.Dict, ast.Set, ast.Tuple):
        if isinstance(value, kind):
            raise NotCallable(f"it is {_a(kind.__name__.lower())}")
    return None


def _is_dynamic(module: ast.AST) -> bool:
    """Whether a module may have names that its text does not show."""
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return True
        if isinstance(node, ast.Name) and node.id in ("vars", "exec", "setattr"):
            return True
    return any(isinstance(node, ast.Name) and node.id == "globals" for node in ast.walk(module))


def _bound(scope: ast.AST, name: str) -> list[ast.AST]:
    """Return the statements of a module or class that bind a name, or may bind it."""
    return [node for node in _statements(scope) if _binds(node, name)] + [
        node for node in ast.walk(scope) if isinstance(node, ast.Global) and name in node.names
    ]


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a scope outside its functions and classes; for ``name = value``, not the name again."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if isinstance(child, (ast.Assign, ast.AnnAssign)) and all(isinstance(t, ast.Name) for t in _targets(child)):
            yield from _statements(ast.Expr(child.value)) if child.value else ()
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _statements(child)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name.partition(".")[0]) == name for alias in node.names)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return any(isinstance(target, ast.Name) and target.id == name for target in _targets(node))
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    return name in (getattr(node, "name", None), getattr(node, "rest", None))  # except ... as name, case ... as name
