"""Upstream source as text: where a module's file is, without importing anything, and where in it a function is."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from ..import_system import no_signal
from .places import FunctionNode, NotFound, Place, Source, Unreadable

_Made = TypeVar("_Made")


# --------------------------------------------------------------------------------------- finding files


def locate(module: str) -> ModuleSpec:
    """The spec of a module that need not be imported; nothing is imported, no parent package either.

    Raises:
        NotFound: there is no such module.
    """
    spec = spec_of(sys.modules.get(module))
    if spec is not None:
        return spec
    path: list[str] | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = remembered(("found", name, *(path or ())), functools.partial(_find, name, path), small=True)
        if found is None:
            raise NotFound(f"there is no module {name}")
        spec, path = found
        if path is None and name != module:
            raise NotFound(f"there is no module {module}: {name} is not a package")
    assert spec is not None
    return spec


def exists(module: str) -> bool:
    """Whether `locate` finds a module."""
    try:
        locate(module)
    except NotFound:
        return False
    return True


def parents_of(module: str) -> list[str]:
    """Where the nearest parent package of a missing module is: its file, or the folders of a namespace package.

    Empty where there is no parent package either.
    """
    while module := module.rpartition(".")[0]:
        with contextlib.suppress(NotFound):
            spec = locate(module)
            return [spec.origin] if spec.has_location and spec.origin else [*(spec.submodule_search_locations or ())]
    return []


def real_path(path: str) -> str:
    """`os.path.realpath`, of which most work is the folders, which most files share."""
    folder, name = os.path.split(path)
    if name in ("", os.curdir, os.pardir) or os.path.islink(path):
        return os.path.realpath(path)
    return os.path.join(remembered(("real", folder), functools.partial(real_path, folder), small=True), name)


def namespace_of(module: object) -> dict[str, Any]:
    """A module's own names, looked at without attribute access: that makes a lazy module run, and may raise."""
    try:
        return object.__getattribute__(module, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:  # anything can be put into sys.modules
        return {}


def spec_of(module: object) -> ModuleSpec | None:
    """``module.__spec__`` without attribute access; None where there is none."""
    return namespace_of(module).get("__spec__")


def _find(name: str, path: list[str] | None) -> tuple[ModuleSpec, list[str] | None] | None:
    loaded = sys.modules.get(name)
    spec = spec_of(loaded)
    if spec is not None:
        return spec, list(namespace_of(loaded).get("__path__") or ()) or None
    # PathFinder cannot look into a namespace package whose parent is not imported; walking the
    # path entries as it does internally can.
    portions: list[str] = []
    for entry in path if path is not None else sys.path:
        try:
            finder = pkgutil.get_importer(entry or os.getcwd())
            spec = finder.find_spec(name) if finder is not None else None
        except no_signal(ImportError, OSError):
            continue
        if spec is None:
            continue
        if spec.loader is not None:
            return spec, list(spec.submodule_search_locations or ()) or None
        portions.extend(spec.submodule_search_locations or ())
    # Editable installs bring finders of their own. Only classes and modules are asked: ours and wrapt's are
    # instances, and wrapt's imports the parent package.
    for meta_finder in sys.meta_path:
        if meta_finder is importlib.machinery.PathFinder or not isinstance(meta_finder, (type, ModuleType)):
            continue
        try:
            spec = meta_finder.find_spec(name, path)
        except no_signal(Exception):
            continue
        if spec is not None:
            return spec, list(spec.submodule_search_locations or ()) or None
    if portions:
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = portions
        return namespace, portions
    return None


def read(spec: ModuleSpec) -> Source:
    """The source text behind a spec.

    Raises:
        Unreadable: there is no source (bytecode only, an extension module), or it cannot be decoded.
    """
    return remembered(("text", spec.name, spec.origin), lambda: _read(spec), small=True)


def read_module(module: str) -> Source:
    """The source text of a module that need not be imported.

    Raises:
        NotFound, Unreadable: as `locate` and `read`.
    """
    return read(locate(module))


def _read(spec: ModuleSpec) -> Source:
    origin, loader = spec.origin, spec.loader
    if origin is None or not spec.has_location:
        raise Unreadable(f"module {spec.name} has no source file")
    if origin.endswith((".pyc", ".so", ".pyd")):
        kind = "bytecode" if origin.endswith(".pyc") else "a compiled extension"
        raise Unreadable(f"module {spec.name} is installed as {kind} only ({origin})")
    try:
        if loader is not None and hasattr(loader, "get_data"):
            data = loader.get_data(origin)
        else:
            with open(origin, "rb") as file:
                data = file.read()
        return Source(spec.name, origin, importlib.util.decode_source(data))
    except no_signal(OSError, SyntaxError, UnicodeError, LookupError) as error:  # of a codec without text
        raise Unreadable(f"the source of {spec.name} cannot be read: {error} ({origin})") from error


# ----------------------------------------------------------------------------------- finding functions


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Compile without warnings of the framework's text (an invalid escape, say): it is not ours, nor news.

    Its cached bytecode is silent about them; under ``-W error`` they would make the text uncompilable.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Memory(threading.local):
    made: dict[Hashable, tuple[Any, Exception | None]] | None = None
    small: dict[Hashable, tuple[Any, Exception | None]] | None = None
    kept: float = 0


_memory = _Memory()


@contextlib.contextmanager
def parsed_once(kept: float = 12) -> Iterator[None]:
    """Within it this thread reads, parses and compiles a text once, however many patches look at it.

    At its end all is forgotten: syntax trees are large, and a training run is long.

    Args:
        kept: how many results are kept, those that were used last. Texts that run in this process anyway need no limit.
    """
    if _memory.made is not None:
        yield
        return
    with _no_collection():  # to the end of the trees: a collection while they live is one of the whole heap
        try:  # first: a signal's handler may raise anywhere
            _memory.made, _memory.small, _memory.kept = {}, {}, kept
            yield
        finally:
            _memory.made = _memory.small = None


def remembered(key: Hashable, make: Callable[[], _Made], small: bool = False) -> _Made:
    """What ``make()`` returns or raises, made anew unless `parsed_once` has that of an equal key.

    What is ``small`` does not count among the few that are kept.
    """
    made = _memory.small if small else _memory.made
    if made is None:
        return make()
    if key in made:
        made[key] = made.pop(key)  # the one that was used last comes last
    else:
        try:
            found: tuple[Any, Exception | None] = make(), None
        except no_signal(Exception) as error:
            found = None, error
        while len(made) >= _memory.kept and not small:
            del made[next(iter(made))]
        made[key] = found
    result, raised = made[key]
    if raised is not None:
        raise raised.with_traceback(None)
    return result  # type: ignore[no-any-return]


def lines_of(source: Source) -> list[str]:
    """The lines of a text, not to be changed."""
    return remembered(("lines", source), lambda: source.text.split("\n"), small=True)


def parse(source: Source) -> ast.Module:
    """The module's syntax tree, not to be changed.

    Raises:
        Unreadable: the text is not valid for this Python.
    """
    return remembered(("tree", source), lambda: _parse(source))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cyclic garbage collector: a tree is many objects and no garbage.

    They would set off a walk through the whole heap of the frameworks, which takes 20 times as long as the parser.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def _parse(source: Source) -> ast.Module:
    try:
        with no_warnings(), _no_collection():
            return ast.parse(source.text)
    except no_signal(SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = str(error) or "it is nested too deeply, or takes too much memory"
        raise Unreadable(f"the source of {source.module} does not parse: {why} ({source.filename})") from error


def find_function(source: Source, qualname: str) -> FunctionNode:
    """The one definition of ``qualname`` in a module.

    Raises:
        NotFound: it is not defined there, or more than once (then which one runs cannot be told from the text).
        Unreadable: the text does not parse.
    """
    functions = [node for node in functions_of(source).get(qualname, ()) if not _is_overload(node)]
    if len(functions) != 1:
        count = "not defined" if not functions else f"defined {len(functions)} times"
        raise NotFound(f"{qualname} is {count} in {source.module}")
    return functions[0]


def functions_of(source: Source) -> dict[str, list[FunctionNode]]:
    """The functions of a module and of its classes, by their qualified names.

    Raises:
        Unreadable: the text does not parse.
    """
    return remembered(("functions", source), lambda: _functions(parse(source)), small=True)


def _functions(scope: ast.AST, prefix: str = "") -> dict[str, list[FunctionNode]]:
    """The functions of a module or class and of the classes in it, by their qualified names."""
    found: dict[str, list[FunctionNode]] = {}
    for node in _definitions([scope]):
        if isinstance(node, ast.ClassDef):
            for name, inner in _functions(node, f"{prefix}{node.name}.").items():
                found.setdefault(name, []).extend(inner)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.setdefault(prefix + node.name, []).append(node)
    return found


def _definitions(scopes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Functions and classes directly in these scopes, also under ``if``, ``try``, ``with`` and loops."""
    for scope in scopes:
        for child in ast.iter_child_nodes(scope):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield child
            elif isinstance(child, (ast.stmt, ast.ExceptHandler)) or type(child).__name__ == "match_case":
                yield from _definitions([child])


def find_import(source: Source, statement: str) -> ast.ImportFrom:
    """The statement that imports a name whenever a module is imported; ``from X import name`` says which.

    So does one where an optional package is there (``if is_vllm_available():``). What is tried, what asks for a
    version, what is for type checkers and what is in a function may do without the name.

    Raises:
        NotFound: there is none.
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
    """Where a function is."""
    return Place(
        name=node.name,
        lineno=node.lineno,
        first_line=first_line(node),
        column=node.col_offset,
        is_async=isinstance(node, ast.AsyncFunctionDef),
        parameters=parameters_of(node),
    )


def place_in_module(node: ast.stmt) -> Place:
    """Where a statement of a module is."""
    return Place("<module>", node.lineno, node.lineno, node.col_offset, False, ())


def parameters_of(node: FunctionNode | ast.Lambda) -> tuple[tuple[str, int, bool], ...]:
    """The parameters of a function, as `Place` has them."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    found: list[tuple[str, int, bool]] = []
    for index, argument in enumerate(plain):
        kind = _POSITIONAL_ONLY if index < len(arguments.posonlyargs) else _POSITIONAL_OR_KEYWORD
        found.append((argument.arg, kind, index >= first_default))
    if arguments.vararg:
        found.append((arguments.vararg.arg, _VAR_POSITIONAL, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, _KEYWORD_ONLY, default is not None))
    if arguments.kwarg:
        found.append((arguments.kwarg.arg, _VAR_KEYWORD, False))
    return tuple(found)


# As inspect.Parameter numbers them.
_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD, _VAR_POSITIONAL, _KEYWORD_ONLY, _VAR_KEYWORD = range(5)


def first_line(node: FunctionNode) -> int:
    """The line that the function's code object states: its first decorator's, if it has any."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


# ----------------------------------------------------------------------------------------- fingerprints


def fingerprint(text: str, qualname: str) -> str:
    """Fingerprint of a function in a module's text: 16 hex digits of a SHA-256 over its syntax tree.

    Docstring, annotations, comments and formatting do not count; decorators, names, defaults and body do.
    The same on every Python version.

    Args:
        text: the whole module's source.
        qualname: the function within the module, such as ``Class.method``.

    Returns:
        what `Replace.fingerprints` and `Wrap.fingerprints` list.

    Raises:
        NotFound: the function is not defined exactly once.
        Unreadable: the text does not parse.
    """
    return fingerprint_of(find_function(Source("<text>", "<text>", text), qualname))


def fingerprint_of(node: FunctionNode) -> str:
    """As `fingerprint`, of a node."""
    import hashlib  # OpenSSL: milliseconds of every start

    return hashlib.sha256(canonical(node).encode()).hexdigest()[:16]


def signature_of(node: FunctionNode) -> str:
    """The parameters as text, without annotations: ``(self, x, *, y=0)``."""
    stripped = ast.arguments(
        posonlyargs=[ast.arg(arg=a.arg) for a in node.args.posonlyargs],
        args=[ast.arg(arg=a.arg) for a in node.args.args],
        vararg=ast.arg(arg=node.args.vararg.arg) if node.args.vararg else None,
        kwonlyargs=[ast.arg(arg=a.arg) for a in node.args.kwonlyargs],
        kw_defaults=node.args.kw_defaults,
        kwarg=ast.arg(arg=node.args.kwarg.arg) if node.args.kwarg else None,
        defaults=node.args.defaults,
    )
    return f"({ast.unparse(stripped)})"


LEFT_OUT = {"annotation", "returns", "type_comment", "kind", "ctx", "type_params", "is_lazy"}
"""Fields that do not change what a function computes, and those that came with a newer Python."""


def canonical(node: object) -> str:
    """A node, a list of nodes or a value as text that is the same for what computes the same."""
    if isinstance(node, list):
        return "[" + ",".join(canonical(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return ascii(node)  # repr() escapes what this Python's Unicode database does not know yet
    fields = []
    for name, value in sorted(ast.iter_fields(node)):
        if isinstance(node, ast.JoinedStr):  # 3.12 puts an empty piece at the end of some
            value = [piece for piece in value if not (isinstance(piece, ast.Constant) and piece.value == "")]
        if name in LEFT_OUT or (value is None and not isinstance(node, ast.Constant)) or value == []:
            continue
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            value = without_docstring(value)
        fields.append(f"{name}={canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a function or a class that do something."""
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
