"""The package installed as a user installs it: the built wheel, in a virtual environment of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BUILT_FROM = (
    "rlhf_patches",
    "patches",
    "site_hook",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def build_wheel(folder: Path) -> Path:
    """Build this project's wheel from a copy of the tree, so that no build folder is left in it."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in _BUILT_FROM:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    return wheel_of(source, folder)


def wheel_of(source: Path, folder: Path) -> Path:
    """Build a project's wheel as pip does, by one call of its backend, without pip's three processes around it."""
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the built wheel. Dependencies come from the environment that runs the tests."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, *wheels: Path) -> Installed:
        """Make the environment and install the wheels into it."""
        made = cls(folder)
        venv.create(folder, with_pip=False)
        if wheels:
            made.pip_install(*wheels)
        # A path line adds a folder without running the .pth files in it: this project's editable install stays out.
        lines = [path for path in sys.path if path.endswith("site-packages")]
        (made.site / "zz_dependencies.pth").write_text("\n".join(lines) + "\n")
        return made

    def pip_install(self, *what: str | Path) -> None:
        """Install, by the pip of the environment that runs the tests, which has what building takes, too."""
        found = importlib.util.find_spec("pip")
        assert found is not None
        assert found.origin is not None
        # What `pip --python` starts, without the pip that starts it.
        pip = [self.python, str(Path(found.origin).with_name("__pip-runner__.py")), "--disable-pip-version-check"]
        options = ["-q", "--no-deps", "--no-index", "--no-build-isolation"]
        done = subprocess.run([*pip, "install", *options, *map(str, what)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def copy(self, folder: Path) -> Installed:
        """Another one like it, for what changes it: a copy takes a twentieth of installing."""
        shutil.copytree(self.folder, folder, symlinks=True, dirs_exist_ok=True)
        made = Installed(folder)
        script = Path(made.command)
        script.write_text(script.read_text().replace(str(self.folder), str(folder)))
        return made

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def command(self) -> str:
        return str(self.folder / "bin" / "rlhf-patches")

    @property
    def site(self) -> Path:
        free_threaded = "t" if "t" in sys.abiflags else ""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}{free_threaded}"
        return self.folder / "lib" / version / "site-packages"

    def run(self, *command: str, cwd: Path | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a command with nothing but ``settings`` added to a clean environment."""
        return subprocess.run(
            command, env=self.environment(settings), cwd=cwd or self.folder, capture_output=True, text=True, timeout=300
        )

    def code(self, text: str, *flags: str, cwd: Path | None = None, **settings: str) -> str:
        """Run Python code that must succeed; returns what it printed."""
        done = self.run(self.python, *flags, "-c", text, cwd=cwd, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
        return {**kept, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **settings}
