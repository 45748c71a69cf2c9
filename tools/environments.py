"""What a session of noxfile.py has installed: made from files, used again as long as these stay the same.

nox itself never looks; a stamp in each environment records what it was made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

HERE = Path(__file__).parents[1]
FILES = HERE / "tests" / "environments"
# Pythons for which the newest ast-grep-py has no wheel (0.51.0 has those of 3.10 to 3.14).
_NO_AST_GREP = ["3.15"]


def provide(session: nox.Session, *files: str, project: bool = True, beside: str | None = None) -> None:
    """Install the requirement files in order (``*-no-deps.txt`` without dependencies), then this project.

    Each file in the folder ``beside`` names other releases that go into a folder of their own within the
    environment (``side-by-side/NAME``): put first on PYTHONPATH, it turns the environment into another one.
    Skipped when the environment was made from the same files already.
    """
    paths = [FILES / name for name in files]
    others = sorted((FILES / beside).glob("*.txt")) if beside else []
    stamp = Path(session.virtualenv.location) / "made-from"
    wanted = _stamp(*paths, *others)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    # By pip, as it is configured here: torch, whose CPU build is chosen so, and what says that it wants another Python
    # and is used all the same. Modules are compiled when they are imported: most never are.
    pip = ["-q", "--no-compile"]
    in_spite = [*pip, "--no-deps", "--ignore-requires-python"]
    for path in paths:
        if path.stem == "torch":
            session.install(*pip, "-r", str(path))
        elif path.stem.endswith("no-deps"):
            session.install(*in_spite, "-r", str(path))
        else:
            _install(session, "-r", str(path))
    if "vllm.txt" in files:  # vLLM asks for them; PyPI's are built for CUDA, and transformers' imports fail on them
        session.run("python", "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    for path in others:
        folder = Path(session.virtualenv.location) / "side-by-side" / path.stem
        # pip leaves alone what is in such a folder already.
        shutil.rmtree(folder, ignore_errors=True)
        session.install(*in_spite, "--target", str(folder), "-r", str(path))
    if project:
        _install(session, "setuptools>=68", "wheel")
        if session.python in _NO_AST_GREP:
            _older_ast_grep(session)
        with open(HERE / ".nox" / "lock", "w") as lock:  # an editable install writes into this folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            _install(session, "--no-build-isolation", "-e", ".[test]")
    stamp.write_text(wanted)


def _stamp(*paths: Path) -> str:
    """A digest of what an environment is made from; the editable install in it points to this folder."""
    of_project = [HERE / name for name in ("setup.cfg", "setup.py", "pyproject.toml")]
    described = b"".join(path.read_bytes() for path in [*paths, *of_project]) + str(HERE).encode()
    return hashlib.sha256(described).hexdigest()


def _install(session: nox.Session, *arguments: str) -> None:
    """By uv, which takes a tenth of pip's time; where it cannot (a mirror that only pip knows), by pip."""
    uv = Path(sys.executable).with_name("uv")
    if uv.exists():
        python = Path(session.virtualenv.location) / "bin" / "python"
        try:
            session.run(str(uv), "pip", "install", "-q", "--python", str(python), *arguments, external=True)
            return
        except CommandFailed:
            session.warn("uv could not install this; pip, as it is configured here, may")
    session.install("-q", *arguments)


def _older_ast_grep(session: nox.Session) -> None:
    """Put in the wheel of Python 3.14: PyO3 goes through functions that newer Pythons have as well. For tests only."""
    try:
        session.run("python", "-m", "pip", "install", "-q", "--only-binary=:all:", "ast-grep-py", silent=True)
        return  # there is one by now
    except CommandFailed:
        pass
    (site,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    older = ("--python-version=3.14", "--only-binary=:all:", "--no-deps", "--target", str(site))
    session.run("python", "-m", "pip", "install", "-q", *older, "ast-grep-py")
    for file in [*site.glob("ast_grep_py/*"), *site.glob("ast_grep_py-*/WHEEL")]:
        if file.name == "WHEEL":  # uv asks it whether this is for the Python at hand
            file.write_text(file.read_text().replace("cp314", "cp" + session.python.replace(".", "")))
        elif "-314-" in file.name:
            file.rename(file.with_name(file.name.replace("-314-", f"-{session.python.replace('.', '')}-")))
