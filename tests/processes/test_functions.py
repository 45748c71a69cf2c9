"""Functions that run hot before they are patched, each in a process that has never run them."""

from __future__ import annotations

import sys

import pytest

from tests.harness import toy_slime
from tests.harness.forks import Forks
from tests.harness.look_alikes import write_metadata

# -------------------------------------------------------------------------------------------- hot functions

LOADED = """
import signal, sys
from rlhf_patches import Guard, Patch, Replace, Rewrite, Status, Variant, Wrap, fingerprint
from rlhf_patches.engine.engine import Engine
from rlhf_patches.definitions.registry import Registered
"""
HOT = """
signal.alarm(120)
sys.path.insert(0, sys.argv[1])
import mod

kind, target = sys.argv[2:4]
text = open(mod.__file__).read()
if kind == "rewrite":
    change = Rewrite("mod:" + target, "'old'", "'renewed'")
else:
    change = Wrap("mod:" + target, "fixes:" + target.rpartition(".")[2], {fingerprint(text, target): "1.0"})
patch = Patch("hot-bug", "s", "s", "s", "s", ("r",), (Variant(Guard("no-such-distribution", ""), (change,)),), "r")
engine = Engine(load=lambda: ([Registered(patch, "t")], []))

class Sub(mod.C):
    pass

def loop(n):
    said = set()
    for _ in range(n):
        for cls in (mod.C, Sub):
            c = cls(1)
            said.add((c.v, c.p, c[0], c.m(), c.missing))
    return said

def traced(n):
    sys.settrace(lambda frame, event, arg: traced_line)
    try:
        return loop(n)
    finally:
        sys.settrace(None)

def traced_line(frame, event, arg):
    return traced_line

old, new = loop(3000), None
traced(20)
for round in range(5):
    row = engine.apply()["hot-bug"]
    assert row.status is Status.APPLIED, row
    for n in (1, 3000):
        found = loop(n)
        assert new is None or found == new
        new = found
    assert traced(3) == new
    engine.revert()
    assert loop(3000) == old
assert old != new, (old, new)
print("fine", sorted(new))
"""

HOT_MODULE = """
class C:
    def __init__(self, a, b=2):
        super().__init__()
        self.v = 'old'
    @property
    def p(self): return 'old'
    def __getitem__(self, i): return 'old'
    def m(self): return 'old'
    def __getattr__(self, name): return 'old'
"""
HOT_FIXES = """
def __init__(wrapped, self, args, kwargs):
    wrapped(*args, **kwargs)
    self.v = 'renewed'
def p(wrapped, self, args, kwargs): return wrapped(*args).replace('old', 'renewed')
__getitem__ = m = __getattr__ = p
"""


@pytest.fixture(scope="module")
def hot():
    """Runs it."""
    made = Forks(LOADED, HOT)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["rewrite", "wrap"])
@pytest.mark.parametrize(("position", "name"), list(enumerate(["__init__", "p", "__getitem__", "m", "__getattr__"])))
def test_hot_functions(hot, tmp_path, kind, position, name):
    """The interpreter caches these calls per class; a stale cache would run old code, or crash (3.13, ``__init__``)."""
    (tmp_path / "mod.py").write_text(HOT_MODULE)
    (tmp_path / "fixes.py").write_text(HOT_FIXES)
    status, said = hot.run(str(tmp_path), kind, f"C.{name}")
    expected = tuple("renewed" if i == position else "old" for i in range(5))
    assert (status, said.strip()) == (0, f"fine {[expected]}")


# -------------------------------------------------------------------------------------------- columns

WITHOUT = {"PYTHONNODEBUGRANGES": "1"}
STRICT = {"RLHF_PATCHES_AUTOLOAD": "1", "RLHF_PATCHES_STRICT": "1"}
COMPILE = ("-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "slime")


@pytest.mark.parametrize(("compiled", "run"), [(WITHOUT, {}), ({}, WITHOUT), (WITHOUT, WITHOUT), ({}, {})])
def test_bytecode_with_and_without_columns(installed, slime, compiled, run):
    """An image may be built without columns, from Python 3.11 on; the process that patches has its own setting."""
    done = installed.run(installed.python, *COMPILE, cwd=slime, **compiled)
    assert (done.returncode, list(slime.rglob("model.*.pyc")) != []) == (0, True), done.stderr
    done = installed.run(installed.python, "-c", toy_slime.LOOK, cwd=slime, **STRICT, **run)
    assert (done.returncode, done.stdout, done.stderr) == (0, "applied\n", "")


EDITS = {
    "does something else": ("for chunk in model", "for chunk in model[1:]"),
    "another constant": ("must be None", "must be 0"),
    "in another line": ("[chunk.no_sync", "[\n        chunk.no_sync"),
    "another name": ("[chunk.no_sync for chunk", "[piece.no_sync for piece"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_file_is_noticed_without_columns(installed, slime, edit):
    if edit == "in another line" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 takes code for equal whose lines differ within the function")
    assert installed.run(installed.python, *COMPILE, cwd=slime, **WITHOUT).returncode == 0
    model, (old, new) = slime / toy_slime.MODEL, EDITS[edit]
    assert old in model.read_text()
    model.write_text(model.read_text().replace(old, new))
    write_metadata(slime, "slime", "0.1.0")  # affected, so that it is refused
    done = installed.run(installed.python, "-c", toy_slime.LOOK, cwd=slime, **STRICT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "was edited after its import" in done.stderr
