"""Environment variables and selection by name: a typo is an error that names what was meant."""

from __future__ import annotations

import datetime
import re

import pytest

from rlhf_patches import SettingsError, settings

NAMES = ("megatron-core-forward-pre-hook-reentry", "megatron-no-sync-reentry", "trl-lost-loss")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (None, ()),
        ((), ()),
        ("trl-lost-loss", ("trl-lost-loss",)),
        ("megatron-*", NAMES[:2]),
        (["trl-*", "*-no-sync-*"], NAMES[1:]),
        (["*", "trl-lost-loss"], NAMES),
        (["trl-?ost-loss"], NAMES[2:]),
        (iter(["trl-lost-loss"]), NAMES[2:]),
    ],
)
def test_expand(patterns, expected):
    assert settings.expand(patterns, NAMES, "only") == expected


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            "megatron-no-sync-rentry",
            "only names 'megatron-no-sync-rentry', which is not a patch; did you mean 'megatron-no-sync-reentry'?",
        ),
        ("zzz", "only names 'zzz', which is not a patch; known are:" + "".join(f"\n  {name}" for name in NAMES)),
        ("verl-*", "only names 'verl-*', which is not a patch"),
        (["trl-lost-loss", ""], "only names ''"),
        ([None], "only has None: expected names of patches or globs, as strings"),
        ("TRL-lost-loss", "did you mean 'trl-lost-loss'?"),
    ],
)
def test_expand_says_what_was_meant(patterns, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        settings.expand(patterns, NAMES, "only")


def test_the_hint_ends_the_message():
    with pytest.raises(SettingsError, match=r"\(look there\)$"):
        settings.expand("zzz", NAMES, "only", " (look there)")
    with pytest.raises(SettingsError, match="there are none"):
        settings.expand("zzz", (), "only")


@pytest.mark.parametrize(
    ("variable", "near"),
    [("DISABLED", "DISABLE"), ("STRCIT", "STRICT"), ("AUTO_LOAD", "AUTOLOAD"), ("VERFIY", "VERIFY"), ("disable", None)],
)
def test_unknown_variables_name_the_nearest(monkeypatch, variable, near):
    monkeypatch.setenv(f"RLHF_PATCHES_{variable}", "1")
    with pytest.raises(SettingsError, match=f"RLHF_PATCHES_{variable} is unknown") as raised:
        settings.from_environment(NAMES)
    if near:
        assert str(raised.value).endswith(f"did you mean 'RLHF_PATCHES_{near}'?")


def test_read(monkeypatch):
    assert settings.from_environment(NAMES) == settings.Settings((), (), False)
    monkeypatch.setenv("RLHF_PATCHES_DISABLE", " trl-* , ,megatron-no-sync-reentry,")
    monkeypatch.setenv("RLHF_PATCHES_ONLY", "megatron-*")
    monkeypatch.setenv("RLHF_PATCHES_STRICT", "Yes")
    assert settings.from_environment(NAMES) == settings.Settings(NAMES[1:], NAMES[:2], True)
    monkeypatch.setenv("RLHF_PATCHES_ONLY", " , ")
    assert settings.from_environment(NAMES).only == ()
    monkeypatch.setenv("RLHF_PATCHES_VERIFY", "perhaps")
    with pytest.raises(SettingsError, match="RLHF_PATCHES_VERIFY is 'perhaps'"):
        settings.from_environment(NAMES)


@pytest.mark.parametrize("variable", ["DISABLE", "ONLY"])
def test_read_names_the_variable(monkeypatch, variable):
    monkeypatch.setenv(f"RLHF_PATCHES_{variable}", "trl-lost-los")
    with pytest.raises(
        SettingsError, match=f"^RLHF_PATCHES_{variable} names 'trl-lost-los'.*did you mean 'trl-lost-loss'"
    ):
        settings.from_environment(NAMES)


@pytest.mark.parametrize(
    ("value", "named"),
    [("json", "json"), ("mine, os.path,_thread", "os.path, _thread"), ("rlhf_patches", "rlhf_patches")],
)
def test_the_standard_library_cannot_be_watched(monkeypatch, value, named):
    monkeypatch.setenv("RLHF_PATCHES_WATCH", value)
    with pytest.raises(SettingsError, match=f"RLHF_PATCHES_WATCH names {named}: expected top-level modules of framew"):
        settings.from_environment(NAMES)


@pytest.mark.parametrize("value", ["", " , ", "mine,transformers.models", "json_repair"])
def test_everything_else_can_be_watched(monkeypatch, value):
    monkeypatch.setenv("RLHF_PATCHES_WATCH", value)
    settings.from_environment(NAMES)


@pytest.mark.parametrize("wrong", [None, "60", 0, -1, True, float("nan"), float("inf"), datetime.timedelta(0)])
def test_seconds_that_cannot_be_meant(wrong):
    with pytest.raises(SettingsError, match=r"^timeout is .*expected seconds, more than 0, or a datetime\.timedelta$"):
        settings.seconds(wrong)


def test_seconds():
    assert settings.seconds(datetime.timedelta(minutes=1)) == settings.seconds(60) == 60.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        (" on ", True),
        ("0", False),
        ("", False),
        ("off", False),
        ("No", False),
    ],
)
def test_truth(monkeypatch, value, expected):
    monkeypatch.setenv("RLHF_PATCHES_STRICT", value)
    assert settings.truth("STRICT") is expected


@pytest.mark.parametrize("variable", ["STRICT", "VERIFY"])
@pytest.mark.parametrize("value", ["2", "maybe", "y"])
def test_truth_of_what_cannot_be_meant(monkeypatch, variable, value):
    monkeypatch.setenv(f"RLHF_PATCHES_{variable}", value)
    with pytest.raises(SettingsError, match=f"RLHF_PATCHES_{variable} is '{value}': expected one of 1, true"):
        settings.from_environment(NAMES)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", (None, False)), ("info", ("info", False)), ("Warning:ALL", ("warning", True)), ("off", ("off", False))],
)
def test_log_level(monkeypatch, value, expected):
    monkeypatch.setenv("RLHF_PATCHES_LOG", value)
    assert settings.log_level() == expected


@pytest.mark.parametrize("value", ["loud", "info:some", ":all", "info,all"])
def test_log_level_that_cannot_be_meant(monkeypatch, value):
    monkeypatch.setenv("RLHF_PATCHES_LOG", value)
    with pytest.raises(SettingsError, match=r"RLHF_PATCHES_LOG is .*expected debug, info, warning, error, off"):
        settings.log_level()


def test_every_variable_is_documented():
    documented = re.findall(r"^RLHF_PATCHES_(\w+)", settings.__doc__, re.MULTILINE)
    assert sorted(documented) == sorted(settings.KNOWN)


@pytest.mark.parametrize("wrong", [3, True, 1.5])
def test_a_selection_that_is_no_list_of_names(wrong):
    with pytest.raises(SettingsError, match=f"only is {wrong!r}: expected names of patches"):
        settings.expand(wrong, ["a-b"], "only")
