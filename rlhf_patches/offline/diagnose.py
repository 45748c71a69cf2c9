"""Match the exceptions in a log with known bugs, by the patches' signatures; and stacks with bugs that hang a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..definitions.bug import KnownBug, Signature
from ..definitions.registry import Registered
from . import hangs
from .hangs import Frame, Stack, Standing, Timeout
from .tracebacks import FRAMES, HEAD, TAIL, Raised

CERTAIN, LIKELY, POSSIBLE = MATCHES = ("certain", "likely", "possible")
"""Exception, text and function match; exception and text, without a traceback; one of these is cut off or missing."""

_LEAST = 4  # the fewest characters by which a text that is cut off is recognised


@dataclass
class Diagnosis:
    """A known bug that a log shows.

    Attributes:
        item: the patch that repairs the bug.
        match: one of `MATCHES`.
        first: the first occurrence.
        times: the number of occurrences.
        ranks: the ranks, as far as the logs name them.
    """

    item: Registered
    match: str
    first: Raised | Stack
    times: int = 1
    ranks: set[str] = field(default_factory=set)

    @property
    def sure(self) -> bool:
        """Whether the exception's traceback contains the defective function."""
        return self.match == CERTAIN


def diagnose(
    log: Iterable[Raised | Timeout | Stack], registered: Sequence[Registered], standing: Standing | None = None
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
    waits = _Waits(registered, Standing() if standing is None else standing)
    diagnoses: dict[str, Diagnosis] = {}
    count = 0
    for event in log:
        waits.add(event)
        if not isinstance(event, Raised):
            continue
        count += 1
        for item, signature in known:
            match = _fits(signature, item.patch, event)
            if match is not None:
                _note(diagnoses, item, match, event)
    sure_texts = {_text(one.first) for one in diagnoses.values() if one.sure}
    # Drop the same text without a frame: a traceback already shows which framework raised it.
    kept = [one for one in diagnoses.values() if one.sure or _text(one.first) not in sure_texts]
    named = {one.item.patch.name for one in kept}
    kept += [one for one in waits.possible() if one.item.patch.name not in named]
    return sorted(kept, key=lambda one: _order(one.match)), count


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
    if raised.exception != signature.exception or signature.message not in raised.message:
        goes_on = raised.cut == TAIL and _may_go_on(signature, raised)
        return POSSIBLE if goes_on and _through(wanted, raised.frames) else None
    # An unspecific text is no evidence by itself, nor with another traceback.
    if _through(wanted, raised.near if signature.specific else raised.frames):
        return CERTAIN
    if not raised.frames:
        return LIKELY if signature.specific else None
    if raised.cut in (HEAD, FRAMES) and (signature.message or not _elsewhere(wanted, raised.frames)):
        return POSSIBLE
    return POSSIBLE if signature.specific and not _elsewhere(wanted, raised.frames) else None


def _may_go_on(signature: Signature, raised: Raised) -> bool:
    """Whether an exception's type and text, which may be cut off, are the beginning of the signature's."""
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
    """Whether there is a traceback and it passes through none of the wanted modules."""
    files = {"/" + target.partition(":")[0].replace(".", "/") for target in wanted}
    return bool(frames) and not any(file in "/" + frame.file for file in files for frame in frames)
