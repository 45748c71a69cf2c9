"""The three kinds of change, applied and reverted, on the plainest target."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import toy_slime

from rlhf_patches import Replace, Rewrite, Status, Wrap, rewriting
from rlhf_patches.sources import fingerprint

SOURCE = """\
def add(a, b=1, *, c=0):
    '''Adds.'''
    total = a - b  # the bug
    return total + c
"""


@pytest.fixture
def kinds(framework, monkeypatch):
    framework.write("mod", SOURCE)
    framework.write(
        "fixes",
        """
        def add(a, b=1, *, c=0):
            return a + b + c

        def around(wrapped, instance, args, kwargs):
            assert instance is None
            a, b = args
            return wrapped(a, -b, **kwargs)
        """,
    )
    target = framework.path("mod:add")
    return {
        "rewrite": Rewrite(target=target, pattern="$A - $B", replacement="$A + $B"),
        "replace": Replace(target, framework.path("fixes:add"), (fingerprint(SOURCE, "add"),)),
        "wrap": Wrap(target, framework.path("fixes:around"), fingerprints=(fingerprint(SOURCE, "add"),)),
    }


@pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])
@pytest.mark.parametrize("imported_first", [True, False])
def test_applies_everywhere_and_reverts(framework, engine, kinds, kind, imported_first):
    patch = framework.patch(kinds[kind])
    made = engine(patch)
    if not imported_first:
        assert made.apply()[patch.name].status is Status.PENDING
    add = framework.load().add
    before = add.__code__
    report = made.apply()
    assert report[patch.name].status is Status.APPLIED
    assert report[patch.name].version == "1.0"
    assert (add(5, 2), add(5), add(5, c=10)) == (7, 6, 16)
    made.revert()
    assert (add(5, 2), add(5), add(5, c=10)) == (3, 4, 14)
    if imported_first:
        assert add.__code__ is before
    assert made.report()[patch.name].status is Status.DISABLED


def test_listing_patches_imports_no_implementation(framework, engine, kinds):
    made = engine(framework.patch(kinds["replace"]))
    made.apply()
    assert framework.path("fixes") not in sys.modules


def test_no_test_of_ours_can_wait_for_ever(pytestconfig):
    assert float(pytestconfig.getini("faulthandler_timeout")) > 0
    assert pytestconfig.getini("faulthandler_exit_on_timeout")


IN_A_SUBINTERPRETER = """
import sys
try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
run(interpreters.create(), sys.stdin.read())
"""
NOT_INSTALLED = "import sys; sys.modules['ast_grep_py'] = None; exec(sys.stdin.read())"
WITHOUT_AST_GREP = f"""
import rlhf_patches
row = rlhf_patches.apply()[{toy_slime.PATCH!r}]
{toy_slime.LOOK}
assert row == rlhf_patches.report()[row.name], "what fails on import is said before it"
print(row.status, row.reason)
try:
    rlhf_patches.apply(strict=True)
except rlhf_patches.PatchError as error:
    print(error)
assert rlhf_patches.revert()[row.name].status == "disabled"
"""


@pytest.mark.parametrize(
    "interpreter",
    [
        pytest.param(
            IN_A_SUBINTERPRETER,
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="all share one GIL, and ast_grep_py is there"),
            id="subinterpreter",
        ),
        pytest.param(NOT_INSTALLED, id="not installed"),
    ],
)
def test_where_ast_grep_cannot_be_imported_rewrites_fail_and_say_so(tmp_path, interpreter):
    bare = subprocess.run(
        [sys.executable, "-c", interpreter], input="import hashlib", text=True, stderr=subprocess.PIPE
    )
    if bare.returncode:
        pytest.skip(f"this Python crashes without us, where a subinterpreter imports hashlib: {bare.stderr}")
    done = subprocess.run(
        [sys.executable, "-c", interpreter],
        input=WITHOUT_AST_GREP,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(toy_slime.write(tmp_path)), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    looked, said, strict = done.stdout.splitlines()
    assert looked == "untouched"
    why = "ImportError: ast_grep_py, which finds the code to rewrite, cannot be imported here: "
    assert said.startswith(f"failed {why}")
    assert said.endswith("; nothing was changed")
    assert strict.startswith(f"strict mode, and {toy_slime.PATCH} was {said.replace('failed', 'failed:', 1)}")


def test_where_ast_grep_cannot_be_imported_wraps_and_replacements_do_not_care(framework, engine, monkeypatch):
    text = "def f(): return 'old'\n"
    framework.write("mod", text)
    framework.write("fix", "def f(): return 'new'\n")
    monkeypatch.setattr(rewriting, "_without_ast_grep", "it cannot be imported")
    made = engine(framework.patch(Replace(framework.path("mod:f"), framework.path("fix:f"), (fingerprint(text, "f"),))))
    assert [row.status for row in made.apply()] == [Status.PENDING]
    assert framework.load().f() == "new"
