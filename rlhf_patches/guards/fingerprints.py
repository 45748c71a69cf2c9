"""A function's fingerprint and signature as text that is the same on every Python."""

from __future__ import annotations

import ast

from .places import FunctionNode, Source
from .sources import find_function


def fingerprint(text: str, qualname: str) -> str:
    """Return the fingerprint of a function in a module's text: 16 hex digits of a SHA-256 over its syntax tree.

    Docstring, annotations, comments and formatting do not count; decorators, names, defaults and body do.
    It is the same on every Python version.

    Args:
        text: the whole module's source.
        qualname: the function within the module, such as ``Class.method``.

    Returns:
        the fingerprint, as in `Replace.fingerprints` and `Wrap.fingerprints`.

    Raises:
        NotFound: the function is not defined exactly once.
        Unreadable: the text does not parse.
    """
    return fingerprint_of(find_function(Source("<text>", "<text>", text), qualname))


def fingerprint_of(node: FunctionNode) -> str:
    """Return the `fingerprint` of a node."""
    import hashlib  # OpenSSL: milliseconds of every start

    return hashlib.sha256(canonical(node).encode()).hexdigest()[:16]


def signature_of(node: FunctionNode) -> str:
    """Return the parameters as text, without annotations: ``(self, x, *, y=0)``."""
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
"""Fields that do not change what a function computes, and fields of newer Python versions."""


def canonical(node: object) -> str:
    """Return a node, a list of nodes or a value as text; equal code has equal text."""
    if isinstance(node, list):
        return "[" + ",".join(canonical(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return ascii(node)  # repr() escapes characters that this Python's Unicode database lacks
    fields = []
    for name, value in sorted(ast.iter_fields(node)):
        if isinstance(node, ast.JoinedStr):  # 3.12 appends an empty piece to some
            value = [piece for piece in value if not (isinstance(piece, ast.Constant) and piece.value == "")]
        if name in LEFT_OUT or (value is None and not isinstance(node, ast.Constant)) or value == []:
            continue
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            value = without_docstring(value)
        fields.append(f"{name}={canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a function or a class without the docstring."""
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
