"""The command, run as a user runs it, in an environment with the wheel and in one with a make-believe framework."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from rlhf_patches.patches import plugin
from tests.harness import toy_slime

KEYS = {"name", "status", "reason", "distribution", "version", "guard", "plugin", "harm", "bug", "when"}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cli(installed):
    def run(*arguments: str, cwd: Path | None = None, **settings: str):
        return installed.run(installed.command, *arguments, cwd=cwd, **settings)

    return run


def rows(done):
    return {row["name"]: row for row in json.loads(done.stdout)}


@pytest.mark.parametrize("command", ["list", "doctor"])
def test_json_is_a_list_of_objects_with_the_promised_keys(cli, command, slime):
    done = cli(command, "--json", PYTHONPATH=str(slime))
    assert done.returncode == 0, done.stderr
    found = rows(done)
    assert list(found) == [patch.name for patch in plugin.rlhf_patches()]
    assert found[toy_slime.PATCH]["places"] == [f"{slime}/slime/backends/megatron_utils/model.py:1"]
    for row in found.values():
        further = {"harm", "bug", "when"} if row.get("kind") == "watch" else set()  # it is of no bug in particular
        assert set(row) - {"places", "changes_numbers", "kind", "what_to_do"} == KEYS - further
    assert found[toy_slime.PATCH]["status"] == "applies"
    assert found[toy_slime.PATCH]["version"] is None
    assert found["verl-no-sync-reentry"]["status"] == "absent"


def test_doctor_imports_no_framework(installed, slime):
    (slime / "slime" / "__init__.py").write_text("raise SystemExit('imported!')")
    code = (
        "import sys; from rlhf_patches import cli; status = cli.main(['doctor', '--json']);"
        "assert not [m for m in sys.modules if m.partition('.')[0] in ('slime', 'torch', 'megatron')]; sys.exit(status)"
    )
    done = installed.run(installed.python, "-c", code, PYTHONPATH=str(slime))
    assert done.returncode == 0, done.stderr
    assert rows(done)[toy_slime.PATCH]["status"] == "applies"


@pytest.mark.one_python
def test_doctor_honors_the_variables(cli, slime):
    row = rows(cli("doctor", "--json", PYTHONPATH=str(slime), RLHF_PATCHES_DISABLE="slime-*"))[toy_slime.PATCH]
    assert (row["status"], row["reason"]) == ("disabled", "disabled by RLHF_PATCHES_DISABLE")
    only = rows(cli("list", "--json", PYTHONPATH=str(slime), RLHF_PATCHES_ONLY=toy_slime.PATCH))
    assert [name for name, row in only.items() if row["status"] != "disabled"] == [toy_slime.PATCH]
    wrong = cli("doctor", RLHF_PATCHES_STRIKT="1")
    assert wrong.returncode == 2
    assert "did you mean 'RLHF_PATCHES_STRICT'?" in wrong.stderr


@pytest.mark.one_python
@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the command patch")
def test_diff_is_a_patch_that_repairs_the_users_own_file(cli, slime, tmp_path):
    done = cli("diff", toy_slime.PATCH, PYTHONPATH=str(slime))
    assert done.returncode == 0, done.stderr
    model = slime / "slime" / "backends" / "megatron_utils" / "model.py"
    subprocess.run(["patch", "-p0", str(model)], input=done.stdout, text=True, check=True, capture_output=True)
    assert "is_none_or_megatrons(config.no_sync_func)" in model.read_text()
    assert len(model.read_text().splitlines()) == 3


@pytest.mark.one_python
def test_a_diff_names_the_folder_in_which_patch_takes_it(cli, slime, tmp_path):
    done = cli("diff", toy_slime.PATCH, PYTHONPATH=str(slime))
    assert done.stdout.splitlines()[:2] == [
        f"# patch -p0 -d {slime}",
        "--- slime/backends/megatron_utils/model.py",
    ]
    if shutil.which("patch"):
        subprocess.run(["patch", "-p0", "-d", str(slime)], input=done.stdout, text=True, check=True)


def test_a_diff_as_a_patch_is_what_git_applies(cli, slime, tmp_path):
    done = cli("diff", toy_slime.PATCH, "--format", "patch", PYTHONPATH=str(slime))
    assert done.returncode == 0, done.stderr
    assert f"\nSubject: [PATCH] {toy_slime.PATCH}: " in done.stdout
    subprocess.run(["git", "apply"], cwd=slime, input=done.stdout, text=True, check=True)
    model = slime / "slime" / "backends" / "megatron_utils" / "model.py"
    assert "is_none_or_megatrons(config.no_sync_func)" in model.read_text()


def test_a_reader_that_has_gone_is_no_refusal(installed):
    """`rlhf-patches doctor | head`"""
    for unbuffered in ("", "1"):
        code = f"set -o pipefail; {shlex.quote(installed.command)} list --all | head -c 1"
        done = installed.run("bash", "-c", code, PYTHONUNBUFFERED=unbuffered)
        assert (done.returncode, done.stdout, done.stderr) == (0, "P", "")


def test_every_wrong_variable_is_named(cli):
    done = cli("doctor", RLHF_PATCHES_ONLI="1", RLHF_PATCHES_STRICT="perhaps", RLHF_PATCHES_DISABLE="nothing,like-it")
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert "RLHF_PATCHES_ONLI is unknown; did you mean 'RLHF_PATCHES_ONLY'?" in first
    assert [name for name in ("'nothing'", "'like-it'", "STRICT is 'perhaps'") if name not in done.stderr] == []
    assert "  slime-no-sync-reentry" in rest


def test_the_readmes_first_lines_work(installed):
    code = "import rlhf_patches; rlhf_patches.verify(); print(rlhf_patches.ray.runtime_env()['env_vars'])"
    assert "RLHF_PATCHES_AUTOLOAD" in installed.code(code)


def test_a_checkout_on_the_path_says_what_to_do(installed):
    code = "import rlhf_patches; print(rlhf_patches.apply())"
    said = installed.code(code, PYTHONPATH=str(ROOT))
    assert f"{ROOT} is a checkout on sys.path" in said
    assert f"`pip install {ROOT}`" in said


def test_audit_of_the_wheel_has_its_record(cli, tmp_path):
    (tmp_path / "requirements.txt").write_text("trl==1.5.0\n")
    done = cli("audit", str(tmp_path / "requirements.txt"))
    assert (done.returncode, "1.15.0" in done.stdout) == (1, True)


def test_as_a_module(installed):
    """Where the script is not on PATH; messages and usage name the command all the same."""
    as_module = ["-m", "rlhf_patches"]
    done = installed.run(installed.python, *as_module, "explain", "slime-no-sync-reentry")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# slime-no-sync-reentry")
    help_text = installed.run(installed.python, *as_module, "--help").stdout
    assert help_text == installed.run(installed.command, "--help").stdout
    assert help_text.startswith("usage: rlhf-patches ")
    wrong = installed.run(installed.python, *as_module, "explain", "nothing-like-it")
    assert (wrong.returncode, wrong.stderr.startswith("rlhf-patches: no known bug fits")) == (2, True)


def test_an_output_that_knows_ascii_only(installed):
    done = installed.run(installed.command, "doctor", PYTHONIOENCODING="ascii", RLHF_PATCHES_REPORT="\xfcber")
    assert done.returncode == 0, done.stderr
    assert r"RLHF_PATCHES_REPORT=\xfcber" in done.stdout


@pytest.mark.one_python
def test_a_diff_is_never_written_as_something_else(cli, slime):
    model = slime / "slime" / "backends" / "megatron_utils" / "model.py"
    model.write_text(model.read_text().replace("When overlap", "Wh\xebn overlap"), encoding="utf-8")
    done = cli("diff", toy_slime.PATCH, PYTHONPATH=str(slime), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "set PYTHONIOENCODING=utf-8" in done.stderr
    done = cli("diff", toy_slime.PATCH, PYTHONPATH=str(slime), PYTHONIOENCODING="utf-8")
    assert "Wh\xebn overlap" in done.stdout


@pytest.mark.one_python
def test_the_wheel_has_every_data_file(wheel):
    """A checkout has them anyway: a missing one would be seen by users only."""
    folders = [ROOT / "rlhf_patches", ROOT / "patches"]
    data = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.json")}
    assert {"rlhf_patches/offline/releases.json", "rlhf_patches/offline/versions.json"} < data
    with zipfile.ZipFile(wheel) as archive:
        assert not data - set(archive.namelist())
