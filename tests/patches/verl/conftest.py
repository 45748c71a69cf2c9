"""What the tests of verl's patches share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.forkserver import Level, verl

NEWEST = "0.9"
"""The environment's own release; others lie beside it."""


@pytest.fixture(scope="session")
def reported(run_ranks: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Runs a worker on one rank with a release of verl that its patch applies to; gives its report."""

    def run(worker: str, release: str, *more: Level) -> Any:
        levels = (*verl(None if release == NEWEST else release), *more)
        (report,) = run_ranks(worker, levels=levels, ranks=1, TORCHDYNAMO_DISABLE="1")
        assert report["status"] == "applied"
        assert report["version"].startswith(release)
        return report

    return run
