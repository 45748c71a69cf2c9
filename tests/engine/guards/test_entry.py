"""A statement put first into a function: the same tree as if it had been written there, and no line moves."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest

from rlhf_patches.guards import entry
from tests.harness.effort import SHARE

BODIES = {
    "simple": "    return x",
    "docstring": '    """What it says: a, b."""\n    return x',
    "ellipsis": "    ...",
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


def after_docstring(node):
    return int(ast.get_docstring(node, clean=False) is not None)


def wanted(text, line):
    tree = ast.parse(text)
    (node,) = (n for n in ast.walk(tree) if getattr(n, "name", "") == "f" and n.lineno == line)
    at = after_docstring(node)
    node.body[at:at] = ast.parse("count()").body
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


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_same(new, old, put_in):
    """Whether one tree is the other, but for the statements that are in functions of the new one: by those of the old.

    What ``ast.dump`` tells, in a fraction of its time.
    """
    if type(new) is not type(old):
        return False
    if isinstance(old, list):
        return len(new) == len(old) and all(is_same(*pair, put_in) for pair in zip(new, old, strict=True))
    if not isinstance(old, ast.AST):
        return new == old
    if old in put_in and (
        new.lineno != old.lineno or ast.unparse(new.body.pop(after_docstring(old))) != put_in.pop(old)
    ):
        return False
    return all(is_same(getattr(new, name, None), getattr(old, name, None), put_in) for name in old._fields)


@pytest.mark.parametrize("part", range(4))
def test_in_the_standard_library(part):
    """Each way in which people write functions; those that the text cannot take are left to the tree.

    Many functions of a file get a statement before it is parsed again: no line moves, so each is where it was.
    """
    count = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[part :: 4 * SHARE]:
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        new, put_in = text, {}
        for node in ast.walk(tree):
            if not isinstance(node, FUNCTIONS):
                continue
            count += 1
            changed = None if count % 2 else entry._with(new, node.lineno, f"count_{count}()")
            if changed is not None:
                new, put_in[node] = changed, f"count_{count}()"
        assert not put_in or is_same(ast.parse(new), tree, put_in), file
        assert not put_in, file
    assert count > 500 / SHARE
