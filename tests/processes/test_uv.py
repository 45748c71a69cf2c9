"""The package in an environment that uv has made, which has no pip: real uv, PyPI, and the commands as a user types."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.downloads import cached

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".cache" / "tools" / "bin"
UV = shutil.which("uv", path=f"{os.environ['PATH']}{os.pathsep}{TOOLS}")

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(UV is None, reason="uv is not here")]


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Its folder, with the wheel and a release that a patch is for."""
    folder = tmp_path_factory.mktemp("uv") / "venv"
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder], check=True)
    python = str(folder / "bin" / "python")
    for wanted in ([str(wheel)], ["--no-deps", "math-verify==0.8.0"]):
        subprocess.run([UV, "pip", "install", "-q", "--python", python, *wanted], check=True)
    return folder


@pytest.fixture
def run(environment, tmp_path):
    """Runs the command with uv on PATH, and no pip in this Python either."""
    # Most Pythons that a venv is made from have pip, and download() asks that one first.
    (tmp_path / "no_pip").mkdir()
    (tmp_path / "no_pip" / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import sys
            if sys.prefix in ({str(environment)!r}, {sys.base_prefix!r}):
                class NoPip:
                    def find_spec(name, path=None, target=None):
                        if name == "pip":
                            raise ImportError("No module named pip")
                sys.meta_path.insert(0, NoPip)
        """)
    )

    def call(*arguments, uv=True):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RLHF_", "COV_"))}
        places = ([str(Path(UV).parent)] if uv else []) + ["/usr/bin", "/bin"]
        settings = {"PYTHONPATH": str(tmp_path / "no_pip"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(
            [environment / "bin" / "rlhf-patches", *arguments],
            env={**kept, "PATH": os.pathsep.join(places), **settings},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return call


def test_a_release_is_fetched_by_uvs_pip(run, environment, tmp_path):
    assert not list(environment.glob("lib/*/site-packages/pip"))
    assert not shutil.which("uv", path="/usr/bin:/bin"), "else this proves nothing"
    done = run("check", "--json", "math-verify==0.9.0", uv=False)
    assert (done.returncode, "has no pip to fetch" in done.stderr) == (2, True)
    done = run("check", "--json", "math-verify==0.9.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["name"] for row in json.loads(done.stdout) if row["status"] == "applies"] == ["math-verify-thread"]
    wheels = [file for file in cached(tmp_path) if file.startswith("rlhf-patches/")]
    assert wheels == ["rlhf-patches/wheels/math-verify/0.9.0/math_verify-0.9.0-py3-none-any.whl"]
    done = run("try", "math_verify.utils:timeout", "signal.alarm($A)", "--in", "math-verify==0.9.0")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_installed_is_looked_at_and_the_hook_is_on(run, environment):
    done = run("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["name"] for row in json.loads(done.stdout) if row["status"] == "applies"] == ["math-verify-thread"]
    assert f"({environment}/lib/" in run("doctor").stdout
    code = "import sys; print(sys.prefix, 'rlhf_patches.site_hook' in sys.modules)"
    done = run("run", "--", "python", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{environment} True\n", "")


def test_survey_needs_nothing_else(run):
    done = run("survey", "math-verify-thread")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the range >=0.6.1,<=0.9.0: as suggested" in done.stdout
