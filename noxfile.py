"""The environments of this project, each made from its own files. ``make test`` and ``make demo`` run this.

Environments live in ``.nox`` and are used again as long as the files that describe them stay the same (nox
itself never looks: a stamp in each records what it was made from).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import nox

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / "tests" / "environments"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False
nox.options.sessions = [
    "lint",
    "engine",
    "releases",
    "frameworks",
    "oldest",
    "newest",
    "trl-newest",
    "trl-oldest",
    "cluster",
]

# The frameworks' own releases run on 3.11; torch's CPU build at hand is for 3.11 too.
FRAMEWORK_PYTHON = "3.11"
ENGINE_PYTHONS = ["3.10", "3.11", "3.12", "3.13"]

# pyenv's shims answer for interpreters that its configuration does not name; its folders of interpreters do not.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
FOUND = [str(path) for version in ENGINE_PYTHONS for path in sorted(PYENV.glob(f"versions/{version}.*/bin"))]
os.environ["PATH"] = os.pathsep.join([*FOUND, os.environ["PATH"]])


def provide(session: nox.Session, *files: str, project: bool = True, beside: str | None = None) -> None:
    """Install the requirement files in order (``*-no-deps.txt`` without dependencies), then this project.

    Each file in the folder ``beside`` names other releases that go into a folder of their own within the
    environment (``side-by-side/NAME``): put first on PYTHONPATH, it turns the environment into another one.
    Skipped when the environment was made from the same files already.
    """
    paths = [ENVIRONMENTS / name for name in files]
    others = sorted((ENVIRONMENTS / beside).glob("*.txt")) if beside else []
    described = b"".join(
        path.read_bytes() for path in [*paths, *others, HERE / "setup.cfg", HERE / "setup.py", HERE / "pyproject.toml"]
    )
    described += str(HERE).encode()  # the editable install points here
    stamp = Path(session.virtualenv.location) / "made-from"
    wanted = hashlib.sha256(described).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    for path in paths:
        # What a framework says of itself, there, is more than what the tests use of it: Python 3.12 included.
        flags = ["--no-deps", "--ignore-requires-python"] if path.stem.endswith("no-deps") else []
        session.install("-q", *flags, "-r", str(path))
    for path in others:
        folder = Path(session.virtualenv.location) / "side-by-side" / path.stem
        # pip leaves alone what is in such a folder already.
        shutil.rmtree(folder, ignore_errors=True)
        session.install("-q", "--no-deps", "--ignore-requires-python", "--target", str(folder), "-r", str(path))
    if project:
        session.install("-q", "setuptools>=68", "wheel")
        session.install("-q", "--no-build-isolation", "-e", ".[test]")
    stamp.write_text(wanted)


def pytest(session: nox.Session, folder: str, extra: Sequence[str] = (), python: str = "python") -> None:
    """Run the tests of a folder; pytest's status for "no test ran" fails the session."""
    session.run(python, "-m", "pytest", folder, *extra, *session.posargs)


@nox.session(python=FRAMEWORK_PYTHON)
def lint(session: nox.Session) -> None:
    """ruff, mypy, and the generated pages."""
    provide(session, "lint.txt", "releases.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    # The survey's own code runs on one Python only.
    session.run("mypy", "--python-version", FRAMEWORK_PYTHON, "releases/survey.py")


@nox.session(python=FRAMEWORK_PYTHON)
def format(session: nox.Session) -> None:
    """Put every file into ruff's format, and fix what can be fixed."""
    provide(session, "lint.txt", project=False)
    session.run("ruff", "check", "--fix", ".")
    session.run("ruff", "format", ".")


@nox.session(python=ENGINE_PYTHONS)
def engine(session: nox.Session) -> None:
    """The engine's tests: no framework, every interpreter found."""
    provide(session)
    pytest(session, "tests/engine", ["-n", "2", "-o", "faulthandler_timeout=400"])


@nox.session(python=ENGINE_PYTHONS)
def cpython(session: nox.Session) -> None:
    """CPython's own tests with every module watched: none may end otherwise than without us."""
    provide(session)
    session.run("python", "tests/cpython/compare.py", *session.posargs)


@nox.session(python=FRAMEWORK_PYTHON)
def environment(session: nox.Session) -> None:
    """Make the environment with the real frameworks: minutes and 3 GB, so most sessions share it."""
    provide(session, "torch.txt", "frameworks.txt", "frameworks-no-deps.txt", beside="side-by-side")


# Two at a time; a file's tests stay together, because they share training runs.
BY_FILE = ("-n", "2", "--dist", "loadfile")
# Of the megatron-core patch, for a second release: what the two calls do, and the crash and the cure in training.
BEFORE_AND_AFTER = ("-k", "megatron_core_semantics or (rollouts_crash and save0)")
SHARED = {"venv_backend": "none", "requires": ["environment"]}
SHARED_BY_TRL = {"venv_backend": "none", "requires": ["environment-trl"]}
BOTH = {"venv_backend": "none", "requires": ["environment", "environment-trl"]}
PYTHON = str(HERE / ".nox" / "environment" / "bin" / "python")
TRL_PYTHON = str(HERE / ".nox" / "environment-trl" / "bin" / "python")


def with_other_releases(session: nox.Session, name: str, python: str = PYTHON) -> None:
    """Let the releases of ``side-by-side/NAME`` win over those that the environment's sessions share."""
    session.env["PYTHONPATH"] = str(Path(python).parents[1] / "side-by-side" / name)


@nox.session(**SHARED)
def frameworks(session: nox.Session) -> None:
    """The patches on the real frameworks, newest releases."""
    with_torch = ["tests/vocab_parallel", "tests/engine/test_functions_torch.py"]
    pytest(session, "tests/frameworks", [*with_torch, *BY_FILE], python=PYTHON)


@nox.session(**SHARED)
def fuzz(session: nox.Session) -> None:
    """Random programs against the in-place gradient, for a minute (``nox -s fuzz -- --seed 1 --seconds 600``)."""
    session.run(PYTHON, "tests/vocab_parallel/fuzz_ownership.py", *session.posargs)


@nox.session(**BOTH)
def demo(session: nox.Session) -> None:
    """Before and after, on the real frameworks."""
    session.run(PYTHON, "examples/demo/run.py", "--trl-python", TRL_PYTHON, *session.posargs)


@nox.session(**BOTH)
def benchmarks(session: nox.Session) -> None:
    """All figures: start-up, call overhead, and what single patches save."""
    for script in sorted(Path("benchmarks").glob("*.py")):
        session.run(TRL_PYTHON if script.stem.startswith("trl_") else PYTHON, str(script), *session.posargs)


@nox.session(**SHARED)
def oldest(session: nox.Session) -> None:
    """The megatron-core patch on the oldest release that the guard admits and that imports here."""
    with_other_releases(session, "megatron-0.10")
    pytest(session, "tests/frameworks", [*BEFORE_AND_AFTER, *BY_FILE], python=PYTHON)


@nox.session(**SHARED)
def newest(session: nox.Session) -> None:
    """The megatron-core patch on the newest release on PyPI."""
    with_other_releases(session, "megatron-0.19")
    pytest(session, "tests/frameworks", [*BEFORE_AND_AFTER, *BY_FILE], python=PYTHON)


@nox.session(python=FRAMEWORK_PYTHON)
def releases(session: nox.Session) -> None:
    """The record of every release against the patches' guards, and a few real wheels against the record."""
    provide(session, "releases.txt")
    pytest(session, "tests/releases", ["-n", "2"])


@nox.session(python=FRAMEWORK_PYTHON)
def survey(session: nox.Session) -> None:
    """Look at every release that is not in the record yet."""
    provide(session, "releases.txt")
    session.run("python", "releases/survey.py", *session.posargs)


@nox.session(python=FRAMEWORK_PYTHON, name="environment-trl")
def environment_trl(session: nox.Session) -> None:
    """Make the environment with real TRL and DeepSpeed: ms-swift, in the other one, wants trl below 1."""
    provide(session, "torch.txt", "trl.txt", beside="side-by-side-trl")


@nox.session(**SHARED_BY_TRL, name="trl-newest")
def trl_newest(session: nox.Session) -> None:
    """The TRL patches under real DeepSpeed ZeRO-3."""
    pytest(session, "tests/frameworks_trl", BY_FILE, python=TRL_PYTHON)


@nox.session(**SHARED_BY_TRL, name="trl-oldest")
def trl_oldest(session: nox.Session) -> None:
    """The same on the oldest TRL with the defect."""
    with_other_releases(session, "trl-1.5", TRL_PYTHON)
    pytest(session, "tests/frameworks_trl", BY_FILE, python=TRL_PYTHON)


@nox.session(**SHARED_BY_TRL)
def cluster(session: nox.Session) -> None:
    """Ranks and workers: torchrun, deepspeed, accelerate, Ray."""
    # Three at a time: much of it is waiting, for clusters to start and for ranks that do not come.
    pytest(session, "tests/cluster", ["-n", "3", "--dist", "loadfile"], python=TRL_PYTHON)


@nox.session(python=FRAMEWORK_PYTHON)
def docs(session: nox.Session) -> None:
    """Write the generated pages."""
    provide(session)
    session.run("python", "-m", "rlhf_patches.pages", "docs/patches")
