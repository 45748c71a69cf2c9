"""Standard logging under the name ``rlhf_patches``: one line per process unless asked for more, on rank 0.

While RLHF_PATCHES_LOG is unset, a process says one thing: the first problem, at once, as a warning. A job of a thousand
processes must not drown in ours, and an application that logs at level info did not ask for one line per patch, so all
else is at level debug. RLHF_PATCHES_LOG set to a level says each thing once, at its own level. In either case applied
patches that change numbers which a user may have tuned to are named in a warning, one for all that come with an import
of a framework and what it imports, and an advice is one: what was imported has the bug, and nothing repairs it.

A process whose rank is not known counts as rank 0, so that no problem is silent: a Ray job may have no rank 0 at
all, and Ray itself folds equal lines of its workers into one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .. import ranks, settings
from ..definitions.registry import PluginFailure
from ..definitions.status import PatchReport, Status, printable

if TYPE_CHECKING:
    import logging

_DEBUG, _INFO, _WARNING, _ERROR = 10, 20, 30, 40  # as logging's, which is imported when a line is to be said
_said: set[str] = set()
_numbers: dict[str, None] = {}  # names of applied patches that change numbers, still to be said
_warned = False
_MORE = "more: `rlhf-patches doctor`, RLHF_PATCHES_LOG=warning, RLHF_PATCHES_REPORT=FILE"


os.register_at_fork(after_in_child=lambda: _numbers.clear())  # the parent says it


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


def announce(
    rows: Iterable[PatchReport],
    failures: Iterable[PluginFailure] = (),
    more_to_come: Callable[[], bool] = lambda: False,
) -> None:
    """Log what became of patches: applied at level info, what needs attention as a warning, the rest for debugging.

    Without RLHF_PATCHES_LOG, what needs attention is one line, the first time, and all else is for debugging, but for
    patches that change numbers and for advice.

    Args:
        rows: the patches.
        failures: plugins that cannot be used.
        more_to_come: asked where there are patches that change numbers: whether another call follows, which can name
            these with its own. A trainer's module imports others that are patched: of all of these, one line.
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
    notices = {f"{row.name}: {row.why}; {row.notice}" for row in rows if row.status is Status.ADVICE}
    new |= dict.fromkeys(sorted(notices - _said), _WARNING)
    _said.update(notices)
    changing = [row.name for row in rows if row.status is Status.APPLIED and row.notice]
    _numbers.update(dict.fromkeys(name for name in changing if name not in _said and not settings.acknowledged(name)))
    if _numbers and not more_to_come():
        names = []
        with contextlib.suppress(KeyError):  # another thread says the rest
            while _numbers:
                names.append(_numbers.popitem()[0])
        if names:
            new[_of_numbers(names[::-1])] = _WARNING
            _said.update(names)
    # Where nobody has imported logging, nobody listens to what is below a warning.
    heard = _DEBUG if "logging" in sys.modules else _WARNING
    for text, level in new.items():
        if level >= heard:
            logger().log(level, "%s", text)


def _of_numbers(names: list[str]) -> str:
    """One short line; what each has to say stands in reports."""
    count = "1 patch changes" if len(names) == 1 else f"{len(names)} patches change"
    return (
        f"{count} numbers here: {', '.join(names)}; `rlhf-patches explain {names[0]}` says what that means for running "
        "experiments"
    )


def _level(row: PatchReport) -> int:
    if row.needs_attention:
        return _WARNING
    return _INFO if row.status is Status.APPLIED else _DEBUG


def _asked_for() -> bool:
    try:
        return settings.log_level()[0] is not None
    except settings.SettingsError:
        return True
