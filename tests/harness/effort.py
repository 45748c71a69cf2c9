"""What tests cost: a share of the dear ones, and ``pytest --effort``, which says where the CPU seconds went.

And the CPU seconds of each file, for the table that ends a command of nox.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path

ONE = "3.11"
"""The Python on which what is dear runs as a whole. `make test` has the oldest one, CI all of them."""

SHARE = 1 if "{}.{}".format(*sys.version_info) == ONE else 4
"""Run one in so many cases of a dear test: all on one Python, a share on the others, which differ little.

Where that is 1, tests marked ``one_python`` run; elsewhere they are deselected.
"""


def in_part(file: str, part: str) -> bool:
    """Whether the tests of a file belong to a part of all, ``1/3`` say; each file is in one part of as many.

    Raises:
        ValueError: it is no such part.
    """
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise ValueError(f"{part!r} is no part: expected K/N, such as 1/3")
    number, of = map(int, found.groups())
    return zlib.crc32(file.encode()) % of == number - 1


OF_CI = "1/10"
"""The part of the exhaustive tests that CI runs, the same each time. No mutation needs more (tests/lint)."""


FILE = "TESTS_EFFORT"
"""The environment variable that names the file to which the processes of a session add what they have spent."""


OF_FILES = "SESSION_FILES"
"""The environment variable that names the file to which pytest adds the CPU seconds of test files; nox sets it."""

of_files: defaultdict[str, float] = defaultdict(float)
"""Those of this process, which a session of pytest writes at its end."""

_elsewhere = 0.0


def add_elsewhere(seconds: float) -> None:
    """Of processes that are no children of this one, for the test that runs."""
    global _elsewhere
    _elsewhere += seconds


def elsewhere() -> float:
    """What was added since this was asked last."""
    global _elsewhere
    found, _elsewhere = _elsewhere, 0.0
    return found


def note_files() -> None:
    """Write `of_files` for nox, if it runs this."""
    if OF_FILES in os.environ:
        with open(os.environ[OF_FILES], "a") as lines:
            for file, seconds in of_files.items():
                lines.write(json.dumps([file, round(seconds, 3)]) + "\n")


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def note(what: str, seconds: float) -> None:
    """Add to the session's report, if one is wanted."""
    if FILE in os.environ:
        with open(os.environ[FILE], "a") as file:  # a line is written at once, so processes do not mix theirs
            file.write(json.dumps([what, seconds]) + "\n")


def report(file: Path) -> list[str]:
    """Lines of text: CPU seconds, how often, and for what; this process and its other children come last."""
    spent: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        what, seconds = json.loads(line)
        spent[what] += seconds
        times[what] += 1
    own = "pytest itself, and other processes that it has started"
    # What torchrun spends is in our own children's time as well; what fork servers spend is not, until they end.
    torchrun = sum(seconds for what, seconds in spent.items() if what.startswith("torchrun"))
    spent[own], times[own] = cpu_seconds() - torchrun, 1
    lines = [
        f"{seconds:>8.1f}  {times[what]:>3} x  {what}"
        for what, seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]
    loading = sum(seconds for what, seconds in spent.items() if what.startswith("loading"))
    total = sum(spent.values())
    runs = total - loading - spent[own]
    return [
        *lines,
        f"{total:>8.1f}  all: {loading:.1f} to load frameworks, once a session, and {runs:.1f} to run ranks",
    ]
