"""Standard logging under the name ``rlhf_patches``: one line per process unless asked for more, on rank 0.

While RLHF_PATCHES_LOG is unset, a run reads: when it begins, how many patches are on, as information; the first
problem, at once, as a warning; each bug that it meets, as a warning; and at its end one verdict. A job of a thousand
processes must not drown in ours, and an application that logs at level info did not ask for one line per patch, so all
else is at level debug. RLHF_PATCHES_LOG set to a level says each thing once, at its own level. An advice that has a
condition is a warning when this run first meets its bug; another one when the code with the bug is imported.

A process whose rank is not known counts as rank 0, so that no problem is silent: a Ray job may have no rank 0 at
all, and Ray itself folds equal lines of its workers into one.
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
        """Text from outside, such as an exception's, does not get at the terminal."""

        def format(self, record: logging.LogRecord) -> str:
            return "\n".join(map(printable, super().format(record).expandtabs().split("\n")))

    return Formatter("[rlhf_patches] %(message)s")


def _say(level: int, text: str) -> None:
    """Log for a run: with the prefix, to standard error, unless the application has set up logging itself."""
    import logging

    ours = logger()
    if ours.level == logging.NOTSET:
        ours.setLevel(min(_INFO, ours.getEffectiveLevel()))
    if not ours.hasHandlers():

        class LastResort(logging.StreamHandler):  # type: ignore[type-arg]
            """As logging's own: silent as soon as the application has a handler."""

            def emit(self, record: logging.LogRecord) -> None:
                if not logging.getLogger().handlers:
                    self.stream = sys.stderr
                    super().emit(record)

        handler = LastResort()
        handler.setFormatter(_formatter())
        ours.addHandler(handler)
    ours.log(level, "%s", text)


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
            _say(_WARNING, f"{'; '.join(problems)} ({_MORE})")
            new = {text: level for text, level in new.items() if text not in problems}
        new = dict.fromkeys(new, _DEBUG)
    notices = {_advice(row): _WARNING for row in rows if row.status is Status.ADVICE and row.reached is None}
    new |= {text: level for text, level in notices.items() if text not in _said}
    _said.update(notices)
    # Where nobody has imported logging, nobody listens to what is below a warning.
    heard = _DEBUG if "logging" in sys.modules else _WARNING
    for text, level in new.items():
        if level >= heard:
            logger().log(level, "%s", text)


def begun(rows: Iterable[PatchReport]) -> None:
    """Log once, when a patched function is entered for the first time, how many patches are applied."""
    on = [row for row in rows if row.kind == PATCH and row.status is Status.APPLIED]
    names = ", ".join(sorted({f"{row.distribution} {row.version}" for row in on}))
    _say(_INFO, f"{__version__}: {plural(len(on), 'repair is', 'repairs are')} on ({names})")


def ended(rows: Iterable[PatchReport]) -> None:
    """Log at the end of a process which of the repaired bugs it met; nothing where no patched function ran."""
    text = verdict(rows)
    if text is not None and trains():
        _say(_INFO, text)


def trains() -> bool:
    """Whether this process is one to speak for a run: no launcher, no worker of a data loader, no engine of vLLM's."""
    if not speaks() or ranks.is_launcher():
        return False
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return True
    return not multiprocessing.current_process().daemon and ranks.place().rank is not None


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
    observed, advises = row.status is Status.OBSERVED, row.status is Status.ADVICE
    if not observed and not advises and (row.changes_numbers is None or settings.acknowledged(row.name)):
        return
    if row.reached is not None and row.was_met:
        met = f"this run meets the bug{row.reached.by_how_much}"
    elif observed or advises:
        return
    else:
        met = "its code runs, and whether this run meets the bug cannot be told"
    done = "left as released (RLHF_PATCHES_OBSERVE)" if observed else "repaired"
    done = "which nothing here repairs" if advises else done
    if (said := f"{row.name} has acted") in _said:
        return
    _said.add(said)
    says = "what to do" if advises else "what it is"
    _say(_WARNING, f"{row.name}: {met}, {done}; `rlhf-patches explain {row.name}` says {says}")


def _level(row: PatchReport) -> int:
    if row.needs_attention:
        return _WARNING
    return _INFO if row.status is Status.APPLIED else _DEBUG


def _asked_for() -> bool:
    try:
        return settings.log_level()[0] is not None
    except settings.SettingsError:
        return True
