"""What ``rlhf-patches check`` says of releases, of any shape. As a user runs it: tests/processes/test_check.py."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from rlhf_patches.offline import evaluate
from rlhf_patches.offline.download import DownloadError, fetch
from rlhf_patches.patches import plugin
from tests.harness import toy_slime
from tests.harness.downloads import cached
from tests.harness.simple_index import index
from tests.harness.toy_slime_fixtures import as_sdist, make_other, repaired, unpacked

__all__ = ["index"]

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
        assert line.startswith(f"rlhf-patches: {source} contains no package of a supported framework")
        assert json.loads(out) if flags == ["--json"] else not out


def test_a_framework_without_the_patched_modules_is_an_answer(said, tmp_path):
    (tmp_path / "old" / "slime").mkdir(parents=True)
    status, out, err = said("check", tmp_path / "old")
    assert (status, err) == (0, "")
    assert f"{len(NAMES)} patches of modules that this release does not have: absent" in out


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
        assert row["reason"] + evaluate.SEARCHED * (row["status"] == "applies") == expected["reason"]
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
    with pytest.raises(DownloadError, match="is neither an existing path nor NAME==VERSION") as caught:
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


# ---------------------------------------------------------------------------------- NAME==VERSION without a wheel


@pytest.fixture
def only_an_sdist(index, slime_wheel, tmp_path, monkeypatch):
    """An index that pip is configured with, which has an sdist of slime 0.1.0; what is run of it leaves a marker."""
    marker = tmp_path / "marker"
    harm = f"open({str(marker)!r}, 'w').close()\n"
    backend = "[build-system]\nrequires = []\nbuild-backend = 'harm'\nbackend-path = ['.']\n"
    wheel = slime_wheel(more={"setup.py": harm, "harm.py": harm, "slime/__init__.py": harm, "pyproject.toml": backend})
    sdist = Path(as_sdist(wheel, index.folder / "slime-0.1.0.tar.gz"))
    (index.folder / "simple" / "slime").mkdir()

    def listed(sha256):
        link = f'<a href="/{sdist.name}#sha256={sha256}">{sdist.name}</a>'
        (index.folder / "simple" / "slime" / "index.html").write_text(link)

    listed(hashlib.sha256(sdist.read_bytes()).hexdigest())
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    index.listed, index.marker = listed, marker
    return index


def test_without_a_wheel_the_sdist_is_read_and_nothing_of_it_is_run(said, only_an_sdist, monkeypatch, tmp_path):
    status, out, err = said("check", "--json", "slime==0.1.0")
    assert (status, err) == (0, "")
    assert [(row["status"], row["version"]) for row in rows(out)] == [("applies", "0.1.0")]
    assert not only_an_sdist.marker.exists()
    assert cached(tmp_path) == ["rlhf-patches/wheels/slime/0.1.0/slime-0.1.0.tar.gz"]
    monkeypatch.setattr(subprocess, "run", None)
    only_an_sdist.requests.clear()
    assert said("check", "--json", "slime==0.1.0") == (0, out, "")
    assert only_an_sdist.requests == []


def test_an_sdist_that_is_not_what_the_index_says(said, only_an_sdist, tmp_path):
    only_an_sdist.listed("0" * 64)
    status, _, err = said("check", "slime==0.1.0")
    assert (status, err.count("\n")) == (2, 1)
    assert "slime-0.1.0.tar.gz could not be fetched: its sha256 differs from the one that the index states" in err
    assert cached(tmp_path) == []


@pytest.mark.one_python
@pytest.mark.parametrize("how", ["PIP_NO_INDEX", "no-index"])
def test_pip_is_told_to_use_no_index(said, only_an_sdist, monkeypatch, tmp_path, how):
    if how == "no-index":
        (tmp_path / "pip.conf").write_text("[global]\nno-index = true\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    else:
        monkeypatch.setenv(how, "1")
    status, _, err = said("check", "slime==0.1.0")
    assert (status, err.count("\n")) == (2, 1)
    assert "there is neither a wheel nor an sdist of slime==0.1.0 (pip is configured without an index)" in err
    assert only_an_sdist.requests == []


def test_the_index_is_the_one_of_pips_own_configuration(said, only_an_sdist, monkeypatch, tmp_path):
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {only_an_sdist.url}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_INDEX_URL")
    assert said("check", "slime==0.1.0")[::2] == (0, "")
    assert "slime-0.1.0.tar.gz" in only_an_sdist.requests


@pytest.mark.one_python
def test_a_release_that_there_is_not(said, only_an_sdist):
    status, _, err = said("check", "slime==0.9.9")
    assert (status, err.count("\n")) == (2, 1)
    assert f"there is neither a wheel nor an sdist of slime==0.9.9 ({only_an_sdist.url} has none, too)" in err


@pytest.mark.exhaustive
def test_deepspeed_of_pypi(said, monkeypatch, tmp_path):
    """It has no wheels. What is started is pip, to look for a wheel and to say how it is configured."""
    monkeypatch.delenv("PIP_NO_INDEX")
    started = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **more: started.append(command) or run(command, **more))
    status, out, err = said("check", "--json", "deepspeed==0.18.4")
    assert (status, err) == (0, "")
    found = {row["name"]: row["status"] for row in json.loads(out)}
    assert (found["deepspeed-empty-groups"], found["deepspeed-zero2-accumulation"]) == ("applies", "unaffected")
    assert cached(tmp_path) == ["rlhf-patches/wheels/deepspeed/0.18.4/deepspeed-0.18.4.tar.gz"]
    assert [(command[3], "--only-binary=:all:" in command) for command in started] == [
        ("download", True),
        ("config", False),
    ]
