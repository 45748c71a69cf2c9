"""``rlhf-patches try`` and ``fingerprint``."""

from __future__ import annotations

import ast

import pytest

from rlhf_patches import fingerprint
from rlhf_patches.authoring import definition

TEXT = "import math\n\n\ndef f(x, *, y=0):\n    if x is None:\n        return math.floor(x)\n    return math.floor(y)\n"


@pytest.fixture
def target(framework):
    framework.write("mod", TEXT)
    return framework.path("mod:f")


def test_without_a_pattern_the_source_is_shown_with_its_lines(said, target):
    status, out, err = said("try", target)
    assert (status, err) == (0, "")
    assert [line[2:7].strip() for line in out.splitlines()] == ["4", "5", "6", "7"]


def test_matches_are_marked_and_a_rewrite_is_shown_as_a_diff_and_as_a_definition(said, target, framework):
    status, out, err = said(
        "try", target, "math.floor($A)", "$ROUNDED($A)", "--use", "ROUNDED=math:ceil", "--inside", "return $B"
    )
    assert (status, err) == (0, "")
    assert [line[2:7].strip() for line in out.splitlines() if line.startswith("> ")] == ["6", "7"]
    assert "2 matches in" in out
    definition = out.splitlines()[-1]
    rewrite = eval(definition, {"Rewrite": __import__("rlhf_patches").Rewrite})
    assert (rewrite.matches, dict(rewrite.uses), rewrite.inside) == (2, {"ROUNDED": "math:ceil"}, "return $B")
    added = [line for line in out.splitlines() if line.startswith("+ ")]
    assert len(added) == 2
    assert all("math" in line and "floor" not in line for line in added)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("math.ceil($A)",), 1, ""),
        (("math.floor(",), 1, "the pattern 'math.floor(' is not valid Python by itself ('(' was never closed)"),
        (("$$$",), 2, "ast-grep rejects the pattern '$$$': Standalone multi meta variable"),
        (("a\nb",), 2, "Multiple AST nodes are detected. Please check the pattern source `a b`."),
        (("\udcff",), 2, "the pattern '\\udcff' is not valid UTF-8"),
        (("math.floor($A)", "nothing_like_it($A)"), 2, "the rewrite is not possible: "),
        (("math.floor($A)", "$G($A)", "--use", "G=math.ceil"), 2, "expected 'module:qualified.name'"),
        (("x", "--in", "no_such_folder/x.whl"), 2, "no_such_folder/x.whl"),
    ],
)
def test_what_it_cannot_do_is_one_line(said, target, arguments, status, message):
    found, _, err = said("try", target, *arguments)
    assert found == status
    assert message in err
    assert err.count("\n") == bool(message)


@pytest.mark.parametrize(
    ("name", "message"), [("{}.mod:g", "g is not defined in"), ("{}.no:f", "no module"), ("f", "expected MODULE:FUNC")]
)
def test_a_function_that_is_not_there(said, target, framework, name, message):
    for command in ("try", "fingerprint"):
        status, out, err = said(command, name.format(framework.name))
        assert (status, out) == (2, "")
        assert message in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}:f", "f is not defined in {0}, which imports it: it is defined in {0}.mod:f"),
        ("{}:Base.run", "which imports it: it is defined in {0}.classes:Base.run"),
        ("{}.user:renamed", "it is defined in {0}.mod:f"),
        ("{}.classes:Bese.run", "Bese.run is not defined in {0}.classes; similar names: Base.run"),
        ("{}.classes:Derived.run", "if Derived inherits it (from Base), name the class that defines it"),
        ("{}.classes:Derived.ruin", "if Derived inherits it (from Base)"),
        ("{}.user:in_a_circle", "in_a_circle is not defined in {0}.user"),
        ("{}.user:gone", "gone is not defined in {0}.user"),
    ],
)
def test_where_a_function_is_that_is_elsewhere(said, framework, name, message):
    framework.write("mod", "def f(x):\n    return x\n")
    framework.write("classes", "class Base:\n    def run(self):\n        pass\n\n\nclass Derived(Base):\n    pass\n")
    framework.write("user", "from .mod import f as renamed\nfrom . import in_a_circle, gone\nfrom ..... import gone\n")
    init = "if False:\n    from .user import renamed as f, in_a_circle\nfrom .classes import Base\n"
    (framework.site / framework.name / "__init__.py").write_text(init)
    status, out, err = said("try", name.format(framework.name))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message.format(framework.name) in err


def test_an_interrupt_is_one_line(said, target, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_patches.authoring.upstream.open_upstream", interrupt)
    assert said("try", target) == (130, "", "rlhf-patches: interrupted\n")


def test_releases_with_the_same_function_are_one_line(said, target, framework, tmp_path):
    for release, text in (("one", TEXT), ("two", TEXT.replace("def f", "# a comment\ndef f"))):
        folder = tmp_path / release / framework.name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "mod.py").write_text(text)
    (tmp_path / "none").mkdir()
    places = [str(tmp_path / name) for name in ("one", "two", "none")]
    status, out, err = said("fingerprint", target, *places)
    assert status == 2
    assert "none" in err
    assert out == f"{fingerprint(TEXT, 'f')}  (x, *, y=0)  {places[0]}, {places[1]}\n"
    assert said("fingerprint", target)[:2] == (0, f"{fingerprint(TEXT, 'f')}  (x, *, y=0)  installed here\n")


def test_text_from_outside_is_one_comment_whatever_it_holds():
    """Every character there is, a line of code behind it: as a file's first line, too."""
    everything = "".join(
        chr(number) + "import nonesuch;" for number in [*range(0x3100), *range(0xD7F0, 0xE010), 0xE0001]
    )
    for text in (everything, "coding: hex", "-*- coding=utf-7 -*- +AAo-import nonesuch"):
        line = definition.comment(text)
        assert (line[:2], len(line.splitlines())) == ("# ", 1)
        assert ast.parse(line.encode()).body == []
        quoted = definition.literal(text)
        assert ast.literal_eval(quoted) == text
        assert quoted.isprintable()
