"""Match the exceptions in a log with known bugs, by the patches' signatures; and stacks with bugs that hang a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..definitions.bug import KnownBug, Signature
from ..definitions.listed import ListedGuard
from ..definitions.registry import Registered
from ..guards.versions import Verdict, judge
from . import frames, hangs
from .frames import Frame
from .hangs import Stack, Standing, Timeout
from .log_versions import Named
from .tracebacks import FRAMES, HEAD, LAZY, TAIL, Event, Raised

CERTAIN, LIKELY, POSSIBLE = MATCHES = ("certain", "likely", "possible")
"""Exception, text and function match; exception and text, without a traceback; one of these is cut off or missing."""

OUT_OF_MEMORY = "CUDA out of memory"
_LEAST = 4  # the fewest characters by which a text that is cut off is recognized
_IMPORTS = ("ImportError", "ModuleNotFoundError")
_INTERRUPT = "KeyboardInterrupt"
_WORD = re.compile(r"\w")
_MOST_VERSIONS = 20  # of one distribution


@dataclass
class Diagnosis:
    """A known bug that a log shows.

    Attributes:
        item: the patch that repairs the bug.
        match: one of `MATCHES`.
        first: the first occurrence.
        times: the number of occurrences.
        ranks: the ranks, as far as the logs name them.
        doubt: why it may be another bug, although exception, text and function match; or "".
    """

    item: Registered
    match: str
    first: Raised | Stack
    times: int = 1
    ranks: set[str] = field(default_factory=set)
    doubt: str = ""

    @property
    def sure(self) -> bool:
        """Whether the exception's traceback contains the defective function."""
        return self.match == CERTAIN


def diagnose(
    log: Iterable[Event], registered: Sequence[Registered], standing: Standing | None = None
) -> tuple[list[Diagnosis], int]:
    """Match every exception with every patch, and every stack with the patches for hangs.

    Args:
        log: the events of the log.
        registered: the patches.
        standing: collects the timeouts and stacks of a hanging run.

    Returns:
        the bugs, in the order of `MATCHES`, then of occurrence; and the number of exceptions.
    """
    known = [(item, signature) for item in registered for signature in item.patch.signatures]
    memory = [(item, _targets(item.patch)) for item in registered if item.patch.harm == "memory"]
    waits = _Waits(registered, Standing() if standing is None else standing)
    named: dict[str, list[str]] = {}
    diagnoses: dict[str, Diagnosis] = {}
    count = 0
    for event in log:
        if isinstance(event, Named):
            found = named.setdefault(event.distribution, [])
            if len(found) < _MOST_VERSIONS:
                found.append(event.version)
            continue
        waits.add(event)
        if not isinstance(event, Raised):
            continue
        count += 1
        for item, signature in known:
            match = _fits(signature, item.patch, event)
            if match is not None:
                _note(diagnoses, item, match, event)
        if OUT_OF_MEMORY in event.message:
            passed = [(_passed(targets, event.frames), item) for item, targets in memory]
            most = max((number for number, _ in passed), default=0)
            for number, item in passed:
                if number == most > 0:  # forward() alone is the name of several
                    _note(diagnoses, item, POSSIBLE, event)
    sure_texts = {_text(one.first) for one in diagnoses.values() if one.sure}
    # Drop the same text without a frame: a traceback already shows which framework raised it.
    kept = [one for one in diagnoses.values() if one.sure or _text(one.first) not in sure_texts]
    texts = Counter(_text(one.first) for one in kept)
    for one in kept:
        if one.match == LIKELY and texts[_text(one.first)] > 1:
            one.match = POSSIBLE  # each of several
    names = {one.item.patch.name for one in kept}
    kept += [one for one in waits.possible() if one.item.patch.name not in names]
    for one in kept:
        one.doubt = _unaffected(one.item.patch, named)
        if one.doubt:
            one.match = POSSIBLE
    return sorted(kept, key=lambda one: _order(one.match)), count


def _unaffected(patch: KnownBug, named: dict[str, list[str]]) -> str:
    """The version that the log names and that does not have the bug; empty if one has, or none is named."""
    for distribution, found in named.items():
        guards = {
            ListedGuard(distribution, guard.versions)
            for variant in patch.variants
            for guard in (variant.guard, variant.guard.co_installed)
            if guard is not None and guard.distribution == distribution
        }
        verdicts = [judge(guard, version).verdict for guard in guards for version in found]
        if verdicts and all(verdict is Verdict.OUTSIDE for verdict in verdicts):
            return f"{distribution} {found[0]}"
    return ""


def _text(first: Raised | Stack) -> tuple[str, str]:
    return ("", "") if isinstance(first, Stack) else (first.exception, first.message)


def _note(diagnoses: dict[str, Diagnosis], item: Registered, match: str, first: Raised | Stack) -> None:
    one = diagnoses.get(item.patch.name)
    if one is None:
        one = diagnoses[item.patch.name] = Diagnosis(item, match, first, 0)
    elif _order(match) < _order(one.match):
        one.match, one.first = match, first
    one.times += 1
    hangs.note_rank(one.ranks, first.rank)


class _Waits:
    """Stacks within functions in which a run may hang, and which a patch repairs."""

    def __init__(self, registered: Sequence[Registered], standing: Standing) -> None:
        self._known = [(item, _targets(item.patch)) for item in registered if item.patch.harm == "hang"]
        self._standing = standing
        self._waiting: dict[str, Diagnosis] = {}
        self._elsewhere: dict[str, Diagnosis] = {}

    def add(self, event: Raised | Timeout | Stack) -> None:
        if isinstance(event, Raised):
            is_wait = event.exception == _INTERRUPT or hangs.timeout(event.message, event.line, event.stream, "")
            if not event.frames or not is_wait:
                return
            event = Stack(event.frames[::-1], event.line, event.stream, event.rank, event.file)
        self._standing.add(event)
        if isinstance(event, Timeout):
            return
        for item, targets in self._known:
            if not frames.through(targets, event.frames):
                continue
            process = hangs.waits_for_process(event.frames)
            if process or hangs.stands_in(targets, event.frames):
                waits = process or hangs.collective(event.frames)
                _note(self._waiting if waits else self._elsewhere, item, POSSIBLE, event)

    def possible(self) -> list[Diagnosis]:
        """The possible bugs.

        A process in such a function may be working. After a timeout it is not: with NCCL it waits at the code that
        needs the result.
        """
        others = self._elsewhere if self._standing.timeouts else {}
        return list({**others, **self._waiting}.values())


def _targets(patch: KnownBug) -> tuple[str, ...]:
    return tuple(change.target for variant in patch.variants for change in variant.changes)


_order = MATCHES.index


def _fits(signature: Signature, patch: KnownBug, raised: Raised) -> str | None:
    """How certain it is that the exception is the bug; None if it is not."""
    wanted = signature.frames or _targets(patch)
    if raised.exception != signature.exception or not _has(raised.message, signature.message):
        goes_on = raised.cut == TAIL and _may_go_on(signature, raised)
        return POSSIBLE if goes_on and frames.through(wanted, raised.frames) else None
    # An unspecific text is no evidence by itself, nor with another traceback.
    if frames.through(wanted, raised.frames):
        if not signature.raised_below and not frames.fails_within(wanted, raised.frames):
            return None
        return POSSIBLE if raised.cut == LAZY else CERTAIN
    if signature.specific and frames.through(wanted, raised.near):
        return CERTAIN if signature.raised_below or frames.fails_within(wanted, raised.near) else POSSIBLE
    of_any_import = signature.exception in _IMPORTS
    if not raised.frames:
        return None if not signature.specific else POSSIBLE if of_any_import else LIKELY
    if raised.cut in (HEAD, FRAMES):
        last = frames.failing(raised.frames)
        elsewhere = last is not None and not any(frames.is_of(target, last) for target in wanted)
        if elsewhere and (raised.cut == HEAD or of_any_import or not signature.specific):
            return None
        if signature.message or not _elsewhere(wanted, raised.frames):
            return POSSIBLE
    return POSSIBLE if signature.specific and not _elsewhere(wanted, raised.frames) else None


def _has(text: str, part: str) -> bool:
    """Whether a text has a part, from the beginning of a word: MyTrainer.log() is not Trainer.log()."""
    if not part:
        return True
    before, found, _ = text.partition(part)
    return bool(found) and not (_WORD.match(before[-1:]) and _WORD.match(part))


def _passed(targets: Iterable[str], stack: Sequence[Frame]) -> int:
    """How many of the functions a stack passes through; 0 if none of them failed, or a function of their module."""
    last = frames.failing(stack)
    passed = [target for target in targets if frames.through((target,), stack)]
    failed = last is not None and any(frames.is_of_module(target, last) for target in passed)
    return len({target.rpartition(".")[2] for target in passed}) if failed else 0


def _may_go_on(signature: Signature, raised: Raised) -> bool:
    """Whether an exception's type and text, which may be cut off, are the beginning of the signature's."""
    if not raised.message:
        return signature.exception.startswith(raised.exception)
    text, wanted = raised.message, signature.message
    ends = (text[-length:] for length in range(min(_LEAST, len(text)), min(len(text), len(wanted)) + 1))
    return raised.exception == signature.exception and any(map(wanted.startswith, ends))


def _elsewhere(wanted: Iterable[str], stack: Sequence[Frame]) -> bool:
    """Whether there is a traceback and it passes through none of the wanted modules."""
    files = {"/" + target.partition(":")[0].replace(".", "/") for target in wanted}
    return bool(stack) and not any(file in "/" + frame.file for file in files for frame in stack)
