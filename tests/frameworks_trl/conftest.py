"""Real TRL under real ZeRO-3 on two ranks, in processes of their own."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from packaging.version import Version

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="session")
def gathers_per_chunk() -> bool:
    """Whether the installed release gathers within each chunk (1.6.0 and later), or not at all."""
    return Version(importlib.metadata.version("trl")) >= Version("1.6.0")
