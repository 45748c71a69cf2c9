"""Several processes, started as clusters start them: ranks, launchers, workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import toy_slime


@pytest.fixture(scope="session")
def slime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A make-believe slime checkout, for PYTHONPATH: cheap to import, and a built-in patch applies to it."""
    return toy_slime.write(tmp_path_factory.mktemp("slime"))
