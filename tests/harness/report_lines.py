"""The file of RLHF_PATCHES_REPORT, as tests read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import toy_slime

PROBLEM = "cannot write the report (RLHF_PATCHES_REPORT="


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the report goes."""
    return tmp_path / "report.jsonl"


def read(file: Path) -> list[dict[str, Any]]:
    """Every line, none of which may be damaged."""
    data = file.read_bytes()
    assert data.endswith(b"\n")
    assert b"\0" not in data
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def status(line: dict[str, Any]) -> str:
    """The status of the patch of the make-believe slime."""
    return next(patch["status"] for patch in line["patches"] if patch["name"] == toy_slime.PATCH)
