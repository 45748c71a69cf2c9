"""What ``rlhf-patches check`` says of releases, of any shape. As a user runs it: tests/processes/test_check.py."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from rlhf_patches.offline.download import DownloadError, fetch
from rlhf_patches.patches import plugin
from tests.harness import toy_slime
from tests.harness.toy_slime_fixtures import as_sdist, make_other, repaired, unpacked

NAMES = [patch.name for patch in plugin.rlhf_patches()]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows(out):
    return [row for row in json.loads(out) if row["name"] == toy_slime.PATCH]


def test_text(said, slime_wheel):
    status, out, err = said("check", slime_wheel())
    assert (status, err) == (0, "")
    assert slime_wheel() in out
    assert f"{toy_slime.PATCH}  applies" in out
    assert f"{len(NAMES) - 1} patches of other modules: absent" in out
    assert "verl-no-sync-reentry" not in out


@pytest.mark.parametrize("flags", [[], ["--json"], ["--quiet"]])
def test_nothing_found_is_no_success(said, tmp_path, flags):
    """A wheel of something else, or a folder above the one that holds the packages."""
    (tmp_path / "above" / "checkout" / "slime").mkdir(parents=True)
    for source in (make_other(tmp_path), str(tmp_path / "above")):
        status, out, err = said("check", *flags, source)
        assert status == 2
        (line,) = err.splitlines()
        assert line.startswith(f"rlhf-patches: {source} has no package of any framework")
        assert json.loads(out) if flags == ["--json"] else not out


def test_a_framework_without_the_patched_modules_is_an_answer(said, tmp_path):
    (tmp_path / "old" / "slime").mkdir(parents=True)
    status, out, err = said("check", tmp_path / "old")
    assert (status, err) == (0, "")
    assert f"{len(NAMES)} patches of modules that it does not have: absent" in out


def test_a_bad_source_does_not_hide_the_others(said, slime_wheel, tmp_path):
    bad = tmp_path / "bad.whl"
    bad.write_bytes(b"PK")
    refused = slime_wheel("0.1.1", repaired)
    for flags in (["--json"], []):
        status, out, err = said("check", *flags, slime_wheel(), bad, "./missing", "missing.whl", refused)
        assert status == 2
        lines = err.splitlines()
        assert [line.partition(" ")[0] for line in lines] == ["rlhf-patches:"] * 3
        assert str(bad) in lines[0]
        assert "./missing does not exist" in lines[1]
        assert "missing.whl does not exist" in lines[2]
        if flags:
            assert [row["source"] for row in rows(out)] == [slime_wheel(), refused]
        else:
            assert "applies" in out
            assert "refused" in out


@pytest.mark.parametrize(
    ("version", "change"),
    [
        ("0.1.0", str),
        ("0.1.0", repaired),
        ("99.0", str),
        ("99.0", repaired),
        ("not-a-version", str),
        ("0.1.0", lambda text: "def train(\n"),
    ],
)
def test_agreement_with_doctor_on_the_same_text_installed(said, slime_wheel, tmp_path, monkeypatch, version, change):
    wheel = slime_wheel(version, change)
    folder = unpacked(wheel, tmp_path / "site")
    checked, out, _ = said("check", "--json", wheel, folder, as_sdist(wheel, tmp_path / "slime.tar.gz"))
    monkeypatch.syspath_prepend(folder)
    status, doctor, _ = said("doctor", "--json")
    (expected,) = rows(doctor)
    assert expected["status"] in ("applies", "refused", "unaffected")
    assert checked == status
    found = rows(out)
    assert len(found) == 3
    for row in found:
        assert {key: row[key] for key in ("status", "version")} == {key: expected[key] for key in ("status", "version")}
        if change is not str:
            continue  # the reason names the file
        assert row["reason"] == expected["reason"]
    statuses = {row["name"]: row["status"] for row in json.loads(doctor)}
    assert {row["name"]: row["status"] for row in json.loads(out)} == statuses


def test_a_terminal_gets_no_escape_sequences_from_a_release(said, slime_wheel):
    """Metadata is printed: it must not move the cursor and write a better result over the real one."""
    more = {"slime-0.1.0.dist-info/METADATA": "Name: slime\nVersion: 0.1.0\x1b[2J\x1b[1;1H\n"}
    status, out, _ = said("check", slime_wheel(more=more))
    assert status == 0
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "source",
    [
        "x",
        "x>=1",
        "x==1.*",
        "x===1",
        "x==1,==1",
        "x[y]==1",
        "x==1; python_version<'3'",
        "x @ https:evil",
        "",
        "--pre==1",
        "-r==1",
        "x==1 --pre",
        "x==..",
        "x==1\n--pre",
        "..==1",
        "x===..",
        "x\\y==1",
    ],
)
def test_what_is_no_name_and_version(source, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(DownloadError, match="is no existing path and no NAME==VERSION") as caught:
        fetch(source, tmp_path / "cache")
    assert repr(source) in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_options_among_the_sources(said):
    for arguments in (["--index-url=http://evil==1"], ["--", "--index-url=http://evil==1", "x"], []):
        assert said("check", *arguments)[0] == 2


def test_a_cache_that_cannot_be_used(said, tmp_path):
    file = tmp_path / "file"
    file.touch()
    status, _, err = said("check", "slime==0.1.0", "--cache", file)
    assert status == 2
    assert f"the cache {file} cannot be used" in err
    assert err.count("\n") == 1
