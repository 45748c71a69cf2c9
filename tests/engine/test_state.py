"""One process's patches in plain values, and what is said when processes differ."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import toy_slime

from rlhf_patches.state import code_fingerprint, differences

STATE = "import json; from rlhf_patches.state import process_state; print(json.dumps(process_state()))"


@pytest.fixture
def state(installed, tmp_path):
    slime = toy_slime.write(tmp_path)

    def of(before: str, **variables: str):
        return json.loads(installed.code(f"{before}\n{STATE}", cwd=slime, **variables))

    return of


def test_states_of_processes_that_do_the_same_are_equal(state):
    on = {"RLHF_PATCHES_AUTOLOAD": "1"}
    imported, hooked = state(toy_slime.IMPORT, **on), state("", **on)
    assert imported["active"]
    assert hooked["active"], "the hook was still waiting; asking loads the engine, as an import would"
    assert imported["pid"] != hooked["pid"]
    assert imported["patches"][toy_slime.PATCH]["code"]
    assert hooked["patches"][toy_slime.PATCH]["code"] is None
    assert differences({"a": imported, "b": hooked}) is None
    again = state(toy_slime.IMPORT, PYTHONHASHSEED="7", **on)
    assert again["patches"][toy_slime.PATCH] == imported["patches"][toy_slime.PATCH]


def test_what_differs_is_said_with_the_names_of_the_processes(state):
    on = {"RLHF_PATCHES_AUTOLOAD": "1"}
    good = state(toy_slime.IMPORT, **on)
    disabled = state(toy_slime.IMPORT, RLHF_PATCHES_DISABLE="slime-*", **on)
    idle = state("")
    assert not idle["active"]
    text = differences({**{f"rank {i}": good for i in range(6)}, "rank 6": disabled})
    assert text.splitlines() == [
        "slime-no-sync-reentry:",
        f"  applied ({good['patches'][toy_slime.PATCH]['reason']}): rank 0, rank 1, rank 2, rank 3 and 2 more",
        "  disabled (disabled by RLHF_PATCHES_DISABLE): rank 6",
    ]

    other = {**good, "python": "3.9.1", "patches": {**good["patches"]}}
    other["patches"][toy_slime.PATCH] = {**good["patches"][toy_slime.PATCH], "code": "0123456789abcdef"}
    del other["patches"]["verl-no-sync-reentry"]
    text = differences({"a": good, "b": other})
    assert "python:\n" in text
    assert "  3.9.1: b" in text
    assert "applied, as code 0123456789abcdef: b" in text
    assert "unknown (no installed plugin brings this patch): b" in text


def test_a_wrong_variable_is_the_process_own_error(installed, tmp_path):
    code = f"try:\n {toy_slime.IMPORT}\nexcept Exception: pass\n{STATE}"
    wrong = {"RLHF_PATCHES_AUTOLOAD": "1", "RLHF_PATCHES_ONLY": "slime-no-sink-reentry"}
    done = installed.run(installed.python, "-c", code, cwd=toy_slime.write(tmp_path), **wrong)
    assert done.returncode == 1
    assert "did you mean 'slime-no-sync-reentry'?" in done.stderr


def test_a_fingerprint_is_of_what_the_code_does():
    def compiled(text: str, filename: str = "a.py"):
        return code_fingerprint(compile(text, filename, "exec", dont_inherit=True))

    text = "def f(x):\n    return x in {'a', 'b', 'c'} or (lambda: (1, x))()\n"
    assert compiled(text) == compiled(text, "elsewhere.py")
    changes = [("'a'", "'d'"), ("(1, x)", "(1.0, x)"), ("(1, x)", "(True, x)"), ("f(x)", "f(x, y)"), (" or ", " and ")]
    for change in changes:
        assert compiled(text.replace(*change)) != compiled(text)
    code = f"from rlhf_patches.state import *; print(code_fingerprint(compile({text!r}, 'b.py', 'exec')))"
    for seed in "123":  # the order of a set's items
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == compiled(text)
