"""README's first screen: short, and what it shows is what the command prints."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import packaging

from rlhf_patches.definitions.bug import HARMS
from rlhf_patches.patches import plugin

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


TEXT = "\n".join(LINES)


def test_the_readme_is_short():
    assert len(LINES) <= 100
    assert len(TEXT) <= 6_500
    for command in ("$ pip install", "$ make demo", "$ make test"):
        assert any(line.startswith(command) for line in LINES[:16])


def test_the_readme_counts_the_bugs():
    bugs = plugin.rlhf_patches()
    counts = Counter("watch" if bug.kind == "watch" else bug.harm for bug in bugs)
    (*harms, watches) = re.findall(r"^\| \[.*\| (\d+) \| `([a-z0-9-]+)`: ", TEXT, re.M)
    shown = [*HARMS[:6], "memory"]
    assert [int(number) for number, _ in harms] == [
        counts[harm] + (counts["slow"] if harm == "memory" else 0) for harm in shown
    ]
    assert int(watches[0]) == counts["watch"]
    known = {bug.name: bug for bug in bugs}
    assert [known[name].harm for _, name in harms] == shown
    assert known[watches[1]].kind == "watch"
    assert f"{sum(bug.kind == 'advice' for bug in bugs)} are advice" in TEXT


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
