"""README's first screen: short, and what it shows is what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_patches import cli

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_the_readme_is_short():
    assert len(LINES) <= 120
    assert any(line.startswith("$ pip install") for line in LINES[:10])


def test_the_readme_shows_what_audit_prints(capsys, monkeypatch, tmp_path):
    """On a terminal of 100 columns."""
    start = next(place for place, line in enumerate(LINES) if line.startswith("$ rlhf-patches audit requirements.txt"))
    (tmp_path / "requirements.txt").write_text(LINES[start].rpartition(" ")[2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["audit", "requirements.txt"]) == 1
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert LINES[start + 1 : LINES.index("```", start)] == out.splitlines()
