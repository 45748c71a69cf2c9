"""Standard logging under the name ``rlhf_patches``, on rank 0 by default.

Without RLHF_PATCHES_LOG, a run logs the number of applied patches at its start, at level info; the first problem at
once, as a warning; each bug that occurs, as a warning; and one verdict at its end. All else is at level debug: a job of
a thousand processes must not flood its log, and an application that logs at level info does not want one line per
patch. With RLHF_PATCHES_LOG set to a level, each message is logged once, at its own level. An advice with a condition
is a warning when its bug first occurs in the run; another advice when the code with the bug is imported.

A process of unknown rank counts as rank 0, so that problems are always logged: a Ray job may have no rank 0, and Ray
itself merges equal lines of its workers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import ranks, settings
from .._version import __version__
from ..definitions.listed import PATCH
from ..definitions.registry import PluginFailure
from ..definitions.status import PatchReport, Status
from ..definitions.verdict import verdict
from ..definitions.words import plural, printable

if TYPE_CHECKING:
    import logging

_DEBUG, _INFO, _WARNING, _ERROR = 10, 20, 30, 40  # as logging's, which is imported on demand
_logged: set[str] = set()
_warned = False
_MORE = "more: `rlhf-patches doctor`, RLHF_PATCHES_LOG=warning, RLHF_PATCHES_REPORT=FILE"


def logger() -> logging.Logger:
    """Return the logger of this package."""
    import logging

    return logging.getLogger("rlhf_patches")


def configure(default: str | None = None) -> None:
    """Print our messages to standard error at the level of RLHF_PATCHES_LOG, or at ``default`` if it is unset.

    Does nothing if both are unset: the application's own logging decides.
    """
    level = settings.log_level()[0] or default
    if level is None:
        return
    import logging

    ours = logger()
    ours.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    if not ours.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_formatter())
        ours.addHandler(handler)
        ours.propagate = False


def _formatter() -> logging.Formatter:
    import logging

    class Formatter(logging.Formatter):
        """Escapes text from outside, such as an exception's, for the terminal."""

        def format(self, record: logging.LogRecord) -> str:
            return "\n".join(map(printable, super().format(record).expandtabs().split("\n")))

    return Formatter("[rlhf_patches] %(message)s")


def _say(level: int, text: str) -> None:
    """Log for a run: with the prefix, to standard error, unless the application has set up logging."""
    import logging

    ours = logger()
    if ours.level == logging.NOTSET:
        ours.setLevel(min(_INFO, ours.getEffectiveLevel()))
    if not ours.hasHandlers():

        class LastResort(logging.StreamHandler):  # type: ignore[type-arg]
            """Like logging's own: silent as soon as the application has a handler."""

            def emit(self, record: logging.LogRecord) -> None:
                if not logging.getLogger().handlers:
                    self.stream = sys.stderr
                    super().emit(record)

        handler = LastResort()
        handler.setFormatter(_formatter())
        ours.addHandler(handler)
    ours.log(level, "%s", text)


def speaks() -> bool:
    """Whether this process logs: rank 0, or every rank if requested."""
    try:
        everywhere = settings.log_level()[1]
    except settings.SettingsError:
        everywhere = True
    return everywhere or ranks.place().rank in (None, "0")


def announce(rows: Iterable[PatchReport], failures: Iterable[PluginFailure] = ()) -> None:
    """Log the outcomes of patches: applied at level info, problems as warnings, the rest at level debug.

    Without RLHF_PATCHES_LOG, the first problems are one line, and all else except advice is at level debug.
    """
    global _warned
    if not speaks():
        return
    rows = tuple(rows)
    # An exception's text may have several lines; each message must be one line.
    levels = {printable(" ".join(str(failure).split())): _ERROR for failure in failures}
    levels |= {f"{row.status} {row.name}: {row.why}": _level(row) for row in rows}
    new = {text: level for text, level in levels.items() if text not in _logged}
    _logged.update(new)
    if not _asked_for():
        problems = [text for text, level in new.items() if level >= _WARNING]
        if problems and not _warned:
            _warned = True
            _say(_WARNING, f"{'; '.join(problems)} ({_MORE})")
            new = {text: level for text, level in new.items() if text not in problems}
        new = dict.fromkeys(new, _DEBUG)
    notices = {_advice(row): _WARNING for row in rows if row.status is Status.ADVICE and row.reached is None}
    new |= {text: level for text, level in notices.items() if text not in _logged}
    _logged.update(notices)
    # If logging is not imported, no handler shows messages below a warning.
    heard = _DEBUG if "logging" in sys.modules else _WARNING
    for text, level in new.items():
        if level >= heard:
            logger().log(level, "%s", text)


def begun(rows: Iterable[PatchReport]) -> None:
    """Log once, on the first call of a patched function, how many patches are applied."""
    on = [row for row in rows if row.kind == PATCH and row.status is Status.APPLIED]
    names = ", ".join(sorted({f"{row.distribution} {row.version}" for row in on}))
    _say(_INFO, f"{__version__}: {plural(len(on), 'patch is', 'patches are')} applied ({names})")


def ended(rows: Iterable[PatchReport]) -> None:
    """Log at the end of a process which of the repaired bugs occurred; nothing if no patched function ran."""
    text = verdict(rows)
    if text is not None and trains():
        _say(_INFO, text)


def trains() -> bool:
    """Whether this process logs for a run: not a launcher, a data loader's worker or a vLLM engine."""
    if not speaks() or ranks.is_launcher():
        return False
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return True
    return not multiprocessing.current_process().daemon and ranks.place().rank is not None


def _advice(row: PatchReport) -> str:
    """Return one short line; the page states what to do."""
    when = f" ({printable(row.when)})" if row.when else ""
    return (
        f"{row.name}: {row.distribution} {row.version} has a known bug without a repair{when}; "
        f"see `rlhf-patches explain {row.name}`"
    )


def acted(row: PatchReport) -> None:
    """Log once, in training, that the bug of an applied or observed patch occurs, and by how much.

    If the patch cannot decide, log that its code runs. Log nothing for an applied patch that changes no results, or
    that is acknowledged.
    """
    observed, advises = row.status is Status.OBSERVED, row.status is Status.ADVICE
    if not observed and not advises and (row.changes_numbers is None or settings.acknowledged(row.name)):
        return
    if row.reached is not None and row.was_met:
        done = "not repaired (RLHF_PATCHES_OBSERVE)" if observed else "without a repair" if advises else "repaired"
        text = f"the bug occurs in this run{row.reached.by_how_much}, {done}"
    elif observed or advises:
        return
    else:  # nor whether it leaves the run as released
        text = "its code runs, bug condition unknown"
    if (key := f"{row.name} has acted") in _logged:
        return
    _logged.add(key)
    _say(_WARNING, f"{row.name}: {text}; see `rlhf-patches explain {row.name}`")


def _level(row: PatchReport) -> int:
    if row.needs_attention:
        return _WARNING
    return _INFO if row.status is Status.APPLIED else _DEBUG


def _asked_for() -> bool:
    try:
        return settings.log_level()[0] is not None
    except settings.SettingsError:
        return True
