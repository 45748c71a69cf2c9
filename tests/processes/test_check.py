"""``rlhf-patches check``, run as a user runs it: all that it can say, and what it leaves alone.

More of what it says: tests/engine/offline/test_check.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlhf_patches.patches import plugin
from tests.harness import toy_slime
from tests.harness.downloads import broken_pip, cached
from tests.harness.toy_slime_fixtures import as_sdist, make_other, repaired, unpacked

KEYS = {"name", "status", "reason", "distribution", "version", "guard", "plugin", "harm", "bug", "when", "source"}
NAMES = [patch.name for patch in plugin.rlhf_patches()]


@pytest.fixture
def cli(installed, tmp_path):
    """Runs the command in an empty folder, without the user's own pip settings, its cache in the test's folder."""
    (tmp_path / "here").mkdir()

    def run(*arguments, cwd=None, **settings):
        quiet = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return installed.run(installed.command, *arguments, cwd=cwd or tmp_path / "here", **{**quiet, **settings})

    return run


def rows(done):
    return [row for row in json.loads(done.stdout) if row["name"] == toy_slime.PATCH]


# ------------------------------------------------------------------------------------------------ what it says


@pytest.mark.one_python
def test_json_in_all_four_states(cli, slime_wheel, tmp_path):
    other = make_other(tmp_path)
    applies, unaffected = slime_wheel(), slime_wheel("99.0", repaired)
    refused = slime_wheel("0.1.1", repaired)
    done = cli("check", "--json", applies, unaffected, other)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{other} contains no package of a supported framework" in done.stderr
    found = json.loads(done.stdout)
    assert [row["name"] for row in found] == NAMES * 3
    assert [row["source"] for row in found] == [source for source in (applies, unaffected, other) for _ in NAMES]
    for row in found:
        further = {"harm", "bug", "when"} if row.get("kind") == "watch" else set()
        assert set(row) - {"places", "changes_numbers", "kind", "what_to_do"} == KEYS - further
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


@pytest.mark.one_python
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


@pytest.mark.one_python
def test_a_path_that_is_not_utf_8(cli, slime_wheel, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    unpacked(slime_wheel(), folder)
    for flags in ([], ["--json"]):
        done = cli("check", *flags, str(folder), PYTHONIOENCODING="utf-8")  # strict, as in most locales
        assert done.returncode == 0, done.stderr
        assert "applies" in done.stdout


# ------------------------------------------------------------------------------------------------ NAME==VERSION


@pytest.mark.one_python
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


@pytest.mark.one_python
def test_what_lies_in_the_working_directory_is_not_run(cli, slime_wheel, tmp_path):
    """`python -m pip` looks there first: it may be a checkout that the user does not trust yet."""
    marker = tmp_path / "marker"
    for name in ("pip", "email", "runpy"):
        (tmp_path / "here" / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()")
    done = cli("check", "slime==0.1.0", PIP_FIND_LINKS=str(Path(slime_wheel()).parent))
    assert not marker.exists()
    assert done.returncode == 0, done.stderr
