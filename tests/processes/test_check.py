"""``rlhf-patches check``, run as a user runs it: what it says of releases, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from rlhf_patches.offline.download import DownloadError, fetch
from rlhf_patches.patches import plugin
from tests.harness import toy_slime
from tests.harness.downloads import broken_pip, cached
from tests.harness.toy_slime import DEFECT

KEYS = {"name", "status", "reason", "distribution", "version", "guard", "plugin", "source"}
NAMES = [patch.name for patch in plugin.rlhf_patches()]


@pytest.fixture
def cli(installed, tmp_path):
    """Runs the command in an empty folder, without the user's own pip settings, its cache in the test's folder."""
    (tmp_path / "here").mkdir()

    def run(*arguments, cwd=None, **settings):
        quiet = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return installed.run(installed.command, *arguments, cwd=cwd or tmp_path / "here", **{**quiet, **settings})

    return run


def unpacked(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return str(folder)


def as_sdist(wheel, path):
    """The same files and metadata as an sdist."""
    folder = unpacked(wheel, path.with_suffix(".unpacked"))
    (metadata,) = Path(folder).glob("*.dist-info/METADATA")
    (Path(folder) / "PKG-INFO").write_bytes(metadata.read_bytes())
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "slime-0.1.0")
    return str(path)


def repaired(text):
    return text.replace(DEFECT, "True")


def rows(done):
    return [row for row in json.loads(done.stdout) if row["name"] == toy_slime.PATCH]


# ------------------------------------------------------------------------------------------------ what it says


def test_json_in_all_four_states(cli, slime_wheel, tmp_path):
    other = make_other(tmp_path)
    applies, unaffected = slime_wheel(), slime_wheel("99.0", repaired)
    refused = slime_wheel("0.1.1", repaired)
    done = cli("check", "--json", applies, unaffected, other)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{other} has no package of any framework" in done.stderr
    found = json.loads(done.stdout)
    assert [row["name"] for row in found] == NAMES * 3
    assert [row["source"] for row in found] == [source for source in (applies, unaffected, other) for _ in NAMES]
    assert all(set(row) - {"places", "changes_numbers", "kind", "what_to_do"} == KEYS for row in found)
    assert all(row["status"] == "absent" for row in found if row["name"] != toy_slime.PATCH)
    assert [(row["status"], row["version"]) for row in rows(done)] == [
        ("applies", "0.1.0"),
        ("unaffected", "99.0"),
        ("absent", None),
    ]
    reasons = [row["reason"] for row in rows(done)]
    assert "slime 0.1.0 is affected" in reasons[0]
    assert "slime 99.0 is not affected" in reasons[1]
    assert "there is no module slime.backends.megatron_utils.model" in reasons[2]
    done = cli("check", "--json", refused, applies)
    assert (done.returncode, done.stderr) == (1, "")
    assert [(row["status"], row["version"]) for row in rows(done)] == [("refused", "0.1.1"), ("applies", "0.1.0")]
    assert "0 times, expected 1" in rows(done)[0]["reason"]


def make_other(folder):
    path = folder / "other-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other-1.dist-info/METADATA", "Name: other\nVersion: 1\n")
    return str(path)


def test_text(cli, slime_wheel):
    done = cli("check", slime_wheel())
    assert (done.returncode, done.stderr) == (0, "")
    assert slime_wheel() in done.stdout
    assert f"{toy_slime.PATCH}  applies" in done.stdout
    assert f"{len(NAMES) - 1} patches of other modules: absent" in done.stdout
    assert "verl-no-sync-reentry" not in done.stdout


@pytest.mark.parametrize("flags", [[], ["--json"], ["--quiet"]])
def test_nothing_found_is_no_success(cli, tmp_path, flags):
    """A wheel of something else, or a folder above the one that holds the packages."""
    (tmp_path / "above" / "checkout" / "slime").mkdir(parents=True)
    for source in (make_other(tmp_path), str(tmp_path / "above")):
        done = cli("check", *flags, source)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"rlhf-patches: {source} has no package of any framework")
        assert json.loads(done.stdout) if flags == ["--json"] else not done.stdout


def test_a_framework_without_the_patched_modules_is_an_answer(cli, tmp_path):
    (tmp_path / "old" / "slime").mkdir(parents=True)
    done = cli("check", str(tmp_path / "old"))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(NAMES)} patches of modules that it does not have: absent" in done.stdout


def test_a_bad_source_does_not_hide_the_others(cli, slime_wheel, tmp_path):
    bad = tmp_path / "bad.whl"
    bad.write_bytes(b"PK")
    refused = slime_wheel("0.1.1", repaired)
    for flags in (["--json"], []):
        done = cli("check", *flags, slime_wheel(), str(bad), "./missing", "missing.whl", refused)
        assert done.returncode == 2
        lines = done.stderr.splitlines()
        assert [line.partition(" ")[0] for line in lines] == ["rlhf-patches:"] * 3
        assert str(bad) in lines[0]
        assert "./missing does not exist" in lines[1]
        assert "missing.whl does not exist" in lines[2]
        if flags:
            assert [row["source"] for row in rows(done)] == [slime_wheel(), refused]
        else:
            assert "applies" in done.stdout
            assert "refused" in done.stdout


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
def test_agreement_with_doctor_on_the_same_text_installed(cli, slime_wheel, tmp_path, version, change):
    wheel = slime_wheel(version, change)
    folder = unpacked(wheel, tmp_path / "site")
    sources = [wheel, folder, as_sdist(wheel, tmp_path / "slime.tar.gz")]
    done, doctor = cli("check", "--json", *sources), cli("doctor", "--json", PYTHONPATH=folder)
    (expected,) = rows(doctor)
    assert expected["status"] in ("applies", "refused", "unaffected")
    assert done.returncode == doctor.returncode
    found = rows(done)
    assert len(found) == 3
    for row in found:
        assert {key: row[key] for key in ("status", "version")} == {key: expected[key] for key in ("status", "version")}
        if change is not str:
            continue  # the reason names the file
        assert row["reason"] == expected["reason"]
    statuses = {row["name"]: row["status"] for row in json.loads(doctor.stdout)}
    assert {row["name"]: row["status"] for row in json.loads(done.stdout)} == statuses


def test_the_users_settings_and_environment_do_not_matter(cli, slime_wheel, tmp_path):
    installed_too = unpacked(slime_wheel("0.1.1", repaired), tmp_path / "site")
    settings = {
        "RLHF_PATCHES_DISABLE": "*",
        "RLHF_PATCHES_ONLY": "verl-no-sync-reentry",
        "RLHF_PATCHES_STRICT": "1",
        "PYTHONPATH": installed_too,
    }
    plain, other = cli("check", "--json", slime_wheel()), cli("check", "--json", slime_wheel(), **settings)
    assert (plain.returncode, other.returncode) == (0, 0)
    assert other.stdout == plain.stdout


def test_nothing_of_a_release_is_run_or_imported(installed, slime_wheel, tmp_path):
    marker = tmp_path / "marker"
    harm = f"open({str(marker)!r}, 'w').close()\n"
    names = ("setup.py", "conftest.py", "sitecustomize.py", "slime/__init__.py", "slime/backends/__init__.py", "pip.py")
    more = dict.fromkeys(names, harm) | {"evil.pth": f"import os; {harm}", "pyproject.toml": "[build-system]\n"}
    wheel = slime_wheel(
        change=lambda text: harm + text, more={**more, "slime/backends/megatron_utils/__init__.py": harm}
    )
    folder = unpacked(wheel, tmp_path / "folder")
    sdist = as_sdist(wheel, tmp_path / "slime.tar.gz")
    code = (
        "import sys; from rlhf_patches import cli; status = cli.main(['check', '--json', *sys.argv[1:]]);"
        "bad = [m for m in sys.modules if m.partition('.')[0] in ('slime', 'torch', 'megatron', 'pip')];"
        "sys.exit(str(bad) if bad else status)"
    )
    before = snapshot(tmp_path)
    done = installed.run(installed.python, "-c", code, wheel, sdist, folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in rows(done)] == ["applies"] * 3
    assert snapshot(tmp_path) == before
    assert not marker.exists()


def snapshot(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_a_terminal_gets_no_escape_sequences_from_a_release(cli, slime_wheel):
    """Metadata is printed: it must not move the cursor and write a better result over the real one."""
    more = {"slime-0.1.0.dist-info/METADATA": "Name: slime\nVersion: 0.1.0\x1b[2J\x1b[1;1H\n"}
    done = cli("check", slime_wheel(more=more))
    assert done.returncode == 0
    assert "\x1b" not in done.stdout


def test_a_path_that_is_not_utf_8(cli, slime_wheel, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    unpacked(slime_wheel(), folder)
    for flags in ([], ["--json"]):
        done = cli("check", *flags, str(folder), PYTHONIOENCODING="utf-8")  # strict, as in most locales
        assert done.returncode == 0, done.stderr
        assert "applies" in done.stdout


# ------------------------------------------------------------------------------------------------ NAME==VERSION


def test_name_and_version_are_fetched_once(cli, slime_wheel, tmp_path):
    index = str(Path(slime_wheel()).parent)
    done = cli("check", "--json", "Slime == 0.1.0", PIP_FIND_LINKS=index)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(row["status"], row["source"]) for row in rows(done)] == [("applies", "Slime == 0.1.0")]
    assert cached(tmp_path) == ["rlhf-patches/wheels/slime/0.1.0/slime-0.1.0-py3-none-any.whl"]
    again = cli("check", "--json", "slime==0.1.0", PYTHONPATH=broken_pip(tmp_path))
    assert (again.returncode, again.stderr) == (0, "")
    assert not list((tmp_path / "here").iterdir())
    elsewhere = cli("check", "slime==0.1.0", "--cache", str(tmp_path / "c"), PYTHONPATH=str(tmp_path / "broken"))
    assert elsewhere.returncode == 2
    assert "pip was called" in elsewhere.stderr


def test_what_lies_in_the_working_directory_is_not_run(cli, slime_wheel, tmp_path):
    """`python -m pip` looks there first: it may be a checkout that the user does not trust yet."""
    marker = tmp_path / "marker"
    for name in ("pip", "email", "runpy"):
        (tmp_path / "here" / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()")
    done = cli("check", "slime==0.1.0", PIP_FIND_LINKS=str(Path(slime_wheel()).parent))
    assert not marker.exists()
    assert done.returncode == 0, done.stderr


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


def test_options_among_the_sources(cli):
    for arguments in (["--index-url=http://evil==1"], ["--", "--index-url=http://evil==1", "x"], []):
        done = cli("check", *arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_used(cli, tmp_path):
    file = tmp_path / "file"
    file.touch()
    done = cli("check", "slime==0.1.0", "--cache", str(file))
    assert done.returncode == 2
    assert f"the cache {file} cannot be used" in done.stderr
    assert done.stderr.count("\n") == 1
