"""What runs in which environment: ``make test``, ``make demo``.

Tags: ``test`` is what to run before a commit, ``rest`` what CI runs besides. Environments live in ``.nox``
(tools/environments.py makes them). Sessions run side by side, and a table of what each took ends the command
(tools/sessions.py).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from tests.harness import effort  # noqa: E402
from tools.environments import provide  # noqa: E402
from tools.interpreters import ENGINE_PYTHONS, FRAMEWORK_PYTHON, OF_DEBIAN, USABLE, is_here  # noqa: E402
from tools.sessions import session  # noqa: E402

nox.needs_version = ">=2026.10"  # --parallel
nox.options.reuse_existing_virtualenvs = True
nox.options.allow_parallel = True
nox.options.tags = ["test"]
# A missing interpreter is a session that was skipped, and a line in the table.
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"
# Environments are made without bytecode; the first import of a module writes it, for all the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What stops `make test` stops what it has started.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest(session: nox.Session, *arguments: str, python: str = "python") -> None:
    """Run tests. An interrupt leaves time to end clusters.

    pytest's status for "no test ran", 5, fails the session, but for a part of the tests.
    """
    arguments = (*arguments, *session.posargs)
    options: dict[str, Any] = {"interrupt_timeout": 20, "terminate_timeout": 5, "external": python != "python"}
    session.run(python, "-m", "pytest", *arguments, success_codes=[0, 5] if "--part" in arguments else [0], **options)


# -- sessions ------------------------------------------------------------------------------------------

# Two at a time; the fork servers and what ran on them are shared. A framework that is not installed is an error.
REAL = ("-n", "2", "--dist", "loadgroup", "--frameworks", "required")
# Of the megatron-core patch, for a second release: what the two calls do, and the crash and the cure in training.
BEFORE_AND_AFTER = (
    "tests/patches/megatron_core/test_forward_pre_hook_reentry.py",
    "tests/patches/megatron_core/test_forward_pre_hook_reentry_training.py",
    *("-k", "not training or (rollouts_crash and save0)"),
)
# Many wheels, older releases, hundreds of processes: tests with this mark have sessions of their own.
NOT_EXHAUSTIVE = ("-m", "not exhaustive")
# What is installed beside TRL. ms-swift, in the other environment, has no room for these.
_BY_TRL = ("trl", "deepspeed", "accelerate", "peft", "transformers", "openrlhf", "torch", "datasets")
BY_TRL = [f"tests/patches/{name}" for name in _BY_TRL]
OF_ALL = ["tests/patches/test_contract.py", "tests/patches/test_texts.py", "tests/patches/test_pairs.py"]
ON_VLLM = ["tests/patches/trl_on_vllm", "tests/patches/vllm"]
NOT_BY_TRL = ["tests/patches", *(f"--ignore={folder}" for folder in (*BY_TRL, *ON_VLLM))]
SHARED = {"venv_backend": "none", "requires": ["environment"]}
SHARED_BY_TRL = {"venv_backend": "none", "requires": ["environment-trl"]}
ENVIRONMENTS_MADE = ["environment", "environment-trl", "environment-vllm"]
BOTH = {"venv_backend": "none", "requires": ["environment", "environment-trl"]}
PYTHON = str(HERE / ".nox" / "environment" / "bin" / "python")
TRL_PYTHON = str(HERE / ".nox" / "environment-trl" / "bin" / "python")
VLLM_PYTHON = str(HERE / ".nox" / "environment-vllm" / "bin" / "python")


def with_other_releases(session: nox.Session, name: str, python: str = PYTHON) -> None:
    """Let the releases of ``side-by-side/NAME`` win over those that the environment's sessions share."""
    session.env["PYTHONPATH"] = str(Path(python).parents[1] / "side-by-side" / name)


# A session starts as soon as its environment is there, the first in this file before the others: what waits most and
# takes longest, so that others compute beside it. The engine's tests need little, and run while environments are made.
@session(python=FRAMEWORK_PYTHON, tags=["test", "rest"])
def environment(session: nox.Session) -> None:
    """Make the environment with the real frameworks: 3 GB, so most sessions share it."""
    provide(session, "torch.txt", "frameworks.txt", "frameworks-no-deps.txt", beside="side-by-side")


@session(python=FRAMEWORK_PYTHON, name="environment-trl", tags=["test", "rest"])
def environment_trl(session: nox.Session) -> None:
    """Make the environment with real TRL and DeepSpeed: ms-swift, in the other one, wants trl below 1."""
    provide(session, "torch.txt", "trl.txt", beside="side-by-side-trl")


@session(python=FRAMEWORK_PYTHON, name="environment-vllm", tags=["test", "rest"])
def environment_vllm(session: nox.Session) -> None:
    """Make the environment with real vLLM, for a CPU, and TRL: vLLM wants an older transformers."""
    provide(session, "torch.txt", "vllm.txt")


@session(**SHARED_BY_TRL, tags=["test"])
def cluster(session: nox.Session) -> None:
    """Ranks and workers: torchrun, deepspeed, accelerate, Ray."""
    # Three at a time: much of it is waiting, for clusters to start and for ranks that do not come.
    pytest(session, "tests/cluster", "-n", "3", "--dist", "loadfile", *NOT_EXHAUSTIVE, python=TRL_PYTHON)


def run_exhaustive(session: nox.Session, *part: str) -> None:
    provide(session, "survey.txt")
    chosen = ("-m", "exhaustive", *part)
    engine = ("tests/record", "tests/engine", "tests/processes")
    pytest(session, *engine, "-n", "2", "-k", "not real_wheels", *chosen)
    pytest(session, "tests/cluster", "-n", "2", "--dist", "loadfile", *chosen, python=TRL_PYTHON)
    pytest(session, *NOT_BY_TRL, *REAL, *chosen, python=PYTHON)
    pytest(session, *BY_TRL, *OF_ALL, *REAL, *chosen, python=TRL_PYTHON)
    pytest(session, *ON_VLLM, *REAL, *chosen, python=VLLM_PYTHON)


@session(python=FRAMEWORK_PYTHON, requires=ENVIRONMENTS_MADE)
def exhaustive(session: nox.Session) -> None:
    """The patches on older releases, and hundreds of processes: an hour (``-- --part 2/4`` for a part)."""
    run_exhaustive(session)


@session(python=FRAMEWORK_PYTHON, requires=ENVIRONMENTS_MADE, name="exhaustive-tenth", tags=["rest"])
def exhaustive_tenth(session: nox.Session) -> None:
    """A tenth of the same, the same each time."""
    run_exhaustive(session, "--part", effort.OF_CI)


@session(**SHARED, tags=["test"])
def frameworks(session: nox.Session) -> None:
    """The patches on the real frameworks, newest releases."""
    with_torch = ("tests/engine/engine/test_functions_torch.py", "tests/engine/test_untouched_torch.py")
    pytest(session, *NOT_BY_TRL, *with_torch, *REAL, *NOT_EXHAUSTIVE, python=PYTHON)


@session(venv_backend="none", name="pythons")
def more_pythons(session: nox.Session) -> None:
    """Install the newest Pythons where this machine has none (`tools/pythons.py`); that it cannot is no failure."""
    missing = [version for version in OF_DEBIAN if not is_here(version)]
    if missing:
        session.run(sys.executable, "tools/pythons.py", *missing, success_codes=[0, 1])


# What depends on the Python: functions and their code, syntax trees, imports, start-up. Texts, definitions, reports and
# commands are left to the oldest and the newest one.
ON_EACH_PYTHON = (
    *("tests/engine/engine", "tests/engine/guards"),
    *(f"tests/engine/test_{name}.py" for name in ("api", "import_system", "site_hook", "untouched", "watching")),
    *(f"tests/processes/test_{name}.py" for name in ("engine", "finders_in_front", "functions", "import_hooks")),
    *(f"tests/processes/test_{name}.py" for name in ("import_system", "properties", "rewriting", "site_hook")),
    "tests/processes/test_start_up.py",
)


def engine(session: nox.Session) -> None:
    """The engine's tests: no framework."""
    provide(session)
    options = ("-n", "2", "-o", "faulthandler_timeout=400")
    every = ("tests/engine", "tests/processes")
    between = session.python not in (USABLE[0], USABLE[-1])
    pytest(session, *(ON_EACH_PYTHON if between else every), *options, *NOT_EXHAUSTIVE)
    if between and session.python == effort.ONE:
        others = [f"--ignore={path}" for path in ON_EACH_PYTHON]
        pytest(session, *every, *others, *options, "-m", "one_python and not exhaustive")


for version in ENGINE_PYTHONS:  # the oldest that is found lacks most
    tag = "test" if version in USABLE[:1] else "rest"
    first = ["pythons"] if version in OF_DEBIAN else []
    session(python=version, name=f"engine-{version}", requires=first, tags=[tag])(engine)


@session(**SHARED_BY_TRL, name="trl-newest", tags=["test"])
def trl_newest(session: nox.Session) -> None:
    """The patches of TRL, and of what is under it, newest releases."""
    of_all = ("tests/patches/test_contract.py", "tests/patches/test_default_path.py")
    pytest(session, *BY_TRL, *of_all, *REAL, *NOT_EXHAUSTIVE, python=TRL_PYTHON)


@session(venv_backend="none", requires=["environment-vllm"], tags=["test"])
def rollouts(session: nox.Session) -> None:
    """Patches between trainer and vLLM, and the watch on vLLM itself, on the real vLLM."""
    pytest(session, *ON_VLLM, *REAL, *NOT_EXHAUSTIVE, python=VLLM_PYTHON)


@session(python=FRAMEWORK_PYTHON, tags=["test"])
def lint(session: nox.Session) -> None:
    """ruff, mypy, which way imports go, and the Markdown: length of lines, links to files and headings."""
    provide(session, "lint.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("rumdl", "check", ".")
    session.run("mypy")
    # The survey's own code runs on one Python only.
    session.run("mypy", "--python-version", FRAMEWORK_PYTHON, "release_record/survey.py")
    pytest(session, "tests/lint")


@session(python=FRAMEWORK_PYTHON, tags=["test"])
def releases(session: nox.Session) -> None:
    """The record of every release against the patches' guards, and a few real wheels against the record.

    Or every real wheel that matters, 17 CPU minutes: ``nox -s releases -- -m exhaustive``.
    """
    provide(session, "survey.txt")
    pytest(session, "tests/record", "-n", "2", *NOT_EXHAUSTIVE)


@session(**SHARED, tags=["rest"])
def oldest(session: nox.Session) -> None:
    """The megatron-core patch on the oldest release that the guard admits and that imports here."""
    with_other_releases(session, "megatron-0.10")
    pytest(session, *BEFORE_AND_AFTER, *REAL, python=PYTHON)


@session(**SHARED, tags=["rest"])
def newest(session: nox.Session) -> None:
    """The megatron-core patch on the newest release on PyPI."""
    with_other_releases(session, "megatron-0.19")
    pytest(session, *BEFORE_AND_AFTER, *REAL, python=PYTHON)


@session(**SHARED_BY_TRL, name="trl-oldest", tags=["rest"])
def trl_oldest(session: nox.Session) -> None:
    """Two TRL patches on the oldest TRL with their defects. Tests of the others choose their release themselves."""
    with_other_releases(session, "trl-1.5", TRL_PYTHON)
    chosen = ("tests/patches/trl", "tests/patches/test_contract.py", "-k", "chunked and not eager")
    pytest(session, *chosen, *REAL, python=TRL_PYTHON)


@session(**SHARED, tags=["rest"])
def fuzz(session: nox.Session) -> None:
    """Random programs against the in-place gradient, for a minute (``nox -s fuzz -- --seed 1 --seconds 600``)."""
    session.run(PYTHON, "tests/patches/vocab_parallel/fuzz_ownership.py", *session.posargs)


@session(python=ENGINE_PYTHONS, requires=["pythons"])
def cpython(session: nox.Session) -> None:
    """CPython's own tests with every module watched: outcomes must equal those without rlhf_patches."""
    provide(session)
    session.run("python", "tests/cpython/compare.py", *session.posargs)


def run_upstream(session: nox.Session, python: str, beside: Sequence[str], names: Sequence[str]) -> None:
    """Of these distributions those that are named after ``--``, or all."""
    chosen = [name for name in names if name in session.posargs or not session.posargs]
    if chosen:
        folders = [str(Path(python).parents[1] / "side-by-side" / name) for name in ("upstream-tests", *beside)]
        session.env["PYTHONPATH"] = os.pathsep.join(folders)
        session.run(python, "tests/upstream/compare.py", *chosen)


@session(**SHARED)
def upstream(session: nox.Session) -> None:
    """verl's and Math-Verify's own tests with every patch on: outcomes must equal the unpatched release's."""
    run_upstream(session, PYTHON, ["math-verify-0.9"], ["verl", "math-verify"])


@session(**SHARED_BY_TRL, name="upstream-trl")
def upstream_trl(session: nox.Session) -> None:
    """The same for what TRL stands on; of accelerate the last release that there are patches for."""
    run_upstream(session, TRL_PYTHON, [], ["peft", "transformers"])
    run_upstream(session, TRL_PYTHON, ["accelerate-1.13"], ["accelerate"])


def run_mutants(session: nox.Session, *arguments: str) -> None:
    provide(session, "survey.txt")
    pythons = {
        "engine": str(Path(session.bin) / "python"),
        "frameworks": PYTHON,
        "trl": TRL_PYTHON,
        "vllm": VLLM_PYTHON,
    }
    given = [argument for name, python in pythons.items() for argument in (f"--{name}", python)]
    session.run("python", "tests/mutants.py", *given, *arguments, *session.posargs)


@session(python=FRAMEWORK_PYTHON, requires=ENVIRONMENTS_MADE)
def mutants(session: nox.Session) -> None:
    """Wrong versions of this project, in copies: each has a test that must notice it (``-- PARTS OF NAMES``)."""
    run_mutants(session)


@session(python=FRAMEWORK_PYTHON, requires=ENVIRONMENTS_MADE, name="mutants-few", tags=["rest"])
def mutants_few(session: nox.Session) -> None:
    """The same few of them each time, of every folder that is mutated."""
    run_mutants(session, "--few")


def run_hunt(session: nox.Session, *arguments: str) -> None:
    """In both environments, each of which leaves out what the other one has; all of it, whatever is found."""
    failed = []
    for name, python in (("trl", TRL_PYTHON), ("megatron", PYTHON)):
        command = (python, "-m", "hunt", "--environment", name, *arguments, *session.posargs)
        try:
            session.run(*command, external=True)
        except CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"the hunt failed in {', '.join(failed)}: its last lines say what is new")


@session(**BOTH)
def hunt(session: nox.Session) -> None:
    """Relations that every trainer must keep, on the newest releases: ``make hunt NAMES="trl micro_batches"``."""
    run_hunt(session)


@session(**SHARED_BY_TRL, name="hunt-sample", tags=["test"])
def hunt_sample(session: nox.Session) -> None:
    """The hunt's own tests, and every patch on against off over a few configurations; hunt-rest has more of them."""
    pytest(session, "tests/hunt", python=TRL_PYTHON)
    session.run(TRL_PYTHON, "-m", "hunt", "--environment", "trl", "--check-patches", "0.015", external=True)


@session(**BOTH, name="hunt-rest", tags=["rest"])
def hunt_rest(session: nox.Session) -> None:
    """A third of the catalogue's bugs in older releases; some configurations with patches on and off, and rehearsed."""
    run_hunt(session, "--known-bugs", "0.33")
    run_hunt(session, "--check-patches", "0.03")
    session.run(TRL_PYTHON, "-m", "hunt", "--environment", "trl", "--rehearse", "0.2", external=True)


@session(**SHARED, name="demo-megatron")
def demo_megatron(session: nox.Session) -> None:
    """Before and after, on the real frameworks; arguments are names of frameworks or patches (``make demo``)."""
    session.run(PYTHON, "examples/demo/run.py", "--session", "demo-megatron", *session.posargs)


@session(**SHARED_BY_TRL, name="demo-trl")
def demo_trl(session: nox.Session) -> None:
    """The same for TRL."""
    session.run(TRL_PYTHON, "examples/demo/run.py", "--session", "demo-trl", *session.posargs)


@session(venv_backend="none", requires=["environment-vllm"], name="demo-vllm")
def demo_vllm(session: nox.Session) -> None:
    """The same for TRL on real vLLM."""
    session.run(VLLM_PYTHON, "examples/demo/run.py", "--session", "demo-vllm", *session.posargs)


@session(venv_backend="none", requires=ENVIRONMENTS_MADE)
def benchmarks(session: nox.Session) -> None:
    """All figures: start-up, call overhead, and what single patches save."""
    for script in sorted(Path("benchmarks").glob("*.py")):
        of_trl, on_vllm = script.stem.startswith(("trl_", "transformers_")), script.stem.startswith("watch_")
        session.run(VLLM_PYTHON if on_vllm else TRL_PYTHON if of_trl else PYTHON, str(script), *session.posargs)


@session(**SHARED_BY_TRL, name="transformers-releases")
def transformers_releases(session: nox.Session) -> None:
    """Every minor release of transformers, fetched: gradients with and without transformers-accumulation-scale."""
    session.env["EVERY_TRANSFORMERS"] = "1"
    pytest(session, "tests/patches/transformers/test_accumulation_scale_releases.py", *REAL, python=TRL_PYTHON)


@session(python=FRAMEWORK_PYTHON)
def survey(session: nox.Session) -> None:
    """Look at every release that is not in the record yet, and prove what is shipped of its texts on each Python."""
    provide(session, "survey.txt")
    session.run("python", "release_record/survey.py", *session.posargs)
    site = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    path = os.pathsep.join([str(HERE), str(site).strip()])  # what it takes is the same on each
    for version in filter(is_here, ENGINE_PYTHONS):
        session.run(f"python{version}", "release_record/prove.py", env={"PYTHONPATH": path}, external=True)


@session(python=FRAMEWORK_PYTHON)
def pairs(session: nox.Session) -> None:
    """Read which releases fail at an import beside which others: `audit` predicts from it."""
    provide(session)
    session.run("python", "release_record/pairs.py", *session.posargs)


@session(python=FRAMEWORK_PYTHON)
def format(session: nox.Session) -> None:
    """Put every file into ruff's format, and fix what can be fixed."""
    provide(session, "lint.txt", project=False)
    session.run("ruff", "check", "--fix", ".")
    session.run("ruff", "format", ".")
    session.run("rumdl", "fmt", ".")


@session(python=FRAMEWORK_PYTHON, tags=["rest"])
def site(session: nox.Session) -> None:
    """The documentation as a site, and what a browser makes of it."""
    provide(session, "site.txt")
    pytest(session, "tests/site")
    session.run("python", "tools/site.py")


@session(python=FRAMEWORK_PYTHON)
def docs(session: nox.Session) -> None:
    """Write what is derived from the patches: their pages, their catalogue, what the site hook waits for."""
    provide(session)
    session.run("python", "tools/derive.py")
