"""What the tests of the engine and those on real frameworks share."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import effort
from tests.harness.forkserver import ForkServer, serving
from tests.harness.installed import Installed, build_wheel
from tests.harness.once import once

HERE = Path(__file__).parent
WARM = "TESTS_WARM_ADDRESS"
"""The environment variable by which xdist's workers find the fork servers of their session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--frameworks",
        choices=("optional", "required"),
        default="optional",
        help="required: a test whose framework is not installed fails instead of being skipped",
    )
    parser.addoption("--part", metavar="K/N", help="of the files' exhaustive tests one part in N, the same each time")
    parser.addoption("--effort", action="store_true", help="say at the end where the CPU seconds went; use -n 0")


NEEDS = {
    "patches/megatron_core": ("megatron", "frameworks"),
    "patches/nemo_rl": ("megatron", "frameworks"),
    "patches/skyrl": ("megatron", "frameworks"),
    "patches/swift": ("megatron", "frameworks"),
    "patches/vocab_parallel": ("torch", "frameworks"),
    "patches/transformer_engine": ("triton", "frameworks"),
    "patches/accelerate": ("accelerate", "trl-newest"),
    "patches/deepspeed": ("deepspeed", "trl-newest"),
    "patches/trl": ("deepspeed", "trl-newest"),
    "patches/trl_on_vllm": ("vllm", "rollouts"),
    "patches/vllm": ("vllm", "rollouts"),
    "patches/peft": ("peft", "trl-newest"),
    "patches/datasets": ("datasets", "trl-newest"),
    "patches/transformers": ("trl", "trl-newest"),
    "patches/openrlhf": ("deepspeed", "trl-newest"),
    "patches/torch": ("torch", "trl-newest"),
    "cluster": ("ray", "cluster"),
    "engine/engine/test_functions_torch.py": ("torch", "frameworks"),
    "engine/test_untouched_torch.py": ("torch", "frameworks"),
    "lint": ("importlinter", "lint"),
    "site": ("zensical", "site"),
}
"""What the tests of a folder import, and the nox session that has it."""


def needs(path: Path) -> tuple[str, str] | None:
    """The same of a path: of a patch's folder without an entry, megatron-core and what is installed on it."""
    name = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""
    of_patches = path.parent == HERE / "patches" and (path / "__init__.py").is_file()
    return NEEDS.get(name, ("megatron", "frameworks") if of_patches else None)


class Missing(pytest.Collector):
    """Tests whose framework is not installed here."""

    def collect(self) -> Iterator[pytest.Item]:
        found = needs(self.path)
        assert found is not None
        module, session = found
        command = f".cache/tools/bin/nox -s {session}"
        if self.config.getoption("--frameworks") == "required":
            pytest.fail(f"{module} is not installed here, and --frameworks=required says that it is", pytrace=False)
        pytest.skip(f"{module} is not installed here; `make test` or `{command}` runs these", allow_module_level=True)


class MissingFolder(Missing, pytest.Directory):
    pass


class MissingModule(Missing, pytest.Module):
    pass


def missing(path: Path) -> bool:
    """Whether what a folder or module of tests needs is not here."""
    needed = needs(path)
    return needed is not None and importlib.util.find_spec(needed[0]) is None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Skip a folder as a whole, with the command that runs it, before its modules are imported."""
    return MissingFolder.from_parent(parent, path=path) if missing(path) else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """The same of a module."""
    return MissingModule.from_parent(parent, path=module_path) if missing(module_path) else None


def pytest_configure(config: pytest.Config) -> None:
    """One set of fork servers per session: of the process that starts xdist's workers, or the only one."""
    config.addinivalue_line("markers", f"one_python: dear, and the same on every Python: on {effort.ONE} alone")
    if config.getoption("--effort") and not hasattr(config, "workerinput"):
        with tempfile.NamedTemporaryFile(prefix="effort-", delete=False) as file:
            os.environ[effort.FILE] = file.name
        config.add_cleanup(lambda: os.unlink(os.environ.pop(effort.FILE)))
    if not hasattr(config, "workerinput") and importlib.util.find_spec("torch") is not None:
        forkserver = serving()
        os.environ[WARM] = forkserver.__enter__().address
        config.add_cleanup(lambda: forkserver.__exit__(None, None, None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What ``--part`` asks for, and what is left to one Python."""
    part = config.getoption("--part")
    left_out = {item for item in items if effort.SHARE > 1 and item.get_closest_marker("one_python")}
    try:
        if part is not None:
            left_out |= {
                item
                for item in items
                if not effort.in_part(item.path.relative_to(HERE).as_posix(), part)
                and item.get_closest_marker("exhaustive")
            }
    except ValueError as error:
        raise pytest.UsageError(f"--part: {error}") from None
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What ``--effort`` asks for."""
    if effort.FILE in os.environ:
        terminalreporter.section("CPU seconds")
        terminalreporter.write_line("\n".join(effort.report(Path(os.environ[effort.FILE]))))


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """Speaks to the session's fork servers."""
    return ForkServer(os.environ[WARM])


@pytest.fixture(scope="session")
def of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of a session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def wheel(of_the_session: Path) -> Path:
    """The project's wheel."""
    return Path(once(of_the_session / "wheel", "wheel", lambda out: str(build_wheel(out))))


@pytest.fixture(scope="session")
def installed(wheel: Path, of_the_session: Path) -> Installed:
    """A virtual environment with the wheel installed, to be left as it is: all workers of the session share it."""

    def make(out: Path) -> str:
        return str(Installed.create(out / "environment", wheel).folder)

    return Installed(Path(once(of_the_session / "installed", "installed", make)))


@pytest.fixture(scope="session")
def make_installed(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Installed]:
    """Makes more of them, for tests that change theirs."""
    return lambda: installed.copy(tmp_path_factory.mktemp("environment"))
