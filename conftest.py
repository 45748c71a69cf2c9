"""For every test: none of the user's own RLHF_PATCHES_* variables.

For the table that ends a command of nox: what has failed, and what the tests of each file took.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import effort, failures

HERE = Path(__file__).parent

# Before torch is imported. With a thread for each core, workers side by side wait for one another in small loops: three
# times the CPU seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("RLHF_PATCHES_"):
            monkeypatch.delenv(variable)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = effort.cpu_seconds()
    try:
        return (yield)
    finally:
        file = item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else item.path.name
        effort.of_files[file] += effort.cpu_seconds() - before + effort.elsewhere()


def pytest_sessionfinish() -> None:
    effort.note_files()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:  # whoever runs the workers hears of it, too
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or report.longrepr
        failures.note(f"{report.nodeid} ({report.when}): {reason}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        failures.note(f"{report.nodeid} (collection): {report.longrepr}")
