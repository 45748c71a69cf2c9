"""The three kinds of change, under ``python -O`` and on the plainest target, in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness import toy_slime

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
assert rlhf_patches.apply()[{toy_slime.PATCH!r}].status == "pending", "a text that is known takes no ast-grep"
{toy_slime.LOOK}
row = rlhf_patches.report()[{toy_slime.PATCH!r}]
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
    why = "ImportError: ast_grep_py, which locates the code to rewrite, cannot be imported: "
    assert said.startswith(f"failed {why}")
    assert said.endswith("; nothing was changed")
    assert strict.startswith(f"strict mode: {toy_slime.PATCH} was {said.replace('failed', 'failed:', 1)}")
