"""Which known bugs the exceptions in a log are, by the signatures of the patches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..definitions.patch import KnownBug, Signature
from ..definitions.registry import Registered
from .tracebacks import Frame, Raised

_MOST_RANKS = 100_000


@dataclass
class Diagnosis:
    """A known bug that a log shows.

    Attributes:
        item: the patch that repairs it.
        sure: whether the defective function is in the traceback; else only the exception and its text fit.
        first: where it was seen first.
        times: how often.
        ranks: of whom, as far as logs tell.
    """

    item: Registered
    sure: bool
    first: Raised
    times: int = 1
    ranks: set[str] = field(default_factory=set)


def diagnose(log: Iterable[Raised], registered: Sequence[Registered]) -> tuple[list[Diagnosis], int]:
    """Match every exception with every patch.

    Returns:
        the bugs, those that are sure first, then as they came; and the number of exceptions that were read.
    """
    known = [(item, signature) for item in registered for signature in item.patch.signatures]
    found: dict[str, Diagnosis] = {}
    count = 0
    for raised in log:
        count += 1
        for item, signature in known:
            sure = _fits(signature, item.patch, raised)
            if sure is None:
                continue
            one = found.get(item.patch.name)
            if one is None or (sure and not one.sure):
                one = found[item.patch.name] = Diagnosis(
                    item, sure, raised, one.times + 1 if one else 1, one.ranks if one else set()
                )
            else:
                one.times += 1
            if raised.rank and len(one.ranks) < _MOST_RANKS:
                one.ranks.add(raised.rank)
    sure_texts = {(one.first.exception, one.first.message) for one in found.values() if one.sure}
    # The same text without a frame is that of another framework only where no traceback says which one it is.
    kept = [one for one in found.values() if one.sure or (one.first.exception, one.first.message) not in sure_texts]
    return sorted(kept, key=lambda one: not one.sure), count


def _fits(signature: Signature, patch: KnownBug, raised: Raised) -> bool | None:
    """Whether it is the bug for sure, or likely; None where it is not."""
    if raised.exception != signature.exception or signature.message not in raised.message:
        return None
    wanted = signature.frames or tuple(change.target for variant in patch.variants for change in variant.changes)
    # A text that anything could raise says nothing by itself, nor beside another traceback.
    shown = raised.near if signature.specific else raised.frames
    if any(_is(target, frame) for target in wanted for frame in shown):
        return True
    return False if signature.specific and not _elsewhere(wanted, raised.frames) else None


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
