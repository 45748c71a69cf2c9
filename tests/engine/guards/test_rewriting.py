"""Rewrites of awkward text, what they refuse, and what debuggers see of them afterwards."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
import textwrap
import traceback

import pytest

from rlhf_patches import Replace, Rewrite, Status, Wrap
from rlhf_patches.guards import sources
from rlhf_patches.guards.edits import edited
from rlhf_patches.guards.fingerprints import fingerprint
from rlhf_patches.guards.patterns import find_edits
from rlhf_patches.guards.places import Source
from rlhf_patches.guards.sources import find_function, place_of
from tests.harness.texts import TRACED


@pytest.fixture
def rewrite(framework, engine):
    """Write ``source`` (text or bytes), import it, rewrite ``f``; gives the module and the report's row."""

    def run(source, pattern, replacement, target="f", **more):
        file = framework.write("mod", "")
        file.write_bytes(source if isinstance(source, bytes) else textwrap.dedent(source).encode())
        module = framework.load()
        codes = all_codes(module)
        patch = framework.patch(Rewrite(framework.path(f"mod:{target}"), pattern, replacement, **more))
        row = engine(patch).apply()[patch.name]
        changed = {name for name, code in all_codes(module).items() if code is not codes[name]}
        assert changed == ({target} if row.status is Status.APPLIED else set())
        return module, row

    return run


def all_codes(module):
    """The code of every function of a module and its classes, by qualified name."""
    codes = {}
    for name, value in vars(module).items():
        if name.startswith("_rlhf_patches_"):  # what counts calls
            continue
        if inspect.isfunction(value):
            codes[name] = value.__code__
        elif isinstance(value, type):
            codes.update({f"{name}.{n}": v.__code__ for n, v in vars(value).items() if inspect.isfunction(v)})
    return codes


# ------------------------------------------------------------------------------------------- awkward text

TEXTS = {
    "statement of several lines": (
        "def f(x):\n    x = min(\n        x,\n        1,\n    )\n    return x, line()\n",
        "x = min($X, 1)",
        "x = $X",
    ),
    "call statement of several lines": (
        "def f(x):\n    x.append(\n        1\n    )  # why\n    return x, line()\n",
        "x.append($N)",
        "x.extend([$N])",
    ),
    "raise of several lines": (
        "def f(x):\n    if x is None:\n        raise ValueError(\n            'no'\n        )\n    return x, line()\n",
        "raise ValueError($M)",
        "return 0, line()",
    ),
    "statement into fewer but several lines": (
        "def f(x):\n    x = min(\n        x,\n        1,\n    )\n    return x, line()\n",
        "x = min($X, 1)",
        "x = $X\nx = [x]",
    ),
    "the same with tabs": (
        "def f(x):\n\tif True:\n\t\tx = min(\n\t\t  x,\n\t\t\t1,\n\t\t)\n\treturn x, line()\n",
        "x = min($X, 1)",
        "x = $X\nx = [x]",
    ),
    "expression of several lines": (
        "def f(x):\n    y = 1 + min(\n        x,\n        1\n    ) * 2\n    return y, line()\n",
        "min($X, 1)",
        "max($X, 1)",
    ),
    "with backslashes": (
        "def f(x):\n    assert x is not \\\n        None, 'a' \\\n        'b'\n    return x, line()\n",
        "x is not None",
        "True",
    ),
    "in the middle of a backslashed line": (
        "def f(x):\n    y = x + \\\n        min(x,\n            1) + \\\n        2\n    return y, line()\n",
        "min(x, 1)",
        "max(x, 1)",
    ),
    "comments within": (
        "def f(x):\n    y = [  # one\n        min(x,  # two\n            1),  # three\n    ]\n    return y, line()\n",
        "min($A, 1)",
        "max($A, 1)",
    ),
    "other alphabets in front": (
        "# 🎉 é 𠮷 漢\ndef f(x):\n    é = '🎉🎉'; 漢 = (min(x, 1), é)  # 𠮷 ñ\n    return 漢, line()\n",
        "min($A, 1)",
        "max($A, 1)",
    ),
    "tabs": ("def f(x):\n\tif True:\n\t\tx = min(x, 1)\n\treturn x, line()\n", "min($A, 1)", "max($A, 1)"),
    "form feeds": (
        "y = 1\n\f\ndef f(x):\n    \f\n    x = min(x, 1)\n\f\n    return x, line()\n",
        "min($A, 1)",
        "max($A, 1)",
    ),
    "two matches in one line": ("def f(x):\n    return min(x, 1) + min(x, 1), line()\n", "min($A, 1)", "max($A, 1)"),
    "in an f-string": ("def f(x):\n    return f'é {min(x, 1)} é', line()\n", "min($A, 1)", "max($A, 1)"),
    "in an inner function": (
        "def f(x):\n    def g():\n        return min(x, 1)\n    return g(), line()\n",
        "min($A, 1)",
        "max($A, 1)",
    ),
    "last line without end": ("def f(x):\n    return min(x, 1), line()", "min($A, 1)", "max($A, 1)"),
    "windows line ends inside a string": (
        'def f(x):\n    y = """a\n b"""\n    return y + str(min(x, 1)), line()\n',
        "min($A, 1)",
        "max($A, 1)",
    ),
}
HEAD = "import sys\ndef line(): return sys._getframe(1).f_lineno\n"
ENCODINGS = {
    "utf-8": lambda text: text.encode(),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "windows line ends": lambda text: text.replace("\n", "\r\n").encode(),
    "old mac line ends": lambda text: text.replace("\n", "\r").encode(),
    "cookie": lambda text: b"# coding: gb18030\n" + text.encode("gb18030"),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", TEXTS)
def test_awkward_text(rewrite, framework, name, encoding):
    """The rewritten function does what a person's edit would have done, in the very same lines."""
    text, pattern, replacement = TEXTS[name]
    matches = text.count("min(x, 1)") if name == "two matches in one line" else 1
    module, row = rewrite(ENCODINGS[encoding](HEAD + text), pattern, replacement, matches=matches)
    original = framework.write("original", HEAD + text)  # never patched, and read as plain UTF-8
    unpatched = framework.load("original")
    assert row.status is Status.APPLIED, row.reason
    argument = [] if "append" in text else 5
    result, line = module.f(argument)
    before, line_before = unpatched.f([] if "append" in text else 5)
    by_hand = {
        "two matches in one line": 10,
        "statement of several lines": 5,
        "call statement of several lines": [1],
        "raise of several lines": 5,
        "statement into fewer but several lines": [5],
        "the same with tabs": [5],
        "expression of several lines": 11,
        "with backslashes": 5,
        "in the middle of a backslashed line": 12,
        "comments within": [5],
        "other alphabets in front": (5, "🎉🎉"),
        "in an f-string": "é 5 é",
        "windows line ends inside a string": "a\n b5",
    }.get(name, 5)
    assert result == by_hand
    assert line == line_before + (encoding == "cookie")
    if "min" in text:
        assert before != result
    assert original.exists()


def test_latin_1(rewrite):
    source = "# -*- coding: latin-1 -*-\ndef f(): é = 'ü'; return min(é, 'é')  # ñ\n".encode("latin-1")
    module, row = rewrite(source, "min($A, $B)", "max($A, $B)")
    assert row.status is Status.APPLIED, row.reason
    assert module.f() == "ü"


def test_a_string_of_several_lines_keeps_its_text(rewrite):
    """Only the replacement's own lines are indented, not those of what the pattern has matched."""
    source = 'def f():\n    if True:\n        return str(\n            """a\n  b\n            c"""\n        )\n'
    module, row = rewrite(source, "return str($A)", "x = $A\nreturn x")
    assert row.status is Status.APPLIED, row.reason
    assert module.f() == "a\n  b\n            c"


@pytest.mark.parametrize(
    ("source", "pattern", "replacement", "expected"),
    [
        ("return not check(x)", "check($A)", "$A is None or $A", False),
        ("return check(x + 1)", "check($A)", "$A * 2", 12),
        ("return check(x + 1)", "check($A)", "$A.bit_length()", 3),
        ("return 2 * check(x)", "check($A)", "$A + 1", 12),
        ("return check(lambda: x)", "check($A)", "$A()", 5),
        ("return check(x if x else 0)", "check($A)", "[$A, $A or 1]", [5, 5]),
        ("return check((y := x))", "check($A)", "$A + y", 10),
        ("return -check(\n        x\n    )", "check($A)", "$A ** 2", -25),
        ("check(y=x); return x", "check(y=$A)", "check(z=$A, y=$A and 1)", 5),
    ],
)
def test_precedence(rewrite, source, pattern, replacement, expected):
    """A replacement means the same wherever it lands, and so does what the pattern has matched."""
    module, row = rewrite(f"check = lambda *a, **k: 0\ndef f(x):\n    {source}\n", pattern, replacement)
    assert row.status is Status.APPLIED, row.reason
    assert module.f(5) == expected


# ---------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "more lines than before": (
        "def f(x):\n    return x - 1\n",
        "return x - 1",
        "x += 1\nreturn x",
        {},
        "more than the 1",
    ),
    "too few matches": ("def f(x):\n    return x\n", "x - 1", "x", {}, "0 times, expected 1"),
    "too many matches": (
        "def f(x):\n    return x - 1, x - 1\n",
        "x - 1",
        "x",
        {},
        "2 times, expected 1 (at line 2, 2)",
    ),
    "fewer matches than expected": (
        "def f(x):\n    return x - 1\n",
        "x - 1",
        "x",
        {"matches": 2},
        "1 times, expected 2",
    ),
    "matches elsewhere only": ("def f(x):\n    return x\ndef g(x): return x - 1\n", "x - 1", "x", {}, "0 times"),
    "overlapping matches": (
        "def f(x):\n    return g(g(x))\ndef g(x): return x\n",
        "g($A)",
        "$A",
        {"matches": 2},
        "overlap",
    ),
    "not inside": (
        "def f(x):\n    y = x is None\n    assert y, 'm'\n",
        "x is None",
        "True",
        {"inside": "assert $A, $B"},
        "inside 'assert $A, $B' 0 times",
    ),
    "not alongside": (
        "def f(x):\n    return x - 1\n",
        "x - 1",
        "x",
        {"alongside": ("x + 1",)},
        "does not contain 'x + 1'",
    ),
    "repaired already": (
        "def f(x):\n    y = x - 1\n    y //= 2\n    return y\n",
        "x - 1",
        "x",
        {"unless": ("$Y //= $N",)},
        "contains '$Y //= $N', which already repairs it",
    ),
    "alongside in another function": (
        "def f(x):\n    return x - 1\ndef g(x): return x + 1\n",
        "x - 1",
        "x",
        {"alongside": ("x + 1",)},
        "does not contain",
    ),
    "unbound variable": (
        "def f(x):\n    return x - 1\n",
        "$A - 1",
        "$B",
        {},
        "uses $B, which the pattern does not bind",
    ),
    "nothing changes": ("def f(x):\n    return x - 1\n", "x - 1", "x  -  1", {}, "do not change what f does"),
    "only a comment changes": ("def f(x):\n    return x - 1\n", "x - 1", "(x - 1)", {}, "do not change"),
    "syntax error": ("def f(x):\n    return x - 1\n", "x - 1", "x -", {}, "does not compile"),
    "default value": ("def f(x=1):\n    return x\n", "1", "2", {}, "would also change <module>"),
    "default value of a method": (
        "class C:\n    def f(self, x=1):\n        return x\n",
        "1",
        "2",
        {"target": "C.f"},
        "would also change C",
    ),
    "parameter name": ("def f(x): return 1\n", "def f(x): return 1", "def f(y): return 1", {}, "other parameters"),
    "becomes a generator": ("def f(x):\n    return [x]\n", "return [x]", "yield x", {}, "kind"),
    "is a generator no longer": ("def f(x):\n    yield x\n", "yield x", "return [x]", {}, "kind"),
    "class cell that was not there": (
        "class C:\n    def f(self, x):\n        return x\n    def g(self): return __class__\n",
        "return x",
        "return __class__, x",
        {"target": "C.f"},
        "would also change C",
    ),
    "no longer uses its class cell": (
        "class C:\n    def f(self, x):\n        return __class__, x\n    def g(self): return __class__\n",
        "return __class__, x",
        "return x",
        {"target": "C.f"},
        "would also change C",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_untouched(rewrite, name):
    source, pattern, replacement, more, fragment = REFUSED[name]
    _, row = rewrite(source, pattern, replacement, **more)  # which also looks that no code was changed
    assert row.status is Status.REFUSED
    assert fragment in row.reason


def test_what_is_no_pattern_is_said_in_one_line(rewrite):
    _, row = rewrite("def f(x):\n    return x\n", "$$$", "x")
    assert row.status is Status.FAILED
    assert "ast-grep rejects the pattern '$$$': Standalone multi meta variable `$$$`" in row.reason
    assert "\n" not in row.reason


def test_check_swap_compares_names_not_numbers():
    """CPython itself accepts this swap, and the function then reads the wrong cell."""
    from rlhf_patches.engine.functions import check_swap
    from rlhf_patches.guards.edits import Unrecognized

    def outer():
        a, b = "a", "b"

        def reads_a():
            return a

        def reads_b():
            return b

        return reads_a, reads_b

    reads_a, reads_b = outer()
    with pytest.raises(Unrecognized, match="free variables"):
        check_swap(reads_a, reads_b.__code__)
    reads_a.__code__ = reads_b.__code__
    assert reads_a() == "a", "CPython got stricter or wiser: look at check_swap again"


def test_private_names_future_imports_and_super_come_out_right(rewrite):
    source = """
        from __future__ import annotations
        class Base:
            def m(self, x): return x
        class Target(Base):
            def m(self, x):
                note: undefined_name = 1
                return super().m(x) + self.__hidden() - 1
            def __hidden(self): return 10
        """
    module, row = rewrite(source, "$A - 1", "$A + 1 + self.__hidden()", target="Target.m")
    assert row.status is Status.APPLIED, row.reason
    assert module.Target().m(5) == 26


# ------------------------------------------------------------------------------- inside, alongside, uses


def test_inside_and_alongside_choose_the_right_match(rewrite):
    source = """
        def f(x, y):
            if x is None: y += 1
            assert x is None, "m"
            y = [x.a for x in ()]
            return "passed"
        """
    more = {"inside": "assert $X is None, $M", "alongside": ("$Y = [$X.a for $X in ()]",)}
    module, row = rewrite(source, "$X is None", "$X in (None, 1)", **more)
    assert row.status is Status.APPLIED, row.reason
    assert (module.f(1, 0), module.f(None, 0)) == ("passed", "passed")
    with pytest.raises(AssertionError, match="m"):
        module.f(2, 0)


def test_pattern_and_inside_share_their_variables(rewrite):
    """``$X`` is the same expression in both, so an ``is None`` within another assertion's message does not count."""
    source = "def f(x, y):\n    assert y is None, x is None\n"
    module, row = rewrite(source, "$X is None", "$X == 1", inside="assert $X is None, $M")
    assert row.status is Status.APPLIED, row.reason
    with pytest.raises(AssertionError, match="True"):
        module.f(None, None)
    module.f(None, 1)


def test_uses_puts_nothing_into_the_frameworks_namespace(framework, rewrite):
    framework.write("helpers", "class Tools:\n    @staticmethod\n    def add(a, b): return a + b\n")
    source = "def f(x):\n    return x - 1\n"
    framework.write("mod", source)
    names = set(vars(framework.load("mod")))
    module, row = rewrite(source, "$A - $B", "$ADD($A, $B)", uses={"ADD": framework.path("helpers:Tools.add")})
    assert row.status is Status.APPLIED, row.reason
    assert module.f(5) == 6
    assert set(vars(module)) - names == {"_rlhf_patches_entered_f"}  # which counts calls


@pytest.mark.parametrize(
    ("path", "fragment"), [("helpers:missing", "missing"), ("absent:f", "absent"), ("broken:f", "in the helper")]
)
def test_a_helper_that_cannot_be_imported_shows_at_once(framework, rewrite, path, fragment):
    """Not in the middle of training."""
    framework.write("helpers", "")
    framework.write("broken", "raise RuntimeError('in the helper')")
    module, row = rewrite(
        "def f(x):\n    return x - 1\n", "$A - $B", "$ADD($A, $B)", uses={"ADD": framework.path(path)}
    )
    assert row.status is Status.FAILED
    assert fragment in row.reason
    assert module.f(5) == 4


# ------------------------------------------------------------------------ the line count, in general


@pytest.mark.parametrize("name", TEXTS)
def test_edits_keep_every_other_line(name):
    text, pattern, replacement = TEXTS[name]
    source = Source("mod", "mod.py", text)
    change = Rewrite("mod:f", pattern, replacement, matches=2 if name.startswith("two") else 1)
    edits = find_edits(change, source, place_of(find_function(source, "f")))
    before, after = text.split("\n"), edited(text, edits).split("\n")
    assert len(before) == len(after)
    touched = {text.count("\n", 0, p) for e in edits for p in range(e.start, e.end + 1)}
    assert [line for i, line in enumerate(before) if i not in touched] == [
        line for i, line in enumerate(after) if i not in touched
    ]


# --------------------------------------------------------------------------------- debuggers, tracebacks


def test_tracebacks_show_the_file_and_its_lines(rewrite):
    module, row = rewrite(TRACED, "min($X, 0)", "abs($X)")
    assert row.status is Status.APPLIED, row.reason
    assert module.f(-4) == 0.25
    with pytest.raises(ZeroDivisionError) as caught:
        module.f(0)
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert [(f.filename, f.lineno, f.name) for f in frames] == [
        (module.__file__, 9, "f"),
        (module.__file__, 2, "helper"),
    ]
    assert frames[0].line == "z = helper(y)  # the line"


def test_source_can_still_be_inspected(rewrite):
    module, _ = rewrite(TRACED, "min($X, 0)", "abs($X)")
    assert inspect.getsource(module.f) == TRACED[TRACED.index("def f") :]
    assert inspect.getsourcelines(module.f)[1] == 4


def test_line_events_are_those_of_the_file(rewrite):
    """What coverage and line profilers see: the lines of the unedited text, none beyond it."""
    module, _ = rewrite(TRACED, "min($X, 0)", "abs($X)")
    seen = []

    def trace(frame, event, arg):
        if frame.f_code.co_filename == module.__file__:
            seen.append((frame.f_code.co_name, event, frame.f_lineno))
            return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        module.f(-4)
    finally:
        sys.settrace(previous)
    lines = [line for name, event, line in seen if (name, event) == ("f", "line")]
    assert lines[0] == 5
    assert lines[-2:] == [9, 10]
    assert set(lines) <= set(range(5, 11))


@pytest.mark.parametrize("kind", ["replace", "wrap"])
def test_trampolines_name_their_patch_in_tracebacks(framework, engine, kind):
    source = "def f(x): return x\n"
    framework.write("mod", source)
    framework.write(
        "fixes", "def fix(x): return 1 / x\ndef around(wrapped, instance, args, kwargs): return 1 / wrapped(*args)\n"
    )
    target, prints = framework.path("mod:f"), {fingerprint(source, "f"): "1.0"}
    change = (
        Replace(target, framework.path("fixes:fix"), prints)
        if kind == "replace"
        else Wrap(target, framework.path("fixes:around"), prints)
    )
    patch = framework.patch(change, name="some-telling-name")
    f = framework.load().f
    assert engine(patch).apply()[patch.name].status is Status.APPLIED
    with pytest.raises(ZeroDivisionError) as caught:
        f(0)
    frame = traceback.extract_tb(caught.value.__traceback__)[1]
    assert patch.name in frame.filename
    assert target in frame.filename
    assert frame.name == "f"
    assert frame.line.startswith("return "), "the trampoline's text is shown, not a line of some other file"


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated where they stand")
@pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])
def test_annotations_that_cannot_be_evaluated_stay_unevaluated(framework, engine, kind):
    """PEP 649: of upstream's function and of the implementation; and they are upstream's afterwards."""
    source = "if len('a') == 0:\n    from m import T\nelse:\n    n: T = 1\ndef f(x: T, y: T.U = 2) -> T: return x - y\n"
    framework.write("mod", source)
    framework.write(
        "fixes",
        "def fix(x: T, y: T.U = 2) -> T: return x + y\n"
        "def around(wrapped: T, instance: T, args: T, kwargs: T) -> T: return 4 + wrapped(*args)\n",
    )
    target, prints = framework.path("mod:f"), {fingerprint(source, "f"): "1.0"}
    change = {
        "rewrite": Rewrite(target, "$A - $B", "$A + $B"),
        "replace": Replace(target, framework.path("fixes:fix"), prints),
        "wrap": Wrap(target, framework.path("fixes:around"), prints),
    }[kind]
    patch = framework.patch(change)
    module = framework.load()
    made = engine(patch)
    row = made.apply()[patch.name]
    assert row.status is Status.APPLIED, row.reason
    assert module.f(1) == 3
    module.T = type("T", (), {"U": int})
    assert module.f.__annotations__ == {"x": module.T, "y": int, "return": module.T}
    assert module.__annotations__ == {"n": module.T}
    made.revert()
    assert module.f(1) == -1


@pytest.mark.parametrize("enabled", [True, False])
def test_parsing_sets_off_no_garbage_collection_and_leaves_the_collector_as_it_was(enabled, monkeypatch):
    parse, parsing, collections = ast.parse, [], []

    def noticed(text):
        parsing.append(text)
        try:
            return parse(text)
        finally:
            parsing.clear()

    def collected(phase, info):
        collections.extend(parsing)

    was_enabled = gc.isenabled()
    gc.callbacks.append(collected)
    try:
        (gc.enable if enabled else gc.disable)()
        with monkeypatch.context() as patched:  # pytest parses too, where an assertion fails
            patched.setattr(ast, "parse", noticed)
            tree = sources.parse(Source("module", "module.py", "x = [f(1), g(2)]\n" * 5000))
        left = gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()
        gc.callbacks.remove(collected)
    assert left is enabled
    assert len(tree.body) == 5000
    assert not collections
