"""``rlhf-patches diagnose`` on fifty short logs, written like real ones: its recall, its precision, its certainty."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.offline.test_certainty import found

TEXT = Path(__file__).with_name("fifty_logs.txt").read_text(encoding="utf-8")
LOGS = [part.partition("\n")[::2] for part in re.split(r"^=== ", TEXT, flags=re.MULTILINE)[1:]]
NONE = "-"


def test_the_figures_of_fifty_logs():
    bugs = [(head.rpartition(": ")[2], found(log)) for head, log in LOGS]
    with_bug = [(bug, named) for bug, named in bugs if bug != NONE]
    assert (len(with_bug), len(bugs)) == (30, 50)
    right = sum(bug in dict(named) for bug, named in with_bug)
    wrong = [(bug, name, match) for bug, named in bugs for name, match in named if name != bug]
    assert right >= 27
    assert right / (right + len(wrong)) >= 0.95, wrong
    assert [each for each in wrong if each[2] == "certain"] == []
