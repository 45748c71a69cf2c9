"""Patches of other distributions: the example, installed for real, and plugins that misbehave in every way."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from rlhf_patches import PatchError, SettingsError, Status, cli
from rlhf_patches.definitions import registry
from rlhf_patches.engine.engine import Engine
from rlhf_patches.patches import plugin
from tests.harness.plugins import GOOD, IMPOSTOR, TAKEN, numbers

# -------------------------------------------------------------------------------------------- plugins that break

HOOK = "from rlhf_patches import hookimpl\n@hookimpl\ndef rlhf_patches():\n    "
BAD = {
    "raises at import": ("raise ZeroDivisionError('oh')", "raised ZeroDivisionError: oh (at {file}:1)"),
    "raises below": ("import json\n\njson.loads(\n    '{')", "column 2 (char 1) (at {file}:3)"),
    "exits at import": ("import sys\nsys.exit(3)", "raised SystemExit: 3"),
    "does not parse": ("\ndef f(:", "(at {file}:2)"),
    "imports what is missing": ("import no_such_module", "raised ModuleNotFoundError"),
    "raises in the hook": (f"{HOOK}raise ZeroDivisionError('oh')", "raised ZeroDivisionError: oh (at {file}:4)"),
    "exits in the hook": (f"{HOOK}raise SystemExit", "raised SystemExit"),
    "is empty": ("", "no hook implementation: expected a function rlhf_patches() marked with @rlhf_patches.hookimpl"),
    "forgot the mark": ("def rlhf_patches(): return []", "rlhf_patches.hookimpl in {file}"),
    "misspelt the hook": (
        HOOK.replace("def rlhf_patches", "def rlhf_patch") + "return []",
        "rlhf_patch() ({file}:2) is not as expected, a function rlhf_patches() without arguments",
    ),
    "wants arguments": (
        HOOK.replace("s():", "s(engine):") + "return []",
        "rlhf_patches() ({file}:2) is not as expected, a function rlhf_patches() without arguments",
    ),
    "returns text": (f"{HOOK}return 'x'", "returned an object of type str, expected a list of patches"),
    "returns a number": (
        f"{HOOK}return 3",
        "rlhf_patches() ({file}:2) returned an object of type int, expected a list of patches",
    ),
    "returns numbers": (f"{HOOK}return [3]", "item 1 of what rlhf_patches() ({file}:2) returned is of type int"),
    "returns None": (f"{HOOK}return None", "rlhf_patches() ({file}:2) returned None, expected a list of patches"),
    "returns what raises when shown": (
        f"class Bad:\n    def __repr__(self): raise ZeroDivisionError\n{HOOK}return [Bad()]",
        "item 1 of what rlhf_patches() ({file}:4) returned is of type Bad",
    ),
    "yields, then raises": (f"{HOOK}yield from ()\n    raise ZeroDivisionError('oh')", "raised ZeroDivisionError: oh"),
    "defines a patch wrongly": (
        "from rlhf_patches import Guard\nGuard('d', '1.0')",
        "raised DefinitionError: Guard.versions is '1.0'",
    ),
    "defines a patch wrongly, further down": (
        "from rlhf_patches import Patch\n\n\nPATCH = Patch(\n    name='trl-bug',\n    summary='s',\n)",
        "Error: Patch trl-bug lacks symptom, cause, repair, references, variants, obsolete_when (at {file}:4)",
    ),
}


@pytest.mark.parametrize("how", BAD)
def test_a_plugin_that_breaks_is_named_and_stops_nobody(site, framework, how):
    text, reason = BAD[how]
    bad, good = site.add("bad", text), site.good()
    made = Engine(load=site.load)
    try:
        report = made.apply()
        assert [failure.plugin for failure in report.plugin_failures] == [bad]
        file = site.folder / f"{bad.replace('-', '_')}.py"
        assert reason.replace("{file}", str(file)) in report.plugin_failures[0].reason
        assert [row.plugin for row in report] == [good]
        assert framework.load().add(2, 1) == 3
        assert made.report()[good].status is Status.APPLIED
        assert bad in str(report)
    finally:
        made.revert()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module", "does not exist (ModuleNotFoundError: No module named 'no_such_module')"),
        ("{}.below", "does not exist (ModuleNotFoundError: "),
        ("{}:nothing", "does not exist (AttributeError: "),
        ("my-plugin.patches", "does not name a module"),
        ("{}:rlhf_patches", "names the function rlhf_patches() ({file}:1)"),
    ],
)
def test_an_entry_point_that_leads_nowhere(site, value, reason):
    value = value.format(f"{site.prefix}_bad")
    bad, good = site.add("bad", "def rlhf_patches(): return []", value=value), site.good()
    registered, (failure,) = site.load()
    assert [item.plugin for item in registered] == [good]
    assert failure.plugin == bad
    info = site.folder / f"{site.prefix}_bad-1.0.dist-info"
    assert failure.reason.startswith(f"its entry point 'bad = {value}' ({info}) ")
    assert reason.replace("{file}", str(site.folder / f"{site.prefix}_bad.py")) in failure.reason
    assert "expected the module with the hook" in failure.reason


def test_a_malformed_line_of_another_group_takes_no_patch_away(site):
    """From Python 3.15 on importlib.metadata raises for the whole file."""
    good = site.good()
    (file,) = site.folder.glob("*.dist-info/entry_points.txt")
    file.write_text(f"[console_scripts]\nmy-tool = my-tool\nnonsense\n# a comment\n{file.read_text()}")
    registered, failures = site.load()
    assert [item.plugin for item in registered] == [good]
    assert failures == []


def test_a_module_that_a_plugin_imports_and_that_is_missing_is_not_the_entry_points_fault(site):
    bad = site.add("bad", "import no_such_module")
    _, (failure,) = site.load()
    assert failure.reason == (
        f"loading '{site.prefix}_bad' raised ModuleNotFoundError: No module named 'no_such_module' "
        f"(at {site.folder / f'{site.prefix}_bad.py'}:1)"
    ), bad


SEVERAL = {
    "nonsense among them": (
        "return [patch('{0}-one'), 'nonsense', patch('{0}-two')]",
        "item 2 of what rlhf_patches() (",
    ),
    "a list among them": ("return [patch('{0}-one'), [patch('x-y')], patch('{0}-two')]", "is of type list and is left"),
    "two of one name": (
        "return [patch('{0}-one'), patch('{0}-one'), patch('{0}-two')]",
        "it has two patches named '{0}-one'; the first is used",
    ),
    "an exception at the end": (
        "yield patch('{0}-one')\n    yield patch('{0}-two')\n    raise ZeroDivisionError('oh')",
        "raised ZeroDivisionError: oh (at ",
    ),
}


@pytest.mark.parametrize("how", SEVERAL)
def test_one_bad_patch_takes_none_of_its_plugins_others_away(site, framework, how, capsys):
    """The good ones are there, and the bad one is a problem wherever people look."""
    text, reason = SEVERAL[how]
    reason = reason.format(site.prefix)
    good = GOOD.format(framework=framework.distribution, target=framework.path("mod:add"), name="x")
    plugin = site.add("bad", good.replace('return [patch("x")]', text.format(site.prefix)))
    names = [f"{site.prefix}-one", f"{site.prefix}-two"]
    made = Engine(load=site.load)
    try:
        report = made.apply()
        assert [row.name for row in report] == names
        (failure,) = report.plugin_failures
        assert (failure.plugin, failure.partly) == (plugin, True)
        assert str(failure).startswith(f"plugin {plugin} could not be used in full: ")
        assert reason in failure.reason
        assert reason in str(report)
        assert framework.load().add(2, 1) == 3
        assert made.report()[names[0]].status is Status.APPLIED
        assert reason in str(made.report())
    finally:
        made.revert()
    with pytest.raises(PatchError, match=f"plugin {plugin} could not be used in full: "):
        Engine(load=site.load).apply(strict=True)
    for command, expected in ((["list"], 0), (["doctor"], 1), (["doctor", "--quiet"], 1), (["doctor", "--json"], 1)):
        assert cli.main(command) == expected
        out, err = capsys.readouterr()
        assert reason in err
        assert "--quiet" in command or all(name in out for name in names)


def test_one_patch_by_itself_is_no_list(site, framework):
    text = GOOD.format(framework=framework.distribution, target=framework.path("mod:add"), name="x-y")
    for number, alone in enumerate(("patch('x-y')", "patch('x-y').listed('x:Y')")):
        site.add(f"bad{number}", text.replace('[patch("x-y")]', alone))
    registered, failures = site.load()
    assert registered == []
    assert len(failures) == 2
    for failure in failures:
        assert "returned the patch x-y, expected a list of patches: `return [PATCH]`" in failure.reason


def test_strict_mode_raises_for_a_broken_plugin(site):
    bad = site.add("bad", "raise ZeroDivisionError('oh')")
    with pytest.raises(PatchError, match=f"plugin {bad} could not be used: .*ZeroDivisionError: oh"):
        Engine(load=site.load).apply(strict=True)


def test_an_unknown_name_may_be_in_a_plugin_that_broke(site):
    bad = site.add("bad", "raise ZeroDivisionError('oh')")
    site.good()
    with pytest.raises(SettingsError, match=rf"\(plugins that could not be used: {bad}\)"):
        Engine(load=site.load).apply(only="trl-some-bug")


def test_a_keyboard_interrupt_is_the_users(site):
    site.add("bad", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.load()


@pytest.mark.parametrize("reverse", [True, False])
def test_of_two_patches_of_one_name_the_first_distribution_wins_whatever_the_path(site, tmp_path, monkeypatch, reverse):
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.syspath_prepend(str(other))
    folders = (site.folder, other) if reverse else (other, site.folder)
    first = site.good("afirst", patch="a-name", folder=folders[0])
    second = site.good("second", patch="a-name", folder=folders[1])
    (item,), (failure,) = site.load()
    assert (item.plugin, failure.plugin) == (first, second)
    assert failure.reason == f"its patch 'a-name' is ignored: {first} has a patch of that name"


def test_one_distribution_found_twice_counts_once(site, tmp_path, monkeypatch):
    good = site.good()
    monkeypatch.setattr(sys, "path", [str(site.folder), *sys.path])
    copy = tmp_path / "copy"
    shutil.copytree(site.folder, copy)
    monkeypatch.setattr(sys, "path", [*sys.path, str(copy)])
    registered, failures = site.load()
    assert ([item.plugin for item in registered], failures) == ([good], [])


def test_a_half_removed_distribution(site):
    """Entry points without METADATA: what an interrupted pip leaves behind."""
    site.add("bad", "raise ZeroDivisionError('oh')", metadata=False)
    good = site.good()
    registered, (failure,) = site.load()
    assert [item.plugin for item in registered] == [good]
    assert "ZeroDivisionError" in failure.reason


# ---------------------------------------------------------------------------------------- who brings a patch


def impostor(site, name="rlhf-patches", entry="aaa", value=None, metadata=True):
    """A distribution that calls itself ours and brings a patch of one of our names. Returns its module."""
    module = f"{site.prefix}_{next(numbers)}"
    (site.folder / f"{module}.py").write_text(IMPOSTOR.format(TAKEN))
    info = site.folder / f"{module}-1.0.dist-info"
    info.mkdir()
    if metadata:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[rlhf_patches]\n{entry} = {value or module}\n")
    return module


@pytest.mark.parametrize(
    "claim",
    [
        {},
        {"entry": "built-in"},
        {"name": "RLHF_Patches"},
        {"name": "rlhf.patches"},
        {"metadata": False, "entry": "rlhf-patches"},
    ],
)
def test_built_in_cannot_be_claimed(site, claim):
    built_in = [patch.name for patch in plugin.rlhf_patches()]
    module = impostor(site, **claim)
    registered, failures = registry.load()
    assert [item.patch.name for item in registered if item.plugin == registry.BUILT_IN] == built_in
    (ours,) = [item for item in registered if item.patch.name == TAKEN]
    assert ours.patch in plugin.rlhf_patches()
    (theirs,) = [item for item in registered if item.patch.name == "x-user"]
    assert theirs.plugin == f"{module} (calls itself {claim.get('name', 'rlhf-patches')})"
    (failure,) = [failure for failure in failures if failure.plugin == theirs.plugin]
    assert failure.reason == f"its patch {TAKEN!r} is ignored: rlhf-patches has a patch of that name"


def test_a_name_that_only_looks_like_ours(site):
    impostor(site, name="rlhf\u2011patches")
    (theirs,) = [item for item in registry.load()[0] if item.patch.name == "x-user"]
    assert theirs.plugin == r"'rlhf\u2011patches'"


@pytest.mark.parametrize("listed", [0, 3])
def test_built_in_patches_need_no_metadata_and_come_once(site, monkeypatch, listed):
    for _ in range(listed):
        impostor(site, value="rlhf_patches.patches.plugin")
    if not listed:
        monkeypatch.setattr(registry.installed, "find", lambda path: {})
    registered, failures = registry.load()
    ours = [(item.patch.name, item.plugin) for item in registered if item.patch.name != "x-user"]
    assert ours == [(patch.name, "rlhf-patches") for patch in plugin.rlhf_patches()]
    assert failures == []


def test_who_brings_a_patch_is_said_wherever_people_read(site, framework, capsys, caplog, monkeypatch):
    name = site.good(patch="foreign-bug")
    credit = f"(plugin {name})"
    for command in (["list"], ["doctor"], ["check", str(framework.site)]):
        assert cli.main(command) == 0
        rows = capsys.readouterr().out.splitlines()
        (row,) = [text for text in rows if text.startswith("foreign-bug")]
        assert credit in row
        assert sum("(plugin" in text for text in rows) == 1, "built-in ones are not worth a word"
    assert cli.main(["explain", "foreign-bug"]) == 0
    assert f"The plugin {name} provides this patch." in capsys.readouterr().out

    framework.write("mod", "def add(a, b):\n    return a * b\n")
    for command in (["doctor"], ["check", str(framework.site)]):
        assert cli.main([*command, "--quiet"]) == 1
        assert capsys.readouterr().err.rstrip().endswith(credit)
    monkeypatch.setenv("RLHF_PATCHES_LOG", "info")
    made = Engine(load=site.load)
    try:
        made.apply()
        framework.load()
        assert [r.getMessage().endswith(credit) for r in caplog.records if "refused" in r.getMessage()] == [True]
        assert credit in str(made.report())
    finally:
        made.revert()


# ----------------------------------------------------------------------------------------- which are allowed


def test_the_variable_allows_the_named_ones_only(site, monkeypatch):
    wanted, other = site.good("wanted"), site.good("other")

    def found():
        return {item.plugin for item in registry.load()[0]} & {wanted, other, registry.BUILT_IN}

    monkeypatch.setenv("RLHF_PATCHES_PLUGINS", f" {wanted.upper().replace('-', '_')} , ")
    assert found() == {registry.BUILT_IN, wanted}
    monkeypatch.setenv("RLHF_PATCHES_PLUGINS", "None")
    assert found() == {registry.BUILT_IN}
    monkeypatch.setenv("RLHF_PATCHES_PLUGINS", "rlhf-patches")
    assert found() == {registry.BUILT_IN}
    assert f"{site.prefix}_other" not in sys.modules, "not even imported"
    monkeypatch.setenv("RLHF_PATCHES_PLUGINS", " ")
    assert found() == {registry.BUILT_IN, wanted, other}


def test_allowing_ours_allows_nobody_who_calls_himself_that(site, monkeypatch):
    module = impostor(site)
    monkeypatch.setenv("RLHF_PATCHES_PLUGINS", "rlhf-patches")
    registered, failures = registry.load()
    assert ({item.plugin for item in registered}, failures, module in sys.modules) == ({"rlhf-patches"}, [], False)


@pytest.mark.parametrize(("value", "near"), [("{}x", "did you mean '{}'"), ("none,{}", "'none'"), (",", "','")])
def test_a_plugin_that_is_not_there_is_an_error(site, monkeypatch, capsys, value, near):
    name = site.good()
    monkeypatch.setenv("RLHF_PATCHES_PLUGINS", value.format(name))
    made = Engine(load=registry.load)
    for _ in range(2):
        with pytest.raises(SettingsError, match="RLHF_PATCHES_PLUGINS names") as raised:
            made.apply()
        assert near.format(name) in str(raised.value)
    assert f"{site.prefix}_zgood" not in sys.modules
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("rlhf-patches: RLHF_PATCHES_PLUGINS names ")


# ------------------------------------------------------------------------------------- what they say of themselves

HOSTILE = "x[/2] :smile: [bold] \x1b]0;title\x07 \x1b[2J \u202e"
SHOWN = r"x[/2] :smile: [bold] \x1b]0;title\x07 \x1b[2J \u202e"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("command", ["list", "doctor", "check", "explain", "diff"])
def test_text_of_a_plugin_is_shown_as_it_is(site, framework, capsys, monkeypatch, terminal, command):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    framework.write("mod", f"def add(a, b):\n    '''{HOSTILE}'''\n    return a - b\n")
    text = GOOD.format(framework=framework.distribution, target=framework.path("mod:add"), name="foreign-bug")
    site.add("good", text.replace('summary="s"', f"summary={HOSTILE!r}").replace('"c"', repr("\u2028" + HOSTILE)))
    (metadata,) = site.folder.glob("*_good-1.0.dist-info/METADATA")
    metadata.write_text("Metadata-Version: 2.1\nName: [/3]:smile:\x1b[2J\nVersion: 1.0\n")
    site.add("guard", GOOD.format(framework=r"[/d]:smile:\x1b[2J", target="no_such.mod:add", name="another-bug"))
    bad = site.add("bad", f"raise ZeroDivisionError({HOSTILE!r} + '\\nmore')")
    arguments = {"check": [str(framework.site)], "explain": ["foreign-bug"], "diff": ["foreign-bug"]}
    status = cli.main([command, *arguments.get(command, [])])
    out, err = capsys.readouterr()
    assert status == (command in ("doctor", "check"))
    for sequence in ("\x1b]0;", "\x07", "\x1b[2J", "\u202e"):
        assert (sequence in out) is (command == "diff" and not terminal), "which the command patch is to take"
        assert sequence not in err
    assert "\u2028" not in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    shown = {"list": r"[/d]:smile:\x1b[2J", "explain": SHOWN, "diff": "x[/2] :smile: [bold]"}
    assert shown.get(command, r"(plugin '[/3]:smile:\x1b[2J')") in plain
    if command in ("list", "doctor", "check"):
        (line,) = [text for text in err.splitlines() if bad in text]
        assert rf"{SHOWN}\nmore" in line


def test_of_two_copies_of_a_plugin_the_first_counts(site, tmp_path, monkeypatch):
    """As for an import: a user's own folder before the environment's, say."""
    name = site.good()
    later = tmp_path / "later"
    later.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(later)])
    info = next(site.folder.glob("*.dist-info"))
    shutil.copytree(info, later / info.name)
    (later / info.name / "entry_points.txt").write_text("[rlhf_patches]\nzgood = no_such_module\n")
    registered, failures = site.load()
    assert ([item.plugin for item in registered], failures) == ([name], [])
