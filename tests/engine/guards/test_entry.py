"""A statement put first into a function: the same tree as if it had been written there, and no line moves."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest

from rlhf_patches.guards import entry

BODIES = {
    "simple": "    return x",
    "docstring": '    """What it says: a, b."""\n    return x',
    "docstring alone": '    """Nothing else."""',
    "docstring and comment": "    'one'  # why\n    return x",
    "docstring of several lines": '    r"""One.\n\n    def f(x):\n    """\n\n    # why\n    return x',
    "text that goes on": '    "one".strip()\n    return x',
    "texts beside each other": '    "one" "two"\n    return x',
    "comments first": "    # if x:\n\n    # why\n    return x",
    "if": "    if x:\n        return x",
    "if below a docstring": '    """One."""\n    if x:\n        return x',
    "for": "    for y in x:\n        return y",
    "with": "    with x as y:\n        return y",
    "try": "    try:\n        return x\n    finally:\n        pass",
    "nested": "    @x\n    def g():\n        return x\n    return g",
    "iffy": "    iffy = x\n    return iffy",
    "global": "    global z\n    z = x",
}
HEADS = (
    "def f(x):",
    "def f(x): # a:",
    "def f(\n    x=':',  # :\n    *, y={1: [2]},\n) -> dict[str, ':']:",
    "async def f(x) :",
)


def wanted(text, line):
    tree = ast.parse(text)
    (node,) = (n for n in ast.walk(tree) if getattr(n, "name", "") == "f" and n.lineno == line)
    first = node.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    node.body[has_docstring:has_docstring] = ast.parse("count()").body
    return ast.dump(tree)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("body", BODIES)
def test_it_comes_first(body, head):
    text = f"import os\nclass A:\n  pass\n{head}\n{BODIES[body]}\n"
    calls = []
    names = {"count": lambda: calls.append(1)}
    code = entry.compiled(text, "x.py", "f", 4, "count()")
    exec(code, names)
    new = entry._with(text, 4, "count()")
    assert (new is None) == (
        body in ("if", "for", "with", "try", "nested", "text that goes on", "texts beside each other")
    )
    if new is not None:
        assert ast.dump(ast.parse(new)) == wanted(text, 4)
        assert new.count("\n") == text.count("\n")
    plain = {}
    exec(compile(text, "x.py", "exec"), plain)
    assert lines(names["f"]) - {None} <= {*range(4, text.count("\n") + 1)}
    assert names["f"].__doc__ == plain["f"].__doc__
    if not head.startswith("async"):
        try:
            names["f"](open("/dev/null") if body == "with" else lambda g: g if body == "nested" else [1])  # noqa: SIM115
        except (TypeError, AttributeError):
            pass
        assert calls == [1]


def lines(function):
    return {line for _, _, line in function.__code__.co_lines()}


def test_one_line():
    assert entry._with("def f(x): return x\n", 1, "count()") == "def f(x): count(); return x\n"


def test_private_names_are_those_of_no_class():
    text = "class A:\n    def f(self):\n        if self:\n            return 1\n"
    names = {"_count": lambda: None}
    exec(entry.compiled(text, "x.py", "f", 2, "_count()"), names)
    assert names["A"]().f() == 1


def test_what_is_not_there():
    with pytest.raises(ValueError, match="no function g in line 1"):
        entry.compiled("def f(x):\n    if x: pass\n", "x.py", "g", 1, "count()")


@pytest.mark.parametrize("part", range(4))
def test_in_the_standard_library(part):
    """Each way in which people write functions; those that the text cannot take are left to the tree."""
    files = [file for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if file.exists()][part::4]
    count = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            count += 1
            if count % 9:  # all of them take half a minute
                continue
            new = entry._with(text, node.lineno, "count()")
            if new is None:
                continue
            first = node.body[0]
            at = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            changed = ast.parse(new)
            (found,) = (
                n for n in ast.walk(changed) if type(n) is type(node) and (n.name, n.lineno) == (node.name, node.lineno)
            )
            assert ast.dump(found.body.pop(at)) == ast.dump(ast.parse("count()").body[0]), (file, node.lineno)
            assert ast.dump(changed) == ast.dump(tree), (file, node.lineno)
    assert count > 500
