"""Reports: the same facts as a table, a dictionary, JSON and flat values."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rlhf_patches import PatchReport, Report, Rewrite, Shape, Status
from rlhf_patches.definitions.reached import Reached
from rlhf_patches.definitions.registry import PluginFailure
from rlhf_patches.definitions.status import patch_report

ROWS = (
    PatchReport(
        "a-bug",
        Status.APPLIED,
        "some-dist 1.0 is affected (<2)",
        "some-dist",
        "1.0",
        "<2",
        "rlhf-patches",
        observations={"calls": 3},
    ),
    PatchReport("b-bug", Status.REFUSED, "word " * 60, "other", None, "", "plugin"),
    PatchReport("c-bug", Status.FAILED, "", "other", "2", "", "plugin"),
)
REPORT = Report(ROWS, (PluginFailure("bad-plugin", "it broke"),))


def test_access():
    assert list(REPORT) == list(ROWS)
    assert REPORT["b-bug"] is ROWS[1]
    with pytest.raises(KeyError, match="unknown patch 'd-bug'; the patches are: a-bug, b-bug, c-bug"):
        REPORT["d-bug"]
    assert REPORT.problems == ROWS[1:]
    assert REPORT.with_status(Status.APPLIED, Status.FAILED) == (ROWS[0], ROWS[2])
    assert REPORT.with_status() == ()


@pytest.mark.parametrize("status", Status)
def test_problems_are_what_a_user_has_to_look_at(status):
    assert status.is_problem is (status.value in ("refused", "failed"))
    assert str(status) == f"{status}" == status.value


def test_dictionary_and_json():
    expected = {
        "patches": [
            {
                "name": row.name,
                "status": row.status.value,
                "reason": row.reason,
                "distribution": row.distribution,
                "version": row.version,
                "guard": row.guard,
                "plugin": row.plugin,
                **({"observations": {"calls": 3}} if row.name == "a-bug" else {}),
            }
            for row in ROWS
        ],
        "plugin_failures": [{"plugin": "bad-plugin", "reason": "it broke"}],
    }
    assert REPORT.to_dict() == json.loads(REPORT.to_json()) == expected
    assert type(REPORT.to_dict()["patches"][0]["status"]) is str
    assert REPORT.to_json(indent=1).startswith('{\n "patches"')


def test_flat_values():
    expected = {"rlhf_patches/a-bug": "applied", "rlhf_patches/b-bug": "refused", "rlhf_patches/c-bug": "failed"}
    assert REPORT.to_flat_dict() == expected
    assert all(type(value) is str for value in REPORT.to_flat_dict().values())
    assert list(REPORT.to_flat_dict("x.")) == ["x.a-bug", "x.b-bug", "x.c-bug"]


def test_table():
    lines = REPORT.to_text().splitlines()
    assert lines[0].split() == ["PATCH", "STATUS", "FRAMEWORK", "REASON"]
    assert lines[1].split(maxsplit=4)[:4] == ["a-bug", "applied", "some-dist", "1.0"]
    assert lines[2].split()[:4] == ["b-bug", "refused", "other", "-"]
    assert lines[-1] == "plugin bad-plugin could not be used: it broke"
    assert max(map(len, lines)) <= 130
    assert " ".join(lines).count("word") == 60
    column = lines[0].index("REASON")
    assert lines[1][column:].startswith("some-dist 1.0 is affected")
    assert lines[3][:column].strip() == ""
    assert not any(line != line.rstrip() for line in lines)


def test_what_is_printed_begins_with_what_was_met_and_with_problems():
    """Then what is applied, without advice on results that have not changed; what does not matter here is counted."""
    applied = dataclasses.replace(ROWS[0], changes_numbers="train again")
    met = dataclasses.replace(applied, name="met-bug", reached=Reached(4, 4, 2, 4.0, 4.0, "gradient x", True))
    ran = dataclasses.replace(applied, name="ran-bug", reached=Reached(4))
    never = dataclasses.replace(applied, name="never-bug", reached=Reached(4, 4, 0, has_condition=True))
    other = dataclasses.replace(applied, name="other-bug", status=Status.UNAFFECTED)
    waits = dataclasses.replace(applied, name="late-bug", status=Status.PENDING)
    lines = str(Report((other, ran, never, applied, waits, met, ROWS[1]))).splitlines()
    unknown = "1 ran, bug condition unknown"
    assert lines[0] == f"1 of 4 repaired bugs occurred: met-bug (gradient x 4); 2 did not; {unknown}: ran-bug"
    partly = dataclasses.replace(never, name="partly-bug", reached=Reached(4, 3, 0, has_condition=True))
    none = f"none of 1 repaired bug is known to have occurred; {unknown}: partly-bug\n"
    assert str(Report((partly,))).startswith(none)
    names = [line.split()[0] for line in lines[1:] if line[0] != " "]
    assert names == ["PATCH", "b-bug", "met-bug", "ran-bug", "never-bug", "a-bug", "waiting", "not"]
    assert [line.strip() for line in lines if "train again" in line] == ["repair changes results: train again"], (
        "of met-bug"
    )
    assert lines[-2:] == ["waiting for an import: some-dist 1.0 (1)", "not affected: some-dist 1.0 (1)"]


def test_text_from_outside_stays_in_its_cell():
    reason, shown = "a\nb \x1b[2J\u202e :smile: [/x]", r"a b \x1b[2J\u202e :smile: [/x]"
    row = PatchReport("d-bug", Status.FAILED, reason, "di\nst", "1\x1b[2J", "", "plug\nin")
    assert row.why == rf"{shown} (plugin plug\nin)"
    assert dataclasses.replace(row, plugin="rlhf-patches").why == shown
    assert row.to_dict()["reason"] == reason
    lines = str(Report((row,), (PluginFailure("bad\n", "x\ny\x07"),))).splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("status", Status)
def test_a_patch_that_changes_numbers_has_a_line_of_its_own(framework, status):
    """Where it is applied, or would be by doctor or check; JSON has the text wherever the framework is."""
    patch = dataclasses.replace(framework.patch(Rewrite("a:b", "$A", "1")), changes_numbers="was\n wrong\x07 ")
    row = patch_report(patch, "tests", status, "why", None)
    assert row.to_dict().get("changes_numbers") == (None if status is Status.ABSENT else "was wrong\x07")
    expected = [r"repair changes results: was wrong\x07"] if status.value in ("applied", "applies") else []
    lines = [line.strip() for line in Report((row, ROWS[0])).to_text(everything=True).splitlines()]
    assert lines[2:-1] == expected
    assert lines[-1].startswith("a-bug")


@pytest.mark.parametrize("status", Status)
def test_an_advice_says_what_to_do(framework, status):
    """Where it is for this release; JSON has the text wherever the framework is."""
    row = patch_report(framework.advice(Shape("a:b", "$A")), "tests", status, "why", None)
    found = row.to_dict()
    assert (found["kind"], "kind" in ROWS[0].to_dict()) == ("advice", False)
    assert found.get("what_to_do") == (None if status is Status.ABSENT else "Do something else.")
    assert row.notice == ("what to do: Do something else." if status is Status.ADVICE else "")
    assert not Report((row,)).problems or status.is_problem


@pytest.mark.parametrize("status", Status)
def test_a_bug_that_stays_is_said_and_not_what_the_patch_would_have_made_of_it(framework, status):
    """Below the row, whatever its width; JSON has it of every patch that is imported."""
    told = {"harm": "hang", "bug": "ranks wait", "when": "ZeRO-3"}
    patch = dataclasses.replace(framework.patch(Rewrite("a:b", "$A", "1")), **told)
    row = patch_report(patch, "tests", status, "why", "1.0")
    assert told.items() <= row.to_dict().items()
    assert not told.keys() & patch_report(patch.listed("a:B"), "tests", status, "why", "1.0").to_dict().keys()
    text = Report((row,)).to_text(everything=True)
    assert (patch.summary in text) is (status is Status.ADVICE), "of an advice that is the bug"
    stays = status.is_problem or status in (Status.APPLIES, Status.ADVICE)
    shown = {Status.ADVICE: ["hang. When: ZeRO-3"]}.get(status, ["hang: ranks wait. When: ZeRO-3"])
    assert [line.strip() for line in text.splitlines()[2:]] == (shown if stays else [])
    assert row.is_there is stays
    newer = dataclasses.replace(row, unreviewed=True)
    assert newer.is_there


def test_a_narrow_table_keeps_words_whole():
    text = Report(ROWS).to_text(width=20)
    assert text.count("word") == 60
    assert all(len(line) <= len("a-bug  applied  some-dist 1.0  ") + 40 for line in text.splitlines())


def test_at_80_columns_no_name_is_broken():
    row = dataclasses.replace(ROWS[0], name="some-patch-with-a-very-long-name", places=("/some/long/path.py:12",))
    lines = Report((row, ROWS[1])).to_text(width=80, places=True).splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["PATCH", row.name, "b-bug"]
    assert lines[2:4] == ["    some-dist 1.0 is affected (<2)", "    /some/long/path.py:12"]
    assert max(map(len, lines)) <= 80


def test_a_pipe_gets_a_line_per_row():
    lines = Report(ROWS).to_text(width=None).splitlines()
    assert [line.split()[0] for line in lines] == ["PATCH", "a-bug", "b-bug", "c-bug"]
    assert not any(line.endswith(" ") for line in lines)


def test_what_is_not_there_is_one_line_per_reason():
    gone = [
        PatchReport(f"{n}-gone", Status.ABSENT, "ms-swift is not installed", "ms-swift", None, "", "rlhf-patches")
        for n in "xyz"
    ]
    advice = dataclasses.replace(gone[0], name="v-gone", kind="advice")
    report = Report((*gone, advice, ROWS[0], dataclasses.replace(gone[0], name="w-gone", reason="no module a.b")))
    assert str(report).splitlines()[2:] == [
        "ms-swift is not installed: 3 patches, 1 piece of advice",
        "no module a.b: 1 patch",
    ]
    assert "x-gone" in report.to_text(everything=True)
    assert str(Report(tuple(gone))) == "ms-swift is not installed: 3 patches"


def test_an_interpreter_and_a_notebook_show_the_table():
    report = Report((*REPORT.patches, dataclasses.replace(ROWS[0], name="d-bug", reason="<b>&\x1b[2J")))
    assert repr(report) == str(report)
    found = report._repr_html_()
    assert found.count("<tr>") == 5
    assert "&lt;b&gt;&amp;\\x1b[2J" in found


def test_an_empty_report():
    assert str(Report(())).split() == ["PATCH", "STATUS", "FRAMEWORK", "REASON"]
    assert Report(()).to_dict() == {"patches": [], "plugin_failures": []}
