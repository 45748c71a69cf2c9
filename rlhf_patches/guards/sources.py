"""A module's text as lines and as a syntax tree, and the place of a function in it."""

from __future__ import annotations

import ast
import contextlib
import warnings
from collections.abc import Iterable, Iterator

from ..import_system import no_signal
from .memory import no_collection, remembered
from .places import FunctionNode, NotFound, Place, Source, Unreadable


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Suppress compile-time warnings of the framework's text, such as an invalid escape.

    Its cached bytecode does not raise them; under ``-W error`` they would make the text uncompilable.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lines_of(source: Source) -> list[str]:
    """Return the lines of a text; callers must not change them."""
    return remembered(("lines", source), lambda: source.text.split("\n"), small=True)


def parse(source: Source) -> ast.Module:
    """Return the module's syntax tree; callers must not change it.

    Raises:
        Unreadable: the text is not valid for this Python.
    """
    return remembered(("tree", source), lambda: _parse(source))


def _parse(source: Source) -> ast.Module:
    try:
        with no_warnings(), no_collection():
            return ast.parse(source.text)
    except no_signal(SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = str(error) or "it is nested too deeply, or takes too much memory"
        raise Unreadable(f"the source of {source.module} does not parse: {why} ({source.filename})") from error


def find_function(source: Source, qualname: str) -> FunctionNode:
    """Return the only definition of ``qualname`` in a module.

    Raises:
        NotFound: it is not defined, or more than once (then the text does not show which one runs).
        Unreadable: the text does not parse.
    """
    functions = [node for node in functions_of(source).get(qualname, ()) if not _is_overload(node)]
    if len(functions) != 1:
        count = "not defined" if not functions else f"defined {len(functions)} times"
        raise NotFound(f"{qualname} is {count} in {source.module}")
    return functions[0]


def functions_of(source: Source) -> dict[str, list[FunctionNode]]:
    """Return the functions of a module and of its classes, by their qualified names.

    Raises:
        Unreadable: the text does not parse.
    """
    return remembered(("functions", source), lambda: _functions(parse(source)), small=True)


def _functions(scope: ast.AST, prefix: str = "") -> dict[str, list[FunctionNode]]:
    """Return the functions of a module or class and of the classes in it, by their qualified names."""
    by_name: dict[str, list[FunctionNode]] = {}
    for node in _definitions([scope]):
        if isinstance(node, ast.ClassDef):
            for name, inner in _functions(node, f"{prefix}{node.name}.").items():
                by_name.setdefault(name, []).extend(inner)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            by_name.setdefault(prefix + node.name, []).append(node)
    return by_name


def _definitions(scopes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield functions and classes directly in these scopes, also under ``if``, ``try``, ``with`` and loops."""
    for scope in scopes:
        for child in ast.iter_child_nodes(scope):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield child
            elif isinstance(child, (ast.stmt, ast.ExceptHandler)) or type(child).__name__ == "match_case":
                yield from _definitions([child])


def find_import(source: Source, statement: str) -> ast.ImportFrom:
    """Return the statement that imports a name on every import of a module, as in ``from X import name``.

    A statement under a check for an optional package (``if is_vllm_available():``) counts. Statements under ``try``, a
    version check or a type-checking check and in functions do not count: they may run without the name.

    Raises:
        NotFound: there is no such statement.
        Unreadable: the text does not parse.
    """
    _, package, _, name = statement.split(" ")
    for node in _run_on_import(parse(source).body):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module != package:
            continue
        if any(alias.name == name for alias in node.names):
            return node
    raise NotFound(f"{source.module} does not run {statement!r} whenever it is imported")


def _run_on_import(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in statements:
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Call) and not node.test.args:
            yield from _run_on_import(node.body)


def _is_overload(node: FunctionNode) -> bool:
    return any(ast.unparse(decorator).rpartition(".")[2] == "overload" for decorator in node.decorator_list)


def place_of(node: FunctionNode) -> Place:
    """Return the place of a function."""
    return Place(
        name=node.name,
        lineno=node.lineno,
        first_line=first_line(node),
        column=node.col_offset,
        is_async=isinstance(node, ast.AsyncFunctionDef),
        parameters=parameters_of(node),
    )


def place_in_module(node: ast.stmt) -> Place:
    """Return the place of a module's statement."""
    return Place("<module>", node.lineno, node.lineno, node.col_offset, False, ())


def parameters_of(node: FunctionNode | ast.Lambda) -> tuple[tuple[str, int, bool], ...]:
    """Return the parameters of a function, as in `Place`."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    parameters: list[tuple[str, int, bool]] = []
    for index, argument in enumerate(plain):
        kind = _POSITIONAL_ONLY if index < len(arguments.posonlyargs) else _POSITIONAL_OR_KEYWORD
        parameters.append((argument.arg, kind, index >= first_default))
    if arguments.vararg:
        parameters.append((arguments.vararg.arg, _VAR_POSITIONAL, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append((argument.arg, _KEYWORD_ONLY, default is not None))
    if arguments.kwarg:
        parameters.append((arguments.kwarg.arg, _VAR_KEYWORD, False))
    return tuple(parameters)


# inspect.Parameter's numbers.
_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD, _VAR_POSITIONAL, _KEYWORD_ONLY, _VAR_KEYWORD = range(5)


def first_line(node: FunctionNode) -> int:
    """Return the first line of the function's code object: its first decorator's, if it has any."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
