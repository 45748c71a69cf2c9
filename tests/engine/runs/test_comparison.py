"""What is compared between the ranks, and how a difference reads. No torch here: tests/cluster has the ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import types
from dataclasses import replace

import pytest

from rlhf_patches import Guard, Replace, Rewrite, Shape, Variant, __version__
from rlhf_patches.guards import fingerprints
from rlhf_patches.ranks import ranks_text
from rlhf_patches.runs import comparison
from rlhf_patches.runs.comparison import differences
from rlhf_patches.runs.processes import Effect, Process

FRAMEWORK = "somelib 1.0"
APPLIED = Effect("applied", FRAMEWORK, "c0de")
PENDING = Effect("pending", FRAMEWORK, "c0de")
DISABLED = Effect("disabled", "somelib (version unknown)", None, "disabled by RLHF_PATCHES_DISABLE")
ABSENT = Effect("absent", "no somelib", None, "somelib is not installed")
UNAFFECTED = Effect("unaffected", "somelib 2.0", None, "somelib 2.0 is not affected (affected: <2)")
REFUSED = Effect("refused", FRAMEWORK, None, "somelib 1.0 is affected, but f is not as expected; nothing was changed")
FAILED = Effect("failed", FRAMEWORK, None, "other code has changed it")


def process(rank, effects, *, host="a", pid=1, version="1.0"):
    """One rank."""
    return Process(host, pid, str(rank), {"rlhf-patches": version}, effects)


def compare(*effects, name="somelib-bug"):
    """The differences of one patch, one effect a rank; every rank on a host of its own but for the first two."""
    processes = [
        process(rank, {} if effect is None else {name: effect}, host=f"host{max(rank, 1)}", pid=100 + rank)
        for rank, effect in enumerate(effects)
    ]
    return differences(processes)


@pytest.mark.parametrize(
    "effects",
    [
        (APPLIED, APPLIED),
        (APPLIED, PENDING),  # one has imported the module, the other will
        (DISABLED, DISABLED),
        (ABSENT, ABSENT, ABSENT),
        (REFUSED, REFUSED),
        (FAILED, FAILED),
        (ABSENT, DISABLED),  # it acts nowhere, whatever the one would have said
        (UNAFFECTED, DISABLED, UNAFFECTED),
        (ABSENT, None),
        (None, DISABLED),
    ],
)
def test_what_makes_no_difference(effects):
    assert compare(*effects) is None


@pytest.mark.parametrize(
    "effects",
    [
        (APPLIED, DISABLED),
        (PENDING, DISABLED),
        (APPLIED, ABSENT),
        (APPLIED, REFUSED),
        (PENDING, UNAFFECTED),
        (APPLIED, FAILED),
        (FAILED, DISABLED),  # nobody knows what runs there
        (APPLIED, None),
        (APPLIED, Effect("applied", "somelib 1.1", "c0de")),
        (APPLIED, Effect("pending", FRAMEWORK, "another")),
        (UNAFFECTED, Effect("unaffected", "somelib 2.1")),
        (UNAFFECTED, ABSENT),
        (REFUSED, UNAFFECTED),
    ],
)
def test_what_makes_one(effects):
    assert compare(*effects).startswith("somelib-bug:\n  rank 0 on host1 (pid 100): ")
    assert compare(*reversed(effects)) is not None


def test_the_message_groups_ranks_and_names_hosts():
    effects = [APPLIED] * 3 + [DISABLED] + [PENDING] * 2
    assert compare(*effects) == (
        "somelib-bug:\n"
        "  ranks 0-2, 4-5 on host1, host2, host4, host5: applied or pending (somelib 1.0)\n"
        "  rank 3 on host3 (pid 103): disabled (disabled by RLHF_PATCHES_DISABLE)"
    )


def test_the_same_version_with_other_code_says_so():
    other = Effect("applied", FRAMEWORK, "beef")
    assert compare(APPLIED, other).splitlines()[1:] == [
        "  rank 0 on host1 (pid 100): applied (somelib 1.0, code c0de)",
        "  rank 1 on host1 (pid 101): applied (somelib 1.0, code beef)",
    ]


def test_a_thousand_ranks_and_many_patches_stay_readable():
    names = [f"somelib-bug-{number}" for number in range(30)]
    processes = [
        process(rank, dict.fromkeys(names, DISABLED if rank == 77 else APPLIED), host=f"host{rank // 8}", pid=rank)
        for rank in range(1024)
    ]
    text = differences(processes)
    assert "  ranks 0-76, 78-1023 on host0, host1, host2, host3 and 124 more hosts: applied (somelib 1.0)\n" in text
    assert "  rank 77 on host9 (pid 77): disabled (" in text
    assert text.endswith("\nand 20 more patches")
    assert len(text) < 4000


def test_other_versions_of_this_package():
    processes = [process(rank, {}, version=version) for rank, version in enumerate(("1.0", "1.0", "1.1"))]
    assert differences(processes) == "rlhf-patches:\n  ranks 0-1 on a: 1.0\n  rank 2 on a (pid 1): 1.1"


def test_a_rank_that_cannot_tell_says_why_and_does_not_keep_the_others_waiting():
    def broken():
        raise ValueError("RLHF_PATCHES_STRICT is 'maybe'")

    own = comparison.own_process(1, types.SimpleNamespace(carried=broken))
    assert own.problem == "ValueError: RLHF_PATCHES_STRICT is 'maybe'"
    text = differences([process(0, {"somelib-bug": APPLIED}, version=__version__), own])
    assert text == (
        f"these could not report their patches:\n  rank 1 on {socket.gethostname()} (pid {os.getpid()}): "
        "ValueError: RLHF_PATCHES_STRICT is 'maybe'"
    )


def test_through_json_and_back():
    made = process(3, {"somelib-bug": REFUSED, "somelib-other": APPLIED})
    assert comparison.from_dict(json.loads(json.dumps(comparison.to_dict(made)))) == made


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([7], "rank 7"),
        ([0, 1, 2], "ranks 0-2"),
        ([9, 0, 1, 3, 4], "ranks 0-1, 3-4, 9"),
        ([range(3, 4)], "rank 3"),
        ([range(5, 10**18), 1, range(2, 5)], f"ranks 1-{10**18 - 1}"),  # not counted through
        (range(0, 200, 2), f"ranks {', '.join(map(str, range(0, 100, 2)))} and 50 more such"),
    ],
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


# ------------------------------------------------------------------------------------- of a real engine

TEXT = """\
def f(a, b):
    return a - b


def g(a):
    return a
"""


@pytest.fixture
def repaired(framework):
    """A framework on disk and a patch with a rewrite and a replacement."""
    file = framework.write("mod", TEXT)
    patch = framework.patch(
        Rewrite(framework.path("mod:f"), "$A - $B", "$A + $B"),
        Replace(framework.path("mod:g"), "json:dumps", {fingerprints.fingerprint(TEXT, "g"): "1.0"}),
        versions="<2",
    )
    return framework, patch, file


@pytest.fixture
def effect_of(engine):
    """Applies a patch in an engine of its own and says what it does there."""

    def find(patch):
        made = engine(patch)
        made.apply()
        return comparison.effects(made)[patch.name]

    return find


def test_pending_and_applied_are_the_same_in_effect(repaired, engine):
    framework, patch, _ = repaired
    made = engine(patch)
    made.apply()
    before = comparison.effects(made)[patch.name]
    assert before.status == "pending"
    assert framework.name not in sys.modules, "looking at it imports nothing"
    framework.load()
    after = comparison.effects(made)[patch.name]
    assert after.status == "applied"
    assert before.key == after.key
    assert after.code is not None


def test_what_is_observed_is_so_before_its_import_as_well(repaired, engine, monkeypatch):
    framework, patch, _ = repaired
    monkeypatch.setenv("RLHF_PATCHES_OBSERVE", "1")
    made = engine(patch)
    made.apply()
    before = comparison.effects(made)[patch.name]
    framework.load()
    after = comparison.effects(made)[patch.name]
    assert made.report()[patch.name].status == "observed"
    assert before == after
    assert compare(before, after, name=patch.name) is None
    assert "observed" in compare(before, APPLIED, name=patch.name)


def test_an_edit_of_the_file_changes_the_fingerprint(repaired, effect_of):
    _, patch, file = repaired
    original = effect_of(patch).code
    assert effect_of(patch).code == original
    file.write_text(TEXT + "# a comment\n")
    assert effect_of(patch).code not in (None, original)


def test_an_applied_patch_has_the_text_that_it_was_applied_to(repaired, engine):
    framework, patch, file = repaired
    made = engine(patch)
    made.apply()
    framework.load()
    before = comparison.effects(made)[patch.name]
    file.write_text(TEXT + "# edited since\n")
    assert comparison.effects(made)[patch.name] == before


@pytest.mark.parametrize(("edit", "version"), [("b - a - 1", "1.0"), ("a - b", "2.5")])
def test_where_one_has_imported_it_the_others_will_end_alike(repaired, engine, edit, version):
    """Refused or unaffected there, so here too: no difference. But applied there and refused here is one."""
    framework, patch, file = repaired
    file.write_text(TEXT.replace("a - b", edit))
    framework.metadata(version, folder=f"{framework.distribution.replace('-', '_')}-1.0.dist-info")
    made = engine(patch)
    made.apply()
    before = comparison.effects(made)[patch.name]
    framework.load()
    after = comparison.effects(made)[patch.name]
    assert after.status == ("refused" if version == "1.0" else "unaffected")
    assert compare(before, after, name=patch.name) is None
    applied = Effect("applied", after.framework, after.code)
    assert compare(applied, after, name=patch.name) is not None


def test_another_repair_is_another_code(repaired, effect_of):
    framework, patch, _ = repaired
    other = framework.patch(
        Rewrite(framework.path("mod:f"), "$A - $B", "$A * $B"), patch.variants[0].changes[1], versions="<2"
    )
    assert effect_of(patch).code != effect_of(other).code


def test_where_assertions_are_left_out_other_code_runs(repaired, effect_of, monkeypatch):
    """``python -O`` on one rank."""
    _, patch, _ = repaired
    before = effect_of(patch).code
    monkeypatch.setattr(comparison, "sys", types.SimpleNamespace(flags=types.SimpleNamespace(optimize=1)))
    assert effect_of(patch).code != before


def test_the_text_of_an_implementation_counts(framework, effect_of):
    framework.write("mod", TEXT)
    file = framework.write("ours", "def f(a, b): return a + b\n")
    change = Replace(framework.path("mod:f"), framework.path("ours:f"), {fingerprints.fingerprint(TEXT, "f"): "1.0"})
    patch = framework.patch(change)
    before = effect_of(patch).code
    file.write_text("def f(a, b): return b + a\n")
    assert effect_of(patch).code not in (None, before)


def test_not_installed_switched_off_and_never_applied(repaired, engine):
    _, patch, _ = repaired
    change = Rewrite("no_such_framework.mod:f", "$A - $B", "$A + $B")
    gone = replace(patch, name="no-such-patch", variants=(Variant(Guard("no-such-framework", ""), (change,)),))
    made = engine(patch, gone)
    assert {effect.reason for effect in comparison.effects(made).values()} == {"apply() has not been called"}
    made.apply()
    assert comparison.effects(made)[gone.name].status == "absent"
    made.revert(patch.name)
    off = comparison.effects(made)[patch.name]
    assert (off.key, off.reason) == (("disabled",), "reverted by revert()")


def test_a_version_outside_the_range(repaired, effect_of):
    framework, patch, _ = repaired
    folder = f"{framework.distribution.replace('-', '_')}-1.0.dist-info"
    framework.metadata("2.5", folder=folder)
    assert effect_of(patch).key == ("unaffected", f"{framework.distribution} 2.5")


def test_an_advice_is_not_compared(framework, engine):
    """One rank may have imported the code, another not, a third have silenced it."""
    framework.write("mod", "def f():\n    return 1\n")
    made = engine(framework.advice(Shape(framework.path("mod:f"), "return 1")))
    made.apply()
    framework.load()
    assert made.report().patches[0].status.value == "advice"
    assert comparison.effects(made) == {}
