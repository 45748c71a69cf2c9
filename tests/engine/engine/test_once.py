"""What one `apply()` and one import read, parse and compile once, however many patches look at it."""

from __future__ import annotations

import ast
import builtins
import collections
import fnmatch
import importlib.machinery
import sys

import pytest

from rlhf_patches import Replace, Rewrite, Status, Wrap, fingerprint, settings

SOURCE = """\
def f(a):
    return a - 1, a - 2

def g(a):
    return a - 3

def h(a):
    return a - 4

def k(a):
    return a - 5
"""
PARSED, COMPILED, READ = "parsed", "compiled", "read"


@pytest.fixture
def counts(framework, monkeypatch):
    """How often the real functions were called: per module for its text, else by name."""
    counted: collections.Counter[object] = collections.Counter()
    names = {str(framework.site / framework.name / f"{name}.py"): name for name in ("mod", "other")}
    texts = {}
    compile_, parse, read, expand = builtins.compile, ast.parse, settings.from_environment, fnmatch.filter
    get_data = importlib.machinery.SourceFileLoader.get_data

    def counted_compile(source, filename, mode, flags=0, dont_inherit=False, optimize=-1, **rest):
        # The import system itself compiles bytes.
        if filename in names and isinstance(source, str):
            counted[COMPILED, names[filename], source] += 1
        return compile_(source, filename, mode, flags, True, optimize, **rest)

    def counted_parse(source, *arguments, **keywords):
        if source in texts:
            counted[PARSED, texts[source]] += 1
        return parse(source, *arguments, **keywords)

    def counted_get_data(self, path):
        data = get_data(self, path)
        if path in names and "importlib" not in sys._getframe(1).f_code.co_filename:  # not the import system's own
            texts[data.decode()] = names[path]
            counted[READ, names[path]] += 1
        return data

    def counted_read(*arguments, **keywords):
        counted["settings"] += 1
        return read(*arguments, **keywords)

    def counted_expand(*arguments):
        counted["globs"] += 1
        return expand(*arguments)

    monkeypatch.setattr(builtins, "compile", counted_compile)
    monkeypatch.setattr(ast, "parse", counted_parse)
    monkeypatch.setattr(importlib.machinery.SourceFileLoader, "get_data", counted_get_data)
    monkeypatch.setattr(settings, "from_environment", counted_read)
    monkeypatch.setattr(fnmatch, "filter", counted_expand)
    return counted


@pytest.mark.parametrize("when", ["apply", "import"])
def test_each_thing_is_made_once(framework, engine, counts, monkeypatch, when):
    framework.write("fixes", "def new(a):\n    return a\ndef around(w, i, args, kwargs):\n    return w(*args)\n")
    framework.write("mod", SOURCE)
    framework.write("other", SOURCE + "# other\n")
    f, g, h, k = (framework.path(f"mod:{name}") for name in "fghk")
    prints = {fingerprint(SOURCE, name): "1.0" for name in "hk"}
    patches = [
        framework.patch(Rewrite(f, "a - 1", "a + 1"), Rewrite(g, "a - 3", "a + 3"), name="bug-1"),
        *(
            framework.patch(Rewrite(framework.path(f"other:{name}"), f"a - {n}", f"a + {n}"), name=f"other-{n}")
            for n, name in ((3, "g"), (4, "h"), (5, "k"))
        ),
        framework.patch(Rewrite(f, "a - 2", "a + 2"), name="bug-2"),
        framework.patch(Replace(h, framework.path("fixes:new"), prints), name="bug-4"),
        framework.patch(Wrap(k, framework.path("fixes:around"), prints), name="bug-5"),
    ]
    monkeypatch.setenv("RLHF_PATCHES_DISABLE", "bug-5,other-5")
    made = engine(*patches)
    if when == "import":
        made.apply()
        framework.load("other")
        counts.clear()
    else:
        framework.load()
        framework.load("other")
        assert not counts
        made.apply()
    assert framework.load().f(0) == (1, 2)
    module = framework.load()
    assert (module.g(0), module.h(0), module.k(0)) == (3, 0, -5)
    assert [row.name for row in made.report().patches if row.status is not Status.APPLIED] == ["other-5", "bug-5"]
    once = [(READ, "mod"), (PARSED, "mod"), "settings"]
    if when == "apply":
        once += [(READ, "other"), (PARSED, "other")]
    assert {what: counts[what] for what in once} == dict.fromkeys(once, 1)
    compiled = {what: times for what, times in counts.items() if what[0] == COMPILED}
    assert set(compiled.values()) == {1}
    # As it is on disk, with all of the first patch, and with the second one besides in their common function; and where
    # the slice of a function is not known, once more for each of the three that is counted.
    assert sum(times for (_, name, _), times in compiled.items() if name == "mod") == 6
    assert counts["globs"] == 2  # the two names in RLHF_PATCHES_DISABLE
