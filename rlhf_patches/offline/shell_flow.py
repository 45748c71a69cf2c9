"""Which parts of a shell script may not run, or run again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ast_grep_py import SgNode

# What stands within these may not happen, or happen again, or leaves no variable behind.
_UNSURE = (
    *("if_statement", "for_statement", "c_style_for_statement", "while_statement", "case_statement"),
    *("function_definition", "list", "pipeline", "subshell"),
)


def may_not_run(node: SgNode) -> bool:
    """Whether what stands within may be left out: not after ``&&``, unless that follows a test."""
    kinds = [child.kind() for child in node.children()] if node.kind() == "list" else []
    if kinds and "||" not in kinds and "test_command" not in kinds:
        return node.text().startswith("test ")
    return node.kind() in _UNSURE


def assigned(node: SgNode, sure: bool = True) -> Iterator[str]:
    """The variables that an assignment sets which may not happen, or happen again."""
    kind = node.kind()
    sure = sure and kind not in _UNSURE
    if not sure and kind == "variable_assignment":
        yield node.children()[0].text().partition("[")[0]
    elif kind == "for_statement":
        yield node.children()[1].text()
    elif kind == "compound_statement" and node.text().startswith("(("):
        yield from re.findall(r"[A-Za-z_]\w*", node.text())
    for child in node.children():
        yield from assigned(child, sure)
