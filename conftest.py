"""For every test: none of the user's own RLHF_PATCHES_* variables; and what fails is named again at a session's end."""

import os

import pytest

from tests.harness import failures


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("RLHF_PATCHES_"):
            monkeypatch.delenv(variable)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:  # whoever runs the workers hears of it, too
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or report.longrepr
        failures.note(f"{report.nodeid} ({report.when}): {reason}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        failures.note(f"{report.nodeid} (collection): {report.longrepr}")
