"""Standard logging under the name ``rlhf_patches``: one line per process unless asked for more, on rank 0.

While RLHF_PATCHES_LOG is unset, a process says one thing: the first problem, at once, as a warning. A job of a thousand
processes must not drown in ours, and an application that logs at level info did not ask for one line per patch, so all
else is at level debug. RLHF_PATCHES_LOG set to a level says each thing once, at its own level. In either case a patch
that changes results is a warning when this run first meets its bug, and an advice is one: what was imported has the
bug, and nothing repairs it.

A process whose rank is not known counts as rank 0, so that no problem is silent: a Ray job may have no rank 0 at
all, and Ray itself folds equal lines of its workers into one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import ranks, settings
from ..definitions.registry import PluginFailure
from ..definitions.status import PatchReport, Status
from ..definitions.words import printable

if TYPE_CHECKING:
    import logging

_DEBUG, _INFO, _WARNING, _ERROR = 10, 20, 30, 40  # as logging's, which is imported when a line is to be said
_said: set[str] = set()
_warned = False
_MORE = "more: `rlhf-patches doctor`, RLHF_PATCHES_LOG=warning, RLHF_PATCHES_REPORT=FILE"


def logger() -> logging.Logger:
    """The one that everything here logs to."""
    import logging

    return logging.getLogger("rlhf_patches")


def configure(default: str | None = None) -> None:
    """Print our messages to standard error at the level of RLHF_PATCHES_LOG, or ``default`` when it is unset.

    Does nothing when neither is given: then the application's own logging decides.
    """
    level = settings.log_level()[0] or default
    if level is None:
        return
    import logging

    class Formatter(logging.Formatter):
        """Text from outside, such as an exception's, does not get at the terminal."""

        def format(self, record: logging.LogRecord) -> str:
            return "\n".join(map(printable, super().format(record).expandtabs().split("\n")))

    ours = logger()
    ours.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    if not ours.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(Formatter("[rlhf_patches] %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False


def speaks() -> bool:
    """Whether this process is one that logs: rank 0, or every rank when asked for."""
    try:
        everywhere = settings.log_level()[1]
    except settings.SettingsError:
        everywhere = True
    return everywhere or ranks.place().rank in (None, "0")


def announce(rows: Iterable[PatchReport], failures: Iterable[PluginFailure] = ()) -> None:
    """Log what became of patches: applied at level info, what needs attention as a warning, the rest for debugging.

    Without RLHF_PATCHES_LOG, what needs attention is one line, the first time, and all else is for debugging, but for
    advice.
    """
    global _warned
    if not speaks():
        return
    rows = tuple(rows)
    # An exception's text may have lines; each of these is to be one.
    levels = {printable(" ".join(str(failure).split())): _ERROR for failure in failures}
    levels |= {f"{row.status} {row.name}: {row.why}": _level(row) for row in rows}
    new = {text: level for text, level in levels.items() if text not in _said}
    _said.update(new)
    if not _asked_for():
        problems = [text for text, level in new.items() if level >= _WARNING]
        if problems and not _warned:
            _warned = True
            logger().warning("%s (%s)", "; ".join(problems), _MORE)
            new = {text: level for text, level in new.items() if text not in problems}
        new = dict.fromkeys(new, _DEBUG)
    notices = {_advice(row) for row in rows if row.status is Status.ADVICE}
    new |= dict.fromkeys(sorted(notices - _said), _WARNING)
    _said.update(notices)
    # Where nobody has imported logging, nobody listens to what is below a warning.
    heard = _DEBUG if "logging" in sys.modules else _WARNING
    for text, level in new.items():
        if level >= heard:
            logger().log(level, "%s", text)


def _advice(row: PatchReport) -> str:
    """One short line; what to do stands on its page."""
    when = f" ({printable(row.when)})" if row.when else ""
    return (
        f"{row.name}: {row.distribution} {row.version} has a known bug that nothing here repairs{when}; "
        f"`rlhf-patches explain {row.name}` says what to do"
    )


def acted(row: PatchReport) -> None:
    """Log once, in training, that this run meets the bug of an applied or observed patch, and by how much.

    Where the patch cannot tell, that its code runs. Not of an applied patch that changes no results, or that was
    acknowledged.
    """
    observed = row.status is Status.OBSERVED
    reached = row.reached
    if not observed and (row.changes_numbers is None or settings.acknowledged(row.name)):
        return
    if reached is not None and reached.held:
        met = f"this run meets the bug{reached.by_how_much}"
    elif observed:
        return
    else:
        met = "its code runs, and whether this run meets the bug cannot be told"
    done = "left as released (RLHF_PATCHES_OBSERVE)" if observed else "repaired"
    if (said := f"{row.name} has acted") in _said:
        return
    _said.add(said)
    logger().warning("%s: %s, %s; `rlhf-patches explain %s` says what it is", row.name, met, done, row.name)


def _level(row: PatchReport) -> int:
    if row.needs_attention:
        return _WARNING
    return _INFO if row.status is Status.APPLIED else _DEBUG


def _asked_for() -> bool:
    try:
        return settings.log_level()[0] is not None
    except settings.SettingsError:
        return True
