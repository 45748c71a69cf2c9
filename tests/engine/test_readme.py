"""README's first screen: short, and what it shows is what the command prints."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import packaging

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_the_readme_is_short():
    assert len(LINES) <= 120
    assert any(line.startswith("$ pip install") for line in LINES[:10])


def test_the_readme_shows_what_audit_prints(tmp_path):
    """On a terminal of 80 columns."""
    start = next(place for place, line in enumerate(LINES) if line.startswith("$ rlhf-patches audit requirements.txt"))
    (tmp_path / "requirements.txt").write_text(LINES[start].rpartition(" ")[2])
    screen, terminal = os.openpty()
    command = [sys.executable, "-m", "rlhf_patches", "audit", "requirements.txt"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}, stdout=terminal)
    os.close(terminal)
    said = b""
    with contextlib.suppress(OSError), open(screen, "rb", buffering=0) as file:  # EIO is the end of a terminal
        while more := file.read(65536):
            said += more
    shown = re.sub(r"\x1b\[[0-9;]*m", "", said.decode()).splitlines()
    assert LINES[start + 1 : LINES.index("```", start)] == shown
    assert done.returncode == 1


def test_make_demo_knows_its_sessions_where_no_framework_is(tmp_path):
    """What `make demo` asks first, by a Python that has nox and what that brings, and this package not installed."""
    command = [sys.executable, "-S", str(ROOT / "examples" / "demo" / "run.py")]
    (tmp_path / "packaging").symlink_to(Path(packaging.__file__).parent)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("demo-megatron demo-trl demo-vllm\n", "", 0)
