"""What rlhf_patches brings for the tests of a patch: the contract as a class, and the fixture ``apply_patch``.

Run by pytest in a process of its own, on a small distribution: right patches pass, and of each wrong one the test
fails that is there for it, and no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile

import pytest

from rlhf_patches import Rewrite
from rlhf_patches.testing import PatchContract
from rlhf_patches.testing.cases import write_metadata
from tests.harness.nested_pytest import alone
from tests.harness.once import once

FUNCTION = """
def {name}(losses, mask):
    total = sum(loss * keep for loss, keep in zip(losses, mask))
    return total / len(losses)
"""
IN_ONE_LINE = """
\f
def short(losses, mask, note="\u00e4"): return sum(losses) / len(losses)
"""
NAMES = ("mean", "wrapped", "replaced", "advised", "loose", "kept", "lost", "held")
METADATA = "Metadata-Version: 2.1\nName: toy-framework\nVersion: 1.2\n"
FIXED = FUNCTION.format(name="mean").replace("len(losses)", "sum(mask)")
REPAIRS = """
def around(wrapped, instance, args, kwargs):
    losses, mask = args
    return wrapped(losses, mask, **kwargs) * len(losses) / sum(mask)

def instead(losses, mask):
    return sum(loss * keep for loss, keep in zip(losses, mask)) / sum(mask)

def spoils(wrapped, instance, args, kwargs):
    from toy import losses

    losses.lost.__code__ = (lambda losses, mask: None).__code__
    return 2.0
"""
WAITS = """
import threading

lock = threading.Lock()

def around(wrapped, instance, args, kwargs):
    with lock:
        return wrapped(*args, **kwargs) * len(args[0]) / sum(args[1])
"""
WRITES = """
def around(wrapped, instance, args, kwargs):
    losses, mask = args
    losses[0] = losses[0]
    return wrapped(losses, mask, **kwargs) * len(losses) / sum(mask)
"""
TESTS = """
import dataclasses
import os
import pytest
import rlhf_patches
from rlhf_patches import Advice, CoInstalled, Guard, Patch, Replace, Rewrite, Shape, Variant, Wrap
from rlhf_patches.testing import PatchContract
from rlhf_patches.engine.ledger import Ledger

KNOWN = dict(summary="s", symptom="s", cause="c", references=("r",), obsolete_when="r")
TEXT = open(os.environ["LOSSES"], encoding="utf-8").read()
FINGERPRINT, SHORT = (rlhf_patches.fingerprint(TEXT, name) for name in ("replaced", "short"))
LOSSES, MASK = [1.0, 3.0, 0.0, 0.0], [1, 1, 0, 0]

def patch(name, change=None, versions=">=1.0,<2.0", distribution="toy-framework", **fields):
    change = change or Rewrite(f"toy.losses:{name}", "$TOTAL / len($LOSSES)", "$TOTAL / sum(mask)")
    return Patch(f"toy-{name}", repair="r", variants=(Variant(Guard(distribution, versions), (change,)),),
                 **{**KNOWN, **fields})

def beside(versions):
    guard = Guard("toy-framework", ">=1.0,<2.0", co_installed=CoInstalled("toy-framework-2", versions, package="toy"))
    change = Rewrite("toy.losses:mean", "$TOTAL / len($LOSSES)", "$TOTAL / sum(mask)")
    return Patch("toy-beside", repair="r", variants=(Variant(guard, (change,)),), **KNOWN)

MEAN = patch("mean")
WRAPPED = Wrap("toy.losses:wrapped", "repairs:around", signature="(losses, mask)", signature_suffices="any body")

class TestRight(PatchContract):
    patch = MEAN
    releases = ("fixed", "toy.whl")

class TestBeside(PatchContract):
    patch = beside(">=3,<=5")

class TestBesideAny(PatchContract):
    patch = beside(">=3")

class TestWrap(PatchContract):
    patch = patch("wrapped", WRAPPED)

class TestReplace(PatchContract):
    patch = patch("replaced", Replace("toy.losses:replaced", "repairs:instead", {FINGERPRINT: "1.4"}))

class TestShort(PatchContract):
    patch = patch("short", Wrap("toy.losses:short", "repairs:around", {SHORT: "1.4"}))

class TestAdvice(PatchContract):
    shape = Shape("toy.losses:advised", "$TOTAL / len($LOSSES)")
    patch = Advice("toy-advised", what_to_do="w", variants=(Variant(Guard("toy-framework", "<2.0,>=1.0"), (shape,)),),
                   **KNOWN)

class TestUnfinished(PatchContract):
    patch = dataclasses.replace(MEAN, references=("TODO: the issue",), symptom="TODO")

class TestWideShape(PatchContract):
    patch = patch("loose", Rewrite("toy.losses:loose", "$ANY", "2.0", inside="return $B"))

class TestOtherShape(PatchContract):
    patch = patch("mean", Rewrite("toy.losses:mean", "$TOTAL / max($LOSSES)", "$TOTAL / sum(mask)"))

class TestOpenRange(PatchContract):
    patch = patch("mean", versions="")

class TestOpenOnPurpose(PatchContract):
    patch = patch("mean", versions=">=1.0")
    open_range = "it has no releases"

class TestLongRange(PatchContract):
    patch = patch("mean", versions=">=1.0,<3.0")
    releases = ("fixed",)

class TestShortRange(PatchContract):
    patch = patch("mean", versions=">=1.0,<1.4")

class TestNoImplementation(PatchContract):
    patch = patch("wrapped", dataclasses.replace(WRAPPED, implementation="repairs:no_such"))

class TestAbsent(PatchContract):
    patch = patch("absent", Rewrite("nothing.losses:mean", "$A", "$A"), distribution="no-such")

class TestCannotBeImported(PatchContract):
    patch = patch("mean", Rewrite("toy.on_a_gpu:mean", "$TOTAL / len($LOSSES)", "$TOTAL / sum(mask)"))

class TestNoSuchRelease(PatchContract):
    patch = MEAN
    releases = ("there/is/none.whl",)

class TestOtherRelease(PatchContract):
    patch = MEAN
    releases = ("other",)

class TestWaits(PatchContract):
    patch = patch("wrapped", dataclasses.replace(WRAPPED, implementation="waits:around"))

class TestWrites(PatchContract):
    patch = patch("wrapped", dataclasses.replace(WRAPPED, implementation="writes:around"))

RULE_COVERAGE = dict.fromkeys(
    ("minimal scope", "no side effects", "backward compatible", "no new blocking"), "test_of_this_module"
)

def test_of_this_module():
    pass

class TestHeld(PatchContract):
    patch = patch("mean", changes_numbers="On one rank nothing changes.")
    held = {**RULE_COVERAGE, "backward compatible": ("test_it_has_no_side_effects", "test_more.py::test_elsewhere"),
            "nothing changes": "because there is one number on one rank"}

class TestAdviceIsHeldByNothing(TestAdvice):
    held = {}

class TestRuleMissing(PatchContract):
    patch = MEAN
    held = {name: test for name, test in RULE_COVERAGE.items() if name != "no new blocking"}

class TestNoSuchTest(PatchContract):
    patch = MEAN
    held = {**RULE_COVERAGE, "no side effects": "test_of_another_module"}

class TestClaim(PatchContract):
    patch = TestHeld.patch
    held = RULE_COVERAGE

class TestNotSaid(PatchContract):
    patch = TestHeld.patch

class TestKept(PatchContract):
    patch = patch("kept")

    @pytest.fixture(autouse=True)
    def broken(self, monkeypatch):
        monkeypatch.setattr(Ledger, "remove", lambda self, name: [])

class TestFixture:
    def test_before(self):
        from toy.losses import mean
        assert mean(LOSSES, MASK) == 1.0

    def test_while_it_is_applied(self, apply_patch):
        from toy.losses import mean, wrapped
        before = rlhf_patches.report()
        rows = [apply_patch(MEAN), apply_patch(patch("wrapped", WRAPPED))]
        assert [row.name for row in rows] == ["toy-mean", "toy-wrapped"]
        assert {row.status for row in rows} == {rlhf_patches.Status.APPLIED}
        assert (mean(LOSSES, MASK), wrapped(LOSSES, MASK)) == (2.0, 2.0)
        others = [row for row in rlhf_patches.report() if row.name not in ("toy-mean", "toy-wrapped")]
        assert others == list(before)

    test_after = test_before

    def test_refused(self, apply_patch):
        apply_patch(patch("mean", Rewrite("toy.losses:mean", "$TOTAL / max($LOSSES)", "$TOTAL / sum(mask)")))

    def test_advice(self, apply_patch):
        apply_patch(TestAdvice.patch)

    def test_unknown(self, apply_patch):
        apply_patch("toy-mean")

    def test_spoiled(self, apply_patch):
        from toy.losses import lost
        spoils = dataclasses.replace(WRAPPED, target="toy.losses:lost", implementation="repairs:spoils")
        apply_patch(patch("lost", spoils))
        assert lost(LOSSES, MASK) == 2.0

    def test_disabled(self, apply_patch, monkeypatch):
        monkeypatch.setenv("RLHF_PATCHES_DISABLE", "toy-mean")
        apply_patch(MEAN)
"""
FIELDS, TEXT, EDITED = "fields_are_complete", "applies_to_the_text", "is_refused_where_the_text_is_another"
OUTSIDE, FIXED_RELEASE = "stays_away_from_versions_outside", "leaves_a_release_without_the_bug_alone"
BESIDE = "stays_away_beside_other_releases"
HERE = "is_applied_reverted_and_disabled"
BOUND, SIDE_EFFECTS = "what_it_waits_for_has_a_bound", "has_no_side_effects"
HOLDS = "what_holds_it_is_named"
OF_TEXT = (TEXT, EDITED, OUTSIDE)


@pytest.fixture(scope="module")
def outcomes(of_the_session):
    """Of each class: per test, what became of it and what was said."""
    return once(of_the_session / "contract", "contract", _outcomes)


def _outcomes(folder):
    losses = "".join(FUNCTION.format(name=name) for name in NAMES) + IN_ONE_LINE
    for where, version, text in ((folder, "1.4", losses), (folder / "fixed", "2.0", FIXED)):
        (where / "toy").mkdir(parents=True)
        (where / "toy" / "__init__.py").touch()
        (where / "toy" / "losses.py").write_text(text, encoding="utf-8")
        write_metadata(where, "toy-framework", version)
    (folder / "toy" / "on_a_gpu.py").write_text("import no_such_driver\n" + FUNCTION.format(name="mean"))
    (folder / "repairs.py").write_text(REPAIRS)
    (folder / "waits.py").write_text(WAITS)
    (folder / "writes.py").write_text(WRITES)
    (folder / "test_more.py").write_text("def test_elsewhere(): pass\n")
    (folder / "other" / "another").mkdir(parents=True)
    with zipfile.ZipFile(folder / "toy.whl", "w") as wheel:
        wheel.writestr("toy/losses.py", losses)
        wheel.writestr(
            "toy_framework-1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-framework\nVersion: 1.2\n"
        )
    (folder / "test_toy.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", *alone(folder), "--junitxml", "found.xml", "test_toy.py"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "LOSSES": str(folder / "toy" / "losses.py")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for case in ElementTree.parse(folder / "found.xml").iter("testcase"):
        of_class = found.setdefault(case.get("classname").rpartition(".")[2], {})
        name = case.get("name").partition("[")[0]
        became = [(part.tag, part.get("message") or "") for part in case] or [("passed", "")]
        of_class.setdefault(name, []).extend(became)
    return found


def became(outcomes, of_class, part):
    (found,) = [each for name, each in outcomes[of_class].items() if part in name]
    return [outcome for outcome, _ in found], " ".join(message for _, message in found)


@pytest.mark.one_python
@pytest.mark.parametrize("of_class", ["TestRight", "TestWrap", "TestReplace", "TestShort", "TestAdvice"])
def test_a_right_patch_passes(outcomes, of_class):
    releases = {"TestRight": 3}.get(of_class, 1)
    for part in (FIELDS, BOUND, SIDE_EFFECTS, HERE):
        assert became(outcomes, of_class, part)[0] == ["passed"]
    for part in OF_TEXT:
        found, said = became(outcomes, of_class, part)
        assert found.count("passed") == (2 if releases == 3 else 1) * (2 if part is OUTSIDE else 1), said
        assert set(found) == ({"passed", "skipped"} if releases == 3 else {"passed"})
        assert releases == 1 or "does not have the bug (>=1.0,<2.0); this test runs on the installed release" in said
    found, said = became(outcomes, of_class, FIXED_RELEASE)
    assert found.count("passed") == (releases == 3)
    what_to_do = "this test runs on fixed" if releases == 3 else f"name a release that does not have it, in {of_class}"
    assert f"has the bug; {what_to_do}" in said


def test_a_bug_of_two_releases_is_tried_beside_others(outcomes):
    assert became(outcomes, "TestBeside", BESIDE)[0] == ["passed", "passed"]
    assert became(outcomes, "TestRight", BESIDE)[0] == ["skipped"] * 6


WRONG = {
    "TestUnfinished": (FIELDS, "not written yet: symptom, references[0]"),
    "TestWideShape": (EDITED, "its shape guard is too wide; expected refused"),
    "TestOtherShape": (TEXT, "contains '$TOTAL / max($LOSSES)' 0 times, expected 1"),
    "TestBesideAny": (BESIDE, "with toy-framework-2 99999"),
    "TestOpenRange": (OUTSIDE, "which is open at the newer end: expected <= and a reviewed release"),
    "TestLongRange": (TEXT, "is refused"),
    "TestShortRange": (FIXED_RELEASE, "is the range too short?"),
    "TestNoImplementation": (HERE, "no_such"),
    "TestNoSuchRelease": (TEXT, "releases names 'there/is/none.whl'"),
    "TestOtherRelease": (TEXT, "releases names 'other': other has no toy, so it cannot test Patch toy-mean"),
    "TestWaits": (BOUND, "waits.py:7: `with lock` waits without a bound"),
    "TestWrites": (SIDE_EFFECTS, "writes.py:4: `losses[0]` is assigned to, which belongs to an argument"),
    "TestRuleMissing": (HOLDS, 'it has no "no new blocking": '),
    "TestNoSuchTest": (HOLDS, '"no side effects": there is no test test_of_another_module in this module'),
    "TestClaim": (HOLDS, "toy-mean states: On one rank nothing changes. (expected a key of words in it"),
    "TestKept": (HERE, "is reverted, but toy.losses:kept has other code than before"),
}
ALSO = {
    "TestOtherShape": {EDITED, HERE},
    "TestLongRange": {EDITED},
    "TestNoImplementation": {TEXT},
    "TestNoSuchRelease": {EDITED, OUTSIDE, BESIDE, FIXED_RELEASE},
    "TestOtherRelease": {EDITED, OUTSIDE, BESIDE, FIXED_RELEASE},
}
"""What follows from it."""


@pytest.mark.parametrize("of_class", WRONG)
def test_a_wrong_patch_fails_the_test_that_is_there_for_it(outcomes, of_class):
    part, message = WRONG[of_class]
    found, said = became(outcomes, of_class, part)
    assert "failure" in found
    assert message in said
    failed = {name for name, each in outcomes[of_class].items() if any(outcome == "failure" for outcome, _ in each)}
    assert failed == {name for name in outcomes[of_class] if any(p in name for p in {part, *ALSO.get(of_class, ())})}


def test_what_holds_a_patch_is_asked_for_and_is_no_failure_where_nothing_is_said(outcomes):
    assert became(outcomes, "TestHeld", HOLDS)[0] == ["passed"]
    found, said = became(outcomes, "TestNotSaid", HOLDS)
    assert found == ["skipped"]
    assert (
        'held is None: write held = {"minimal scope": ..., "no side effects": ..., "backward compatible": ...' in said
    )
    assert "- On one rank nothing changes." in said
    for of_class in ("TestAdvice", "TestAdviceIsHeldByNothing"):
        assert became(outcomes, of_class, HOLDS) == (["skipped"], "an advice changes no code")


def test_what_cannot_be_tried_here_is_skipped_and_says_what_to_do(outcomes):
    for part in (*OF_TEXT, FIXED_RELEASE, HERE):
        found, said = became(outcomes, "TestAbsent", part)
        assert set(found) == {"skipped"}
        assert "pip install 'no-such>=1.0,<2.0'" in said
    found, said = became(outcomes, "TestCannotBeImported", HERE)
    assert found == ["skipped"]
    assert "No module named 'no_such_driver'" in said
    assert became(outcomes, "TestCannotBeImported", TEXT)[0] == ["passed"]
    found, said = became(outcomes, "TestOpenOnPurpose", OUTSIDE)
    assert (sorted(found), "it has no releases" in said) == (["passed", "skipped"], True)


FIXTURE = {
    "before": ("passed", ""),
    "while_it_is_applied": ("passed", ""),
    "after": ("passed", ""),
    "refused": ("failure", "Patch toy-mean is refused instead of applied: toy-framework 1.4 is affected"),
    "advice": ("failure", "cannot be applied: expected a Patch, or the name of a registered one"),
    "unknown": ("failure", "names 'toy-mean', which is not a patch"),
    "spoiled": ("error", "Patch toy-lost was not reverted: "),
    "disabled": ("failure", "is disabled instead of applied: disabled by RLHF_PATCHES_DISABLE"),
}


@pytest.mark.parametrize("test", FIXTURE)
def test_the_fixture_applies_one_patch_until_the_test_ends(outcomes, test):
    outcome, message = FIXTURE[test]
    found = outcomes["TestFixture"][f"test_{test}"]
    assert found[-1][0] == outcome
    assert message in found[-1][1]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "Mine.patch is None: expected a rlhf_patches.Patch, or an Advice"),
        ({"patch": "toy-mean"}, "Mine.patch is 'toy-mean': expected"),
        ({"held": ("no side effects",)}, "expected a dictionary of tests by rule"),
        ({"releases": "toy==1.0"}, "Mine.releases is 'toy==1.0': expected a tuple of releases"),
    ],
)
def test_a_class_that_is_filled_in_wrongly_is_an_error_in_one_line(framework, attributes, message):
    if {"releases", "held"} & set(attributes):
        attributes["patch"] = framework.patch(Rewrite(framework.path("mod:f"), "$A - $B", "$A + $B"))
    mine = type("Mine", (PatchContract,), attributes)
    with pytest.raises(pytest.fail.Exception, match=message) as raised:
        mine().pytest_generate_tests(None)
    assert not raised.value.pytrace
