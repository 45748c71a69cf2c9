"""Which known bugs the exceptions in a log are, by the signatures of the patches; and which may make it stand still."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..definitions.bug import KnownBug, Signature
from ..definitions.registry import Registered
from . import hangs
from .hangs import Frame, Stack, Standing, Timeout
from .tracebacks import FRAMES, HEAD, TAIL, Raised

CERTAIN, LIKELY, POSSIBLE = MATCHES = ("certain", "likely", "possible")
"""Exception, text and function; exception and text, without a traceback; one of these cut off, or missing."""

_LEAST = 4  # characters of a text that is cut off, by which it is told


@dataclass
class Diagnosis:
    """A known bug that a log shows.

    Attributes:
        item: the patch that repairs it.
        match: one of `MATCHES`.
        first: where it was seen first.
        times: how often.
        ranks: of whom, as far as logs tell.
    """

    item: Registered
    match: str
    first: Raised | Stack
    times: int = 1
    ranks: set[str] = field(default_factory=set)

    @property
    def sure(self) -> bool:
        """Whether the defective function is in the traceback of the exception."""
        return self.match == CERTAIN


def diagnose(
    log: Iterable[Raised | Timeout | Stack], registered: Sequence[Registered], standing: Standing | None = None
) -> tuple[list[Diagnosis], int]:
    """Match every exception with every patch, and every stack with those for a bug that makes a run stand still.

    Args:
        log: what was read.
        registered: the patches.
        standing: takes the signs that a run stands still.

    Returns:
        the bugs, in the order of `MATCHES`, then as they came; and the number of exceptions that were read.
    """
    known = [(item, signature) for item in registered for signature in item.patch.signatures]
    waits = _Waits(registered, Standing() if standing is None else standing)
    found: dict[str, Diagnosis] = {}
    count = 0
    for event in log:
        waits.add(event)
        if not isinstance(event, Raised):
            continue
        count += 1
        for item, signature in known:
            match = _fits(signature, item.patch, event)
            if match is not None:
                _note(found, item, match, event)
    sure_texts = {_text(one.first) for one in found.values() if one.sure}
    # The same text without a frame is that of another framework only where no traceback says which one it is.
    kept = [one for one in found.values() if one.sure or _text(one.first) not in sure_texts]
    named = {one.item.patch.name for one in kept}
    kept += [one for one in waits.found() if one.item.patch.name not in named]
    return sorted(kept, key=lambda one: _order(one.match)), count


def _text(first: Raised | Stack) -> tuple[str, str]:
    return ("", "") if isinstance(first, Stack) else (first.exception, first.message)


def _note(found: dict[str, Diagnosis], item: Registered, match: str, first: Raised | Stack) -> None:
    one = found.get(item.patch.name)
    if one is None:
        one = found[item.patch.name] = Diagnosis(item, match, first, 0)
    elif _order(match) < _order(one.match):
        one.match, one.first = match, first
    one.times += 1
    hangs.note_rank(one.ranks, first.rank)


class _Waits:
    """Stacks within functions that a patch repairs because a run stands still in them."""

    def __init__(self, registered: Sequence[Registered], standing: Standing) -> None:
        self._known = [(item, _targets(item.patch)) for item in registered if item.patch.harm == "hang"]
        self._standing = standing
        self._waiting: dict[str, Diagnosis] = {}
        self._elsewhere: dict[str, Diagnosis] = {}

    def add(self, event: Raised | Timeout | Stack) -> None:
        if isinstance(event, Raised):
            if not event.frames or hangs.timeout(event.message, event.line, event.stream, event.rank) is None:
                return
            event = Stack(event.frames[::-1], event.line, event.stream, event.rank, event.file)
        self._standing.add(event)
        if isinstance(event, Timeout):
            return
        for item, targets in self._known:
            if _through(targets, event.frames):
                waits = hangs.collective(event.frames) or hangs.waits_for_process(event.frames)
                _note(self._waiting if waits else self._elsewhere, item, POSSIBLE, event)

    def found(self) -> list[Diagnosis]:
        """The bugs that are possible.

        A process may be in such a function and work; after a timeout it is not: with NCCL it waits at whatever needs
        the result.
        """
        others = self._elsewhere if self._standing.timeouts else {}
        return list({**others, **self._waiting}.values())


def _targets(patch: KnownBug) -> tuple[str, ...]:
    return tuple(change.target for variant in patch.variants for change in variant.changes)


_order = MATCHES.index


def _fits(signature: Signature, patch: KnownBug, raised: Raised) -> str | None:
    """How well it is the bug; None where it is not."""
    wanted = signature.frames or _targets(patch)
    if raised.exception != signature.exception or signature.message not in raised.message:
        goes_on = raised.cut == TAIL and _may_go_on(signature, raised)
        return POSSIBLE if goes_on and _through(wanted, raised.frames) else None
    # A text that anything could raise says nothing by itself, nor beside another traceback.
    if _through(wanted, raised.near if signature.specific else raised.frames):
        return CERTAIN
    if not raised.frames:
        return LIKELY if signature.specific else None
    if raised.cut in (HEAD, FRAMES) and (signature.message or not _elsewhere(wanted, raised.frames)):
        return POSSIBLE
    return POSSIBLE if signature.specific and not _elsewhere(wanted, raised.frames) else None


def _may_go_on(signature: Signature, raised: Raised) -> bool:
    """Whether the type and the text of an exception, as far as they are there, are the beginning of a signature's."""
    if not raised.message:
        return signature.exception.startswith(raised.exception)
    text, wanted = raised.message, signature.message
    ends = (text[-length:] for length in range(min(_LEAST, len(text)), min(len(text), len(wanted)) + 1))
    return raised.exception == signature.exception and any(map(wanted.startswith, ends))


def _through(wanted: Iterable[str], frames: Sequence[Frame]) -> bool:
    return any(_is(target, frame) for target in wanted for frame in frames)


def _is(target: str, frame: Frame) -> bool:
    module, _, qualname = target.partition(":")
    if frame.function.rpartition(".")[2] != qualname.rpartition(".")[2]:
        return False
    path = "/" + module.replace(".", "/")
    return ("/" + frame.file.replace("\\", "/")).endswith((f"{path}.py", f"{path}/__init__.py"))


def _elsewhere(wanted: Iterable[str], frames: Sequence[Frame]) -> bool:
    """Whether the traceback is there and passes through none of the modules that are wanted."""
    files = {"/" + target.partition(":")[0].replace(".", "/") for target in wanted}
    return bool(frames) and not any(file in "/" + frame.file for file in files for frame in frames)
