"""Rewrites drafted from two texts of a function: the smallest that make one the other, or why there are none."""

from __future__ import annotations

import ast
import textwrap

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_patches.authoring import draft, snippets
from rlhf_patches.authoring.draft import Inexpressible
from rlhf_patches.guards import shapes, sources
from rlhf_patches.guards.edits import Unrecognized, edited
from rlhf_patches.guards.places import Source

HEAD = "import math\nLIMIT = 3\n"


def text_of(body):
    return Source("mod", "mod.py", f"{HEAD}def f(a, b, c):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n")


def drafted(old, new):
    return draft.rewrites("mod:f", text_of(old), text_of(new))


def made_of(rewrites, old):
    """What the engine makes of the function, as a tree."""
    edits = [edit for rewrite in rewrites for edit in shapes.recognize(rewrite, old).edits]
    return ast.dump(sources.find_function(old._replace(text=edited(old.text, edits)), "f"))


def dump(source):
    return ast.dump(sources.find_function(source, "f"))


EXPRESSIBLE = {
    "an operator": (
        "return a - b * c",
        "return a + b * c",
        ["a - b * c -> a + b * c"],
    ),
    "the smallest node": (
        "x = abs(a)\nreturn x / len(b)",
        "x = abs(a)\nreturn x / sum(b)",
        ["len(b) -> sum(b)"],
    ),
    "a name alone where what is around it has several lines": (
        "return max(\n    len,\n    b,\n)",
        "return max(\n    sum,\n    b,\n)",
        ["len -> sum"],
    ),
    "a constant": (
        "return a * 2 + b",
        "return a * 3 + b",
        ["a * 2 -> a * 3"],
    ),
    "alike in two places": (
        "x = a.one\ny = b.one\nreturn a.one",
        "x = a.two\ny = b.one\nreturn a.two",
        ["2 a.one -> a.two"],
    ),
    "one of two places": (
        "x = len(a)\ny = len(b)",
        "x = sum(a)\ny = len(b)",
        ["len(a) -> sum(a)"],
    ),
    "the statement around it": (
        "a = b\na = c\nreturn b",
        "a = c\na = c\nreturn b",
        ["a = b -> a = c"],
    ),
    "another argument": (
        "return max(\n    a,\n    b,\n)",
        "return max(a, b, c)",
        ["max(a, b) -> max(a, b, c)"],
    ),
    "inserted after a statement": (
        "a = b\nreturn a",
        "a = b\na += 1\nreturn a",
        ["a = b -> a = b; a += 1"],
    ),
    "inserted first": (
        "return a",
        "a = b\nreturn a",
        ["return a -> a = b; return a"],
    ),
    "inserted last": (
        "a = b",
        "a = b\nreturn a",
        ["a = b -> a = b; return a"],
    ),
    "taken out": (
        "a = b\nprint(a)\nreturn a",
        "a = b\nreturn a",
        ["print(a) -> "],
    ),
    "a branch before several lines": (
        "x = max(\n    a,\n    b,\n)\nreturn x",
        "if a is None:\n    return c\nx = max(\n    a,\n    b,\n)\nreturn x",
        ["x = max(a, b) -> if a is None:\n    return c\nx = max(a, b)"],
    ),
    "a branch on one line": (
        "a = b\nwhile a:\n    a -= 1\n    b += 1\nreturn a",
        "a = b\nif not a: return 0\nwhile a:\n    a -= 1\n    b += 1\nreturn a",
        None,
    ),
    "around a statement": (
        "for x in a:\n    b(x)\n    c(x)",
        "for x in a:\n    if x:\n        b(x)\n        c(x)",
        None,
    ),
    "a comment in the way": (
        "if a:\n    # why\n    b = 1\n    c = 2\nreturn b",
        "if c:\n    # why\n    b = 1\n    c = 2\nreturn b",
        None,
    ),
    "letters of two bytes": (
        "x = 'ä'; y = a\nreturn y",
        "x = 'ä'; y = b\nreturn y",
        None,
    ),
    "a dollar sign": (
        "x = '$A' + a\nreturn x",
        "x = '$A' + b\nreturn x",
        None,
    ),
    "a string in it": (
        "x = f'{a} {b}'",
        "x = f'{a} {c}'",
        None,
    ),
    "nested": (
        "def g():\n    return a\nreturn g",
        "def g():\n    return b\nreturn g",
        None,
    ),
    "docstring alone": (
        '"""One."""\nreturn a',
        '"""Two."""\n# three\nreturn a',
        [],
    ),
}


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_a_change_is_drafted_and_makes_the_function_what_it_is_in_the_fix(name):
    old, new, expected = EXPRESSIBLE[name]
    found = drafted(old, new)
    if expected is not None:
        said = [f"{f'{x.matches} ' if x.matches > 1 else ''}{x.pattern} -> {x.replacement}" for x in found]
        assert said == expected
    if expected != []:
        assert made_of(found, text_of(old)) == dump(text_of(new)) != dump(text_of(old))


INEXPRESSIBLE = {
    "no room": ("return a", "if a:\n    b = 1\nelse:\n    b = 2\nreturn b", "needs more lines"),
    "a name that nothing defines": ("return len(a)", "return helper(a)", "uses helper, which neither"),
    "too large a pattern": (
        "while a:\n" + "".join(f"    b{n} = {n}\n" for n in range(20)),
        "while c:\n    if a:\n        b = 3\n",
        "the smallest possible rewrite has 21 lines",
    ),
}


@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_what_is_not_expressible_says_why(name):
    old, new, why = INEXPRESSIBLE[name]
    with pytest.raises(Inexpressible, match=why):
        drafted(old, new)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("def f(a): return a", "def f(a, b=1): return a + b", r"its parameters become \(a, b=1\)"),
        ("def f(a): return a", "@staticmethod\ndef f(a): return a + 1", "its decorators change"),
        ("def f(a): return a", "async def f(a): return await a", "other kind"),
    ],
)
def test_what_a_function_is_from_outside_cannot_be_drafted(old, new, why):
    with pytest.raises(Inexpressible, match=why):
        draft.rewrites("mod:f", Source("mod", "mod.py", old + "\n"), Source("mod", "mod.py", new + "\n"))


def test_the_fixed_code_is_not_taken_for_the_defect():
    old, new = "a = b\nreturn a", "a = b\na += 1\nreturn a"
    (rewrite,) = drafted(old, new)
    assert rewrite.unless == ("a += 1",)
    with pytest.raises(Unrecognized, match="already repairs it"):
        shapes.recognize(rewrite, text_of(new))


def test_what_is_not_the_fix_is_not_drafted(monkeypatch):
    made = []

    def wrong(text, old, new):
        made.append(old)
        yield "a + 7"

    monkeypatch.setattr(snippets, "replacements", wrong)
    with pytest.raises(Inexpressible, match="the result of the rewrites differs from the fix"):
        drafted("return a - b", "return a + b")
    assert made


expressions = st.recursive(
    st.sampled_from(["a", "b", "c", "0", "'s'", "LIMIT"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["abs", "math.floor"]), inner).map(lambda t: f"{t[0]}({t[1]})"),
        st.tuples(inner, inner).map(lambda t: f"max({t[0]},\n    {t[1]})"),
    ),
    max_leaves=4,
)
simple = st.tuples(st.sampled_from(["a = ", "b += ", "return ", ""]), expressions).map("".join)
statements = st.recursive(
    st.lists(simple, min_size=1, max_size=4).map("\n".join),
    lambda inner: st.tuples(st.sampled_from(["if a:", "while b:", "for c in a:"]), inner, inner).map(
        lambda t: f"{t[0]}\n{textwrap.indent(t[1], '    ')}\n{t[2]}"
    ),
    max_leaves=4,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(statements, statements)
def test_whatever_is_drafted_makes_one_function_the_other(old, new):
    before, after = text_of(f"c = 0\n{old}"), text_of(f"c = 0\n{new}")  # a string that comes first is a docstring
    try:
        found = draft.rewrites("mod:f", before, after)
    except Inexpressible:
        return
    if found:
        assert made_of(found, before) == dump(after)
    else:
        assert dump(before) == dump(after)
