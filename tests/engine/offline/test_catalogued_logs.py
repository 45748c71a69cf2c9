"""``rlhf-patches diagnose`` on short logs, written like real ones: its recall, its precision, its certainty."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.offline.test_certainty import found

TEXT = Path(__file__).with_name("catalogued_logs.txt").read_text(encoding="utf-8")
LOGS = [part.partition("\n")[::2] for part in re.split(r"^=== ", TEXT, flags=re.MULTILINE)[1:]]
NONE = "-"
NOT_FOUND = [
    # It is raised in autograd, far from the function, with a text that any parameter of ZeRO-3 may give.
    "trl-chunked-divergence-zero3",
]


def test_the_figures_of_the_logs():
    bugs = [(head.rpartition(": ")[2], found(log)) for head, log in LOGS]
    with_bug = [(bug, named) for bug, named in bugs if bug != NONE]
    assert (len(with_bug), len(bugs)) == (46, 78)
    assert [bug for bug, named in with_bug if bug not in dict(named)] == NOT_FOUND
    assert [(bug, name) for bug, named in bugs for name, _ in named if name != bug] == []
