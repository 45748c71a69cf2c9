"""Finders that put themselves in front of ours, as those of frozen applications do: what they import we do not see."""

from __future__ import annotations

import json

import pytest

from tests.harness import toy_slime

ON = {"RLHF_PATCHES_AUTOLOAD": "1"}
STRICT = {**ON, "RLHF_PATCHES_STRICT": "1"}
VERIFY = {**ON, "RLHF_PATCHES_VERIFY": "1"}
# It finds what is in the folder, as an application's finder its own modules, and leaves the rest to others.
FROZEN = """
import importlib.machinery, sys
class Frozen:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, path) if name.startswith("slime") else None
sys.meta_path.insert(0, Frozen)
"""
LATER = "\nimport pluggy; print('applied' if '__import__' in model.train.__code__.co_names else 'untouched')"


@pytest.fixture
def run(installed, slime):
    def run(code, *flags, **settings):
        return installed.run(installed.python, *flags, "-c", code, cwd=slime, **settings)

    return run


@pytest.mark.parametrize(("settings", "status"), [(ON, 0), (STRICT, 120), (VERIFY, 120)])
def test_a_run_that_was_not_patched_says_so_at_its_end(run, settings, status):
    done = run(FROZEN + toy_slime.LOOK, **settings)
    assert (done.returncode, done.stdout) == (status, "untouched\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "[rlhf_patches] NOT ACTIVE: imported without the site hook (in front of it is __main__.Frozen): slime. "
    )


def test_also_where_that_finder_is_gone_again(run):
    done = run(f"{FROZEN}{toy_slime.IMPORT}\nsys.meta_path.remove(Frozen)", **STRICT)
    assert done.returncode == 120
    assert "NOT ACTIVE: imported without the site hook: slime. " in done.stderr


def test_what_is_done_at_exit_is_done_all_the_same(run, slime):
    """Handlers, finalizers and files that nobody closed; and a status of the user's own is a failure still."""
    code = f"""{FROZEN}{toy_slime.IMPORT}
import atexit, weakref
class Thing:
    def __del__(self): print("deleted")
thing, file = Thing(), open("left-open", "w")
file.write("all of it")
atexit.register(print, "exit handler", file=sys.stderr, flush=True)
weakref.finalize(thing, print, "finalized")
sys.exit(STATUS)"""
    for status in (0, 3):
        without = run(code.replace("STATUS", str(status)))
        (slime / "left-open").unlink()
        done = run(code.replace("STATUS", str(status)), **STRICT)
        assert (without.returncode, done.returncode) == (status, 120)
        assert done.stdout == without.stdout != ""
        assert (slime / "left-open").read_text() == "all of it"
        first, second = done.stderr.splitlines()
        assert first == "exit handler"
        assert "NOT ACTIVE" in second


@pytest.mark.parametrize("settings", [ON, STRICT])
def test_the_next_import_that_is_seen_patches(run, settings):
    done = run(FROZEN + toy_slime.IMPORT + LATER, **settings)
    assert (done.returncode, done.stdout, done.stderr) == (0, "applied\n", "")


def test_who_has_called_apply_knows_better(run):
    code = f"{FROZEN}{toy_slime.IMPORT}\nimport rlhf_patches; rlhf_patches.apply(only='slime-*')"
    said = f"{code}{LATER}; print({{row.status.value for row in rlhf_patches.report() if 'slime' not in row.name}})"
    done = run(said, **STRICT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "applied\n{'disabled'}\n", "")


STAND_INS = {
    "a module made by hand": "import sys, types; sys.modules['torch'] = types.ModuleType('torch')",
    "a spec without a loader": "import sys, types, importlib.machinery as m; sys.modules['torch'] = types.ModuleType("
    "'torch'); sys.modules['torch'].__spec__ = m.ModuleSpec('torch', None)",
    "no module": "import sys; sys.modules['torch'] = None; sys.modules['trl'] = object()",
}


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_stand_in_is_no_framework(run, kind):
    done = run(STAND_INS[kind], **STRICT)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------- the engine is there

APPLIED = f"""
import rlhf_patches, sys
rlhf_patches.apply(ARGUMENTS)
{FROZEN}{toy_slime.LOOK}
"""


@pytest.mark.parametrize(
    ("arguments", "settings", "status"),
    [("", {}, 0), ("strict=True", {}, 120), ("", {"RLHF_PATCHES_STRICT": "1"}, 120), ("strict=False", STRICT, 0)],
)
def test_a_patch_that_missed_its_import_is_said_at_the_end(run, slime, arguments, settings, status):
    report = slime / "report.jsonl"
    code = APPLIED.replace("ARGUMENTS", arguments)
    done = run(code, RLHF_PATCHES_LOG="warning", RLHF_PATCHES_REPORT=str(report), **settings)
    assert (done.returncode, done.stdout) == (status, "untouched\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert f"{toy_slime.MODEL[:-3].replace('/', '.')} was imported without the import hooks; call apply() again" in line
    (row,) = [row for row in json.loads(report.read_text())["patches"] if row["name"] == toy_slime.PATCH]
    assert row["status"] == "failed"


def test_a_report_has_seen_it_before(run):
    done = run(APPLIED.replace("ARGUMENTS", "strict=True") + "rlhf_patches.report()\n", RLHF_PATCHES_LOG="warning")
    assert done.returncode == 120


def test_a_second_apply_makes_it_good(run):
    code = APPLIED.replace("ARGUMENTS", "strict=True") + "rlhf_patches.apply()\n"
    done = run(code, RLHF_PATCHES_LOG="warning")
    assert (done.returncode, done.stderr) == (0, "")


def test_standard_error_may_be_closed(run):
    done = run(f"{FROZEN}{toy_slime.IMPORT}\nsys.stderr.close(); sys.stderr = None", **STRICT)
    assert (done.returncode, done.stderr) == (120, "")
