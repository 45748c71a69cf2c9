"""What the command says, in this process. As a user runs it: tests/processes/test_cli.py."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from rlhf_patches import Rewrite, Shape
from rlhf_patches import cli as command_line
from rlhf_patches.definitions import pages, registry
from rlhf_patches.patches import plugin
from rlhf_patches.proving import lookup
from tests.harness import toy_slime
from tests.harness.toy_slime_fixtures import make_refused

ROOT = Path(__file__).parents[2]


def test_a_page_wraps_prose_and_nothing_else():
    code, table, items = "    " + "a = b; " * 30 + "c", f"| {'a ' * 70}|\n| --- |", f"- {'b ' * 70}\n- c"
    prose = f"`{'module.' * 12}Class.method` asserts `x is not None` and {'then ' * 20}\nis done."
    patch = dataclasses.replace(
        plugin.rlhf_patches()[0], symptom=f"{prose}\n\n{code}", cause=f"{table}\n\n{items}", repair="is done"
    )
    page = pages.page(patch)
    assert code in page
    assert table in page
    assert items in page
    assert " ".join(prose.split()) in " ".join(page.split())
    long = [line for line in page.splitlines() if len(line) > 120]
    assert long == [code, table.splitlines()[0], items.splitlines()[0]]
    assert all(line.count("`") % 2 == 0 for line in page.splitlines() if not line.startswith("```")), "code was split"


@pytest.mark.parametrize("text", [None, "It was wrong since 1.0."])
def test_a_patch_that_changes_numbers_says_so(framework, monkeypatch, capsys, text):
    framework.write("mod", "def f(x):\n    return x - 1\n")
    change = Rewrite(framework.path("mod:f"), "$A - 1", "$A + 1")
    patch = dataclasses.replace(framework.patch(change), changes_numbers=text)
    monkeypatch.setattr(registry, "load", lambda: ([registry.Registered(patch, "tests")], []))

    def lines(*command):
        assert command_line.main(list(command)) == 0
        return capsys.readouterr().out.splitlines()

    for command in (["doctor"], ["check", str(framework.site)]):
        rows = lines(*command)
        (row,) = [number for number, line in enumerate(rows) if line.startswith(patch.name)]
        assert (rows[row + 1].strip() == f"repair changes results: {text}") is (text is not None)
        (found,) = json.loads("\n".join(lines(*command, "--json")))
        assert found.get("changes_numbers") == text
    assert any("a bug (repair changes results)" in line for line in lines("list")) is (text is not None)
    page = "\n".join(lines("explain", patch.name))
    assert (f"## Your results change\n\n{text}\n\n## A run in progress" in page) is (text is not None)
    assert page == pages.page(patch, "tests", lookup.how_to_prove(patch)).rstrip("\n")


def test_an_advice_is_shown_as_such_and_is_no_repair(framework, monkeypatch, capsys, tmp_path):
    framework.write("mod", "def f(x):\n    return x - 1\n")
    advice = framework.advice(Shape(framework.path("mod:f"), "$A - 1"), versions="<2")
    monkeypatch.setattr(registry, "load", lambda: ([registry.Registered(advice, "tests")], []))

    def said(*command, status=0):
        assert command_line.main(list(command)) == status
        return capsys.readouterr()

    for command in (["doctor"], ["check", str(framework.site)]):
        rows = said(*command).out.splitlines()
        (row,) = [number for number, line in enumerate(rows) if line.startswith(advice.name)]
        assert rows[row].split()[1] == "advice"
        assert rows[row + 1].strip() == "what to do: Do something else."
        (found,) = json.loads(said(*command, "--json").out)
        assert (found["status"], found["kind"], found["what_to_do"]) == ("advice", "advice", "Do something else.")
    assert "a bug (advice: not repaired) (plugin tests)" in said("list").out
    page = said("explain", advice.name).out
    assert page == pages.page(advice, "tests")
    for part in ("**there is no repair**", "## What to do\n\nDo\nsomething else.\n", "```python\n$A - 1\n```"):
        assert part in page
    assert "changes no code" in said("diff", advice.name, status=2).err
    pins = tmp_path / "requirements.txt"
    pins.write_text(f"{framework.distribution}==1.0\n")
    out = said("audit", str(pins), status=1).out
    assert "Found 1 known bug in 1 package." in out
    assert f"No patch repairs {advice.name}: see `rlhf-patches explain {advice.name}` for a workaround." in out
    assert "repairs them at run time" not in out
    (dependency,) = json.loads(said("audit", "--json", str(pins), status=1).out)["dependencies"]
    (bug,) = dependency["vulns"]
    assert (bug["repaired_by"], bug["what_to_do"]) == (None, advice.what_to_do)


@pytest.mark.one_python
@pytest.mark.parametrize("patch", plugin.rlhf_patches(), ids=lambda patch: patch.name)
def test_explain_and_the_page_in_docs_are_the_patch(patch, capsys):
    assert command_line.main(["explain", patch.name]) == 0
    page = pages.page(patch, proof=lookup.how_to_prove(patch))
    assert capsys.readouterr().out == page
    assert (ROOT / "docs" / "patches" / f"{patch.name}.md").read_text() == page, "run `make docs`"


def test_the_index_in_docs_lists_every_patch():
    folder = ROOT / "docs" / "patches"
    assert (folder / "README.md").read_text() == pages.index(plugin.rlhf_patches()), "run `make docs`"
    names = {file.stem for file in folder.glob("*.md")} - {"README"}
    assert names == {patch.name for patch in plugin.rlhf_patches()}


@pytest.mark.parametrize(
    "command", [["list"], ["doctor"], ["check", "[/x]:smile:\x1b[2J\n"], ["report", "\x1b[2J\n[/x]"]]
)
def test_names_and_values_from_outside(capsys, monkeypatch, command):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("RLHF_PATCHES_REPORT", "[/x]:smile:\x1b[2J")
    status = command_line.main(command)
    out, err = capsys.readouterr()
    assert status == (2 if len(command) > 1 else 0)
    assert "\x1b[2J" not in out + err
    assert (r"[/x]:smile:\x1b[2J" in out) is (command == ["doctor"])
    assert err.count("\n") == (len(command) > 1)


def test_a_folder_with_a_name_from_outside(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    folder = toy_slime.write(tmp_path / "[bold]:smile:\x1b[2J")
    assert command_line.main(["check", str(folder)]) == 0
    out, _ = capsys.readouterr()
    assert r"[bold]:smile:\x1b[2J" in out
    assert "\x1b[2J" not in out


def test_a_terminal_shows_all_that_is_changed(framework, monkeypatch, capsys):
    """However narrow it is: lines that differ at their ends only were cropped, and looked alike."""
    long = "x " + "+ 1 " * 30
    framework.write("mod", f"def f(x):\n    return {long}- 1\n")
    patch = framework.patch(Rewrite(framework.path("mod:f"), f"{long}- 1", f"{long}+ 1"))
    monkeypatch.setattr(registry, "load", lambda: ([registry.Registered(patch, "tests")], []))

    def plain(command):
        assert command_line.main([command, patch.name]) == 0
        return re.sub(r"\x1b(\[[0-9;]*m|\].*?\x1b\\)", "", capsys.readouterr().out)

    piped = plain("diff")
    assert f"-    return {long}- 1\n+    return ({long}+ 1)\n" in piped
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert plain("diff") == piped, "the terminal wraps; what is copied has whole lines"
    explained = plain("explain")
    assert f"- {long}- 1 + {long}+ 1 " in f"{' '.join(explained.split())} "
    assert max(map(len, explained.splitlines())) <= 80


# ------------------------------------------------------------------------------------- doctor, help, wrong names


def test_doctor_says_what_is_wrong_and_fails(said, slime, monkeypatch):
    make_refused(slime)
    monkeypatch.syspath_prepend(slime)
    status, out, _ = said("doctor", "--json")
    assert status == 1
    (row,) = [row for row in json.loads(out) if row["name"] == toy_slime.PATCH]
    assert (row["status"], row["version"]) == ("refused", "0.1.0")
    assert "0 times, expected 1" in row["reason"]
    status, out, _ = said("doctor")
    assert status == 1
    assert "refused" in out


@pytest.mark.parametrize("command", ["doctor", "check"])
def test_quiet_says_nothing_but_what_is_wrong(said, slime, monkeypatch, command):
    arguments = (command, "--quiet", *([slime] if command == "check" else []))
    monkeypatch.syspath_prepend(slime)
    assert said(*arguments) == (0, "", "")
    make_refused(slime)
    status, out, err = said(*arguments)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"{toy_slime.PATCH} refused: " in err
    assert said(*arguments, "--json")[0] == 2, "one or the other"


@pytest.mark.parametrize("command", ["diff", "explain"])
def test_an_unknown_name_suggests_the_nearest(said, command):
    status, _, err = said(command, "slime-nosync-reentry")
    assert status == 2
    assert err.count("\n") == 1
    assert "did you mean 'slime-no-sync-reentry'?" in err


def test_the_command_alone_is_its_help(said):
    assert said() == said("--help")


def test_a_wrong_command_names_the_nearest(said):
    assert said("doctr", "--json") == (2, "", "rlhf-patches: there is no command 'doctr'; did you mean 'doctor'?\n")


def test_a_part_of_a_name_is_enough(said):
    for part in ("dapo", "GRPO_Dapo"):
        assert said("explain", part) == said("explain", "trl-grpo-dapo-scale")
    assert said("diff", "dapo") == said("diff", "trl-grpo-dapo-scale")
    assert said("explain", "swift-null-ref-context")[1].startswith("# swift-null-ref-context\n"), "a part of -hf's, too"
    status, out, err = said("diff", "null-REF")
    assert (status, out) == (2, "")
    assert err == ("rlhf-patches: 'null-REF' matches 2 names:\n  swift-null-ref-context\n  swift-null-ref-context-hf\n")


def test_doctor_begins_with_a_count_and_list_ends_with_it_and_problems_are_first_rows(said, slime, monkeypatch):
    monkeypatch.setenv("RLHF_PATCHES_DISABLE", "accelerate-*")
    monkeypatch.syspath_prepend(slime)
    count = sum(each.kind != "watch" for each in plugin.rlhf_patches())
    for command in ("doctor", "list"):
        out = said(command)[1].splitlines()
        assert first_row(out) == [toy_slime.PATCH, "applies"]
        head = f"{count} known bugs, by status: applies 1, "
        (place,) = [number for number, line in enumerate(out) if line.startswith(head)]
        assert (place == 0) is (command == "doctor")
        assert re.search(r"disabled \d", out[place])
        assert out[place + 1] == "In the packages installed here: 1 crash."
        assert out[place + 2].startswith("Next: `rlhf-patches explain ")
    assert toy_slime.PATCH in said("doctor")[1].partition("Next: ")[2]
    make_refused(slime)
    assert first_row(said("doctor")[1].splitlines()) == [toy_slime.PATCH, "refused"]
    assert f"Next: `rlhf-patches explain {toy_slime.PATCH}` shows the bug that" in said("doctor")[1]
    monkeypatch.setenv("RLHF_PATCHES_DISABLE", "*")
    assert "Next: `rlhf-patches audit FILE`" in said("doctor")[1]


def first_row(lines):
    (head,) = [number for number, line in enumerate(lines) if line.startswith("PATCH ")]
    return lines[head + 1].split()[:2]


@pytest.fixture
def harmful(framework, monkeypatch):
    """A hang, a wrong gradient, and what does not say, in this order; each applies."""
    framework.write("mod", "".join(f"def {name}(x):\n    return x - 1\n\n\n" for name in "fgh"))
    patches = [
        dataclasses.replace(
            framework.patch(Rewrite(framework.path(f"mod:{name}"), "$A - 1", "$A + 1"), name=f"x-{name}"),
            **({"harm": harm, "bug": f"{name} is wrong", "when": "always"} if harm else {}),
        )
        for name, harm in (("f", "hang"), ("g", "wrong gradient"), ("h", ""))
    ]
    monkeypatch.setattr(registry, "load", lambda: ([registry.Registered(patch, "tests") for patch in patches], []))
    return framework


def test_doctor_and_list_say_what_is_wrong_the_worst_first(said, harmful):
    rows = [line.split() for line in said("list")[1].splitlines()]
    assert rows[:7] == [
        ["PATCH", "STATUS", "HARM", "BUG"],
        ["x-g", "applies", "wrong", "gradient", "g", "is", "wrong.", "When:", "always", "(plugin", "tests)"],
        ["releases:", harmful.distribution],
        ["x-f", "applies", "hang", "f", "is", "wrong.", "When:", "always", "(plugin", "tests)"],
        ["releases:", harmful.distribution],
        ["x-h", "applies", "-", "a", "bug", "(plugin", "tests)"],
        ["releases:", harmful.distribution],
    ]
    assert "In the packages installed here: 1 wrong gradient, 1 hang." in said("list")[1]
    for command in (["doctor"], ["check", str(harmful.site)]):
        lines = said(*command)[1].splitlines()[{"check": 1, "doctor": 4}[command[0]] :]
        assert lines[0].split() == ["PATCH", "STATUS", "HARM", "VERSION", "WHY"]
        assert [line.split()[:5] for line in lines[1:6:2]] == [
            ["x-g", "applies", "wrong", "gradient", "1.0"],
            ["x-f", "applies", "hang", "1.0", harmful.distribution],
            ["x-h", "applies", "-", "1.0", harmful.distribution],
        ]
        assert lines[2:5:2] == ["    g is wrong. When: always", "    f is wrong. When: always"]
        found = {row["name"]: row for row in json.loads(said(*command, "--json")[1])}
        assert [found["x-g"][key] for key in ("harm", "bug", "when")] == ["wrong gradient", "g is wrong", "always"]
        assert not {"harm", "bug", "when"} & found["x-h"].keys()


def test_a_bug_that_is_not_here_has_no_harm_here(said, harmful):
    signs = {"f": "-", "g": "+", "h": "-"}
    harmful.write("mod", "".join(f"def {name}(x):\n    return x {sign} 1\n\n\n" for name, sign in signs.items()))
    status, out, err = said("doctor", "--quiet")
    assert (status, out) == (1, "")
    assert err.endswith("; wrong gradient: g is wrong. When: always\n"), "which bug stays"
    harmful.metadata(None, f"{harmful.distribution.replace('-', '_')}-1.0.dist-info")
    lines = said("doctor")[1].splitlines()
    assert not [line for line in lines if line.startswith("x-g ")]
    assert "1 known bug in other releases of the installed packages: see `--all`" in lines
    lines = said("doctor", "--all")[1].splitlines()
    (row,) = [number for number, line in enumerate(lines) if line.startswith("x-g ")]
    assert lines[row].split()[:4] == ["x-g", "unaffected", "-", "-"]
    assert lines[row + 1] == "", "the last row"
    assert "In the packages installed here: 1 hang." in lines


def test_doctor_has_a_row_for_code_that_has_the_bug_outside_the_range(said, framework, monkeypatch):
    """It is left as it is, and nobody has read this release: no count hides that."""
    framework.write("mod", "def f(x):\n    return x - 1\n")
    patch = framework.patch(Rewrite(framework.path("mod:f"), "$A - 1", "$A + 1"), name="x-f", versions="<1.0")
    monkeypatch.setattr(registry, "load", lambda: ([registry.Registered(patch, "tests")], []))
    lines = said("doctor")[1].splitlines()
    assert first_row(lines) == ["x-f", "unaffected"]
    assert not [line for line in lines if "in other releases" in line]


def test_a_pipe_gets_no_column_of_blanks(said):
    """One patch has ranges of 150 characters."""
    lines = said("list", "--all")[1].splitlines()
    assert max(len(run) for line in lines for run in re.findall(" +", line)) <= 45
    assert not any(line.endswith(" ") for line in lines)


def test_diff_of_an_absent_framework_says_so(said):
    status, _, err = said("diff", "verl-no-sync-reentry")
    assert status == 2
    assert "verl is not installed here" in err


@pytest.mark.parametrize("command", [[], *([name] for name in command_line._MODULES)], ids=" ".join)
def test_help_has_an_example(said, command):
    """And each command is declared by the module that is loaded for it alone."""
    status, out, _ = said(*command, "--help")
    assert status == 0
    assert out.startswith(f"usage: rlhf-patches {' '.join(command)}".rstrip() + " [-h]")
    assert "example" in out


def test_the_help_lists_every_command(said):
    _, out, _ = said("--help")
    listed = [line.split()[0] for line in out.splitlines() if re.match(r"    [a-z]", line)]
    assert listed == list(command_line._MODULES)
