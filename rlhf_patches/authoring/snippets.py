"""The text of a syntax tree's nodes, as patterns and replacements of rewrites."""

from __future__ import annotations

import ast
import copy
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Union

Located = Union[ast.stmt, ast.expr]


def patterns_of(text: str, node: ast.AST) -> Iterator[str]:
    """A node's possible patterns: its text if it is short, and on one line."""
    segment = _segment(text, node)
    joined = " ".join(line.strip() for line in segment.splitlines())
    flat = not isinstance(node, ast.stmt) or not hasattr(node, "body")
    if "\n" in segment and flat:
        yield from dict.fromkeys((ast.unparse(node), joined))
    else:
        yield from dict.fromkeys((segment, ast.unparse(node)))


def replacements(text: str, old: Located, new: Sequence[ast.AST]) -> Iterator[str]:
    """The possible texts of a node's replacement, the most readable first."""
    if isinstance(old, ast.expr):
        yield _on_a_line(text, new[0])
        return
    yield "\n".join(_segment(text, each) for each in new)
    yield "\n".join(_on_a_line(text, each) for each in new)
    yield "\n".join(_compact(new, text))


def fits(old: ast.stmt, new: Iterable[ast.AST]) -> bool:
    return len(_compact(new, "")) <= height(old)


def _on_a_line(text: str, node: ast.AST) -> str:
    segment = _segment(text, node)
    return ast.unparse(node) if "\n" in segment else segment


def _compact(nodes: Iterable[ast.AST], text: str) -> list[str]:
    """Statements on as few lines as Python allows: simple ones on one line, or after a colon."""
    rows = _Rows(text)
    block = ast.Module(rows.merged(copy.deepcopy(list(nodes))), [])
    lines: list[str] = []
    for line in ast.unparse(ast.fix_missing_locations(block)).splitlines():
        row = rows.texts.get(line.strip())
        if row is None:
            lines.append(line)
        elif row.alone and lines and lines[-1].endswith(":"):
            lines[-1] += f" {row.text}"
        else:
            lines.append(line.replace(line.strip(), row.text))
    return lines


class _Row(NamedTuple):
    text: str
    alone: bool


class _Rows:
    """Consecutive simple statements become a placeholder name; ``texts`` has their text by name."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.texts: dict[str, _Row] = {}

    def merged(self, block: list[Any]) -> list[ast.stmt]:
        statements_of_block: list[ast.stmt] = []
        for compound, group in itertools.groupby(block, lambda node: hasattr(node, "body") or hasattr(node, "cases")):
            statements = list(group)
            if compound:
                statements_of_block += map(self._with_rows, statements)
            else:
                name = f"__row_{len(self.texts)}__"
                text = "; ".join(_on_a_line(self._text, each) for each in statements)
                self.texts[name] = _Row(text, len(statements) == len(block))
                statements_of_block.append(ast.Expr(ast.Name(name, ast.Load())))
        return statements_of_block

    def _with_rows(self, node: Any) -> Any:
        for name in ("body", "orelse", "finalbody"):
            if getattr(node, name, None):
                setattr(node, name, self.merged(getattr(node, name)))
        for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self._with_rows(inner)
        return node


def _segment(text: str, node: ast.AST) -> str:
    segment = ast.get_source_segment(text, node, padded=True) if text else ""
    return textwrap.dedent(segment or ast.unparse(node)).strip("\n")


def height(node: ast.AST) -> int:
    assert isinstance(node, (ast.stmt, ast.expr))
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def index(text: str, node: Located) -> int:
    """The offset of a node in the text, in characters."""
    lines = text.split("\n")
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    return sum(len(line) + 1 for line in lines[: node.lineno - 1]) + len(before)
