"""Reports: the same facts as a table, a dictionary, JSON and flat values."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rlhf_patches import PatchReport, Report, Rewrite, Status
from rlhf_patches.definitions.registry import PluginFailure
from rlhf_patches.definitions.status import patch_report, table

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
    with pytest.raises(KeyError, match="no patch is called 'd-bug'; there are: a-bug, b-bug, c-bug"):
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
    lines = str(REPORT).splitlines()
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
    """Where it is applied, or would be; JSON has the text wherever the framework is."""
    patch = dataclasses.replace(framework.patch(Rewrite("a:b", "$A", "1")), changes_numbers="was\n wrong\x07 ")
    row = patch_report(patch, "tests", status, "why", None)
    assert row.to_dict().get("changes_numbers") == (None if status is Status.ABSENT else "was wrong\x07")
    expected = [r"changes numbers: was wrong\x07"] if status.value in ("pending", "applied", "applies") else []
    lines = [line.strip() for line in table((row, ROWS[0])).splitlines()]
    assert lines[2:-1] == expected
    assert lines[-1].startswith("a-bug")


def test_a_narrow_table_keeps_words_whole():
    text = table(ROWS, width=20)
    assert text.count("word") == 60
    assert all(len(line) <= len("a-bug  applied  some-dist 1.0  ") + 40 for line in text.splitlines())


def test_an_empty_report():
    assert str(Report(())).split() == ["PATCH", "STATUS", "FRAMEWORK", "REASON"]
    assert Report(()).to_dict() == {"patches": [], "plugin_failures": []}
