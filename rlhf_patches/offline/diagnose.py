"""Which known bugs the exceptions in a log are, by the signatures of the patches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..definitions.patch import KnownBug, Signature
from ..definitions.registry import Registered
from .tracebacks import FRAMES, HEAD, TAIL, Frame, Raised

CERTAIN, LIKELY, POSSIBLE = MATCHES = ("certain", "likely", "possible")
"""Exception, text and function; exception and text, without a traceback; one of these cut off, or missing."""

_MOST_RANKS = 100_000
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
    first: Raised
    times: int = 1
    ranks: set[str] = field(default_factory=set)

    @property
    def sure(self) -> bool:
        """Whether the defective function is in the traceback of the exception."""
        return self.match == CERTAIN


def diagnose(log: Iterable[Raised], registered: Sequence[Registered]) -> tuple[list[Diagnosis], int]:
    """Match every exception with every patch.

    Returns:
        the bugs, in the order of `MATCHES`, then as they came; and the number of exceptions that were read.
    """
    known = [(item, signature) for item in registered for signature in item.patch.signatures]
    found: dict[str, Diagnosis] = {}
    count = 0
    for raised in log:
        count += 1
        for item, signature in known:
            match = _fits(signature, item.patch, raised)
            if match is None:
                continue
            one = found.get(item.patch.name)
            if one is None or _order(match) < _order(one.match):
                one = found[item.patch.name] = Diagnosis(
                    item, match, raised, one.times + 1 if one else 1, one.ranks if one else set()
                )
            else:
                one.times += 1
            if raised.rank and len(one.ranks) < _MOST_RANKS:
                one.ranks.add(raised.rank)
    sure_texts = {(one.first.exception, one.first.message) for one in found.values() if one.sure}
    # The same text without a frame is that of another framework only where no traceback says which one it is.
    kept = [one for one in found.values() if one.sure or (one.first.exception, one.first.message) not in sure_texts]
    return sorted(kept, key=lambda one: _order(one.match)), count


_order = MATCHES.index


def _fits(signature: Signature, patch: KnownBug, raised: Raised) -> str | None:
    """How well it is the bug; None where it is not."""
    wanted = signature.frames or tuple(change.target for variant in patch.variants for change in variant.changes)
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
    path = "/" + module.replace(".", "/")
    file = "/" + frame.file.replace("\\", "/")
    return frame.function.rpartition(".")[2] == qualname.rpartition(".")[2] and file.endswith(
        (f"{path}.py", f"{path}/__init__.py")
    )


def _elsewhere(wanted: Iterable[str], frames: Sequence[Frame]) -> bool:
    """Whether the traceback is there and passes through none of the modules that are wanted."""
    files = {"/" + target.partition(":")[0].replace(".", "/") for target in wanted}
    return bool(frames) and not any(file in "/" + frame.file for file in files for frame in frames)
