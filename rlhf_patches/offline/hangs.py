"""Signs of a hanging run: timeouts of collectives, by NCCL's watchdog or gloo, and the stacks of processes.

Stacks come from faulthandler, from ``py-spy dump``, and from torch for a failed collective. Memory is bounded, and
every expression takes linear time.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import frames
from .frames import Frame, shortened

_MOST_STACKS = 64  # open stacks; with more, the oldest are dropped
_MOST_FRAMES = 100  # faulthandler's own limit
_MOST_GROUPS = 64
_MOST_RANKS = 100_000
_WATCHDOG = re.compile(r"\[(?:[^\[\]\n]{0,99}\s)?Rank (\d{1,9})\] Watchdog caught collective operation timeout: ")
_WORK = re.compile(r"WorkNCCL\((?:SeqNum=(\d{1,20}), )?OpType=(\w{1,60})")
_LIMIT = re.compile(r"\bTimeout\(ms\)=(\d{1,15})")
_GROUP = re.compile(r"\[PG (?:ID )?(\d{1,9})\b")
_ELSEWHERE = "a collective of {} has timed out"
_SIGNAL = r"Received a dump signal due to a collective timeout from\s{1,3}(rank \d{1,9}|this local rank)"
_NOTICES = (  # what a rank logs that has not timed out itself, or without naming the collective
    (rf"Rank (\d{{1,9}})\] {_SIGNAL}", _ELSEWHERE),
    (r"Rank (\d{1,9})\] Observed flight recorder dump signal from (another rank|rank \d{1,9})", _ELSEWHERE),
    (
        r"Rank (\d{1,9})\] ProcessGroupNCCL's watchdog got stuck for (\d{1,9}) seconds",
        "NCCL's watchdog has made no progress for {} s: a call of CUDA or NCCL does not return",
    ),
)
_GLOO = re.compile(r"\bTimed out waiting (\d{1,15})ms for (?:send|recv) operation to complete")
_BARRIER = re.compile(r"\[Rank (\d{1,9})\]: Ranks? [\d, ]{1,999} failed to pass monitoredBarrier in (\d{1,15}) ms")
_HEADER = re.compile(
    r"(?:(?:Current thread|Thread) 0x[0-9a-fA-F]{1,16}(?: \[[^\]\n]{0,99}\])?|Stack) \(most recent call first\):$"
    r'|Thread (?:0x[0-9a-fA-F]{1,16}|\d{1,20}) \([a-z+ ]{1,40}\)(?:: ".{0,200}")?$'
    r"|.{0,300}\bStack trace of the failed collective:\s*$"
)
_FRAMES = (
    re.compile(r'\s{0,20}File "(?P<file>[^"\n]+)", line \d{1,9} in (?P<function>\S+)'),  # faulthandler's
    re.compile(r"#\d{1,4} (?P<function>\S+) from (?P<file>.{1,4000}):\d{1,9}$"),  # torch's
    re.compile(r"\s{4}(?P<function>\S{1,400}) \((?P<file>[^()\n]{1,4000}?)(?::\d{1,9})?\)$"),  # py-spy's
)
_FORWARD = ("torch", "accelerate", "deepspeed")  # their functions forward a collective of their caller
_OWN_RANK = re.compile(r"\s?\[rank\d{1,9}\]:?$")
_LOCALS = re.compile(r"\s{8}")  # py-spy's, below a frame
_OWN = "torch/distributed/distributed_c10d.py"
NEEDLES = (
    *(b"Watchdog", b"watchdog", b"dump signal", b"Timed out", b"monitoredBarrier"),
    *(b"most recent call first", b"Thread ", b"Stack trace of"),
)
"""Each line that begins a sign contains one of these."""


@dataclass(frozen=True)
class Timeout:
    """A collective that has timed out.

    Attributes:
        backend: ``NCCL`` or ``gloo``.
        collective: the collective, if the line names it: ``ALLREDUCE``.
        sequence: its number in its group, if the line has it.
        milliseconds: the limit, if the line has it.
        group: the number of the process group, if the line has it.
        notice: what the line reports without the collective; or "".
    """

    backend: str
    collective: str
    sequence: str
    milliseconds: str
    line: int
    stream: str
    rank: str
    file: str = ""
    group: str = ""
    notice: str = ""


@dataclass(frozen=True)
class Stack:
    """The stack of a thread.

    Attributes:
        frames: innermost first.
    """

    frames: tuple[Frame, ...]
    line: int
    stream: str
    rank: str
    file: str = ""


def collective(frames: Sequence[Frame]) -> str:
    """The outermost function of torch.distributed in a stack; empty if there is none."""
    return next((frame.function for frame in reversed(frames) if _is_collectives(frame)), "")


def caller(frames: Sequence[Frame]) -> Frame:
    """The caller of the collective outside torch's modules; without a collective, the innermost frame."""
    inside = [number for number, frame in enumerate(frames) if _is_collectives(frame)]
    if not inside:
        return frames[0]
    outside = (frame for frame in frames[inside[-1] + 1 :] if "/torch/" not in "/" + frame.file)
    return next(outside, frames[inside[-1]])


def waits_for_process(frames: Sequence[Frame]) -> bool:
    """Whether a stack waits for another process: in torch for one that builds an extension, or for data from one."""
    return any(
        one.function == function and ("/" + one.file).endswith(file)
        for one in frames
        for function, file in (("wait", "/torch/utils/file_baton.py"), ("recv", "/multiprocessing/connection.py"))
    )


def stands_in(targets: Sequence[str], stack: Sequence[Frame]) -> bool:
    """Whether a stack stands in one of the functions, that is, not in a wait of another method that it called.

    Other methods of a trainer wait for other things, such as a rollout. Functions call helpers.

    Args:
        targets: the functions, ``module:qualified.name``.
        stack: the frames, innermost first.
    """
    last = frames.failing(stack[::-1], _FORWARD)
    for target in targets:
        is_method = "." in target.partition(":")[2]
        if frames.through((target,), stack) and not (is_method and (last is None or not frames.is_at(target, last))):
            return True
    return False


def _is_collectives(frame: Frame) -> bool:
    return ("/" + frame.file).endswith(f"/{_OWN}")


def note_rank(ranks: set[str], rank: str) -> None:
    """Add a rank to those of a finding, if it is known; a log can name any number of ranks."""
    if rank and len(ranks) < _MOST_RANKS:
        ranks.add(rank)


def timeout(text: str, number: int, prefix: str, rank: str) -> Timeout | None:
    """The timeout that a line reports."""
    match = _WATCHDOG.search(text)
    if match:
        work, limit = _WORK.match(text, match.end()), _LIMIT.search(text, match.end())
        if work is None:
            return None
        limited, rank, group = limit[1] if limit else "", f"rank {match[1]}", _GROUP.search(text, 0, match.end())
        return Timeout("NCCL", work[2], work[1] or "", limited, number, prefix, rank, group=group[1] if group else "")
    for pattern, notice in _NOTICES if "Rank " in text else ():
        match = re.search(pattern, text)
        if match:
            what = notice.format(match[2])
            return Timeout("NCCL", "", "", "", number, prefix, f"rank {match[1]}", notice=what)
    match = _BARRIER.search(text)
    if match:
        return Timeout("gloo", "monitored_barrier", "", match[2], number, prefix, f"rank {match[1]}")
    match = _GLOO.search(text)
    return Timeout("gloo", "", "", match[1], number, prefix, rank) if match else None


class Stacks:
    """The stacks of a log, fed line by line."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, tuple[int, str, list[Frame]]] = OrderedDict()

    @property
    def active(self) -> int:
        """The number of stacks that have begun and not ended."""
        return len(self._open)

    def fed(self, text: str, number: int, prefix: str, rank: str) -> Iterator[Stack]:
        """The stack, with frames, that a line ends."""
        current = self._open.get(prefix)
        if current is not None:
            frame = next((frame for each in _FRAMES if (frame := each.match(text))), None)
            if frame is not None:
                if len(current[2]) < _MOST_FRAMES:
                    current[2].append(shortened(frame["file"], frame["function"]))
                return
            if _LOCALS.match(text):
                return
            yield from self._ended(prefix)
        if _HEADER.match(text):
            if len(self._open) >= _MOST_STACKS:
                self._open.popitem(last=False)
            # torch writes this stack as one message of several lines; only the first names the rank.
            self._open[_OWN_RANK.sub("", prefix) if "Stack trace" in text else prefix] = (number, rank, [])

    def end(self) -> Iterator[Stack]:
        """The stacks that the log's end ends."""
        for prefix in list(self._open):
            yield from self._ended(prefix)

    def _ended(self, prefix: str) -> Iterator[Stack]:
        number, rank, frames = self._open.pop(prefix)
        if frames:
            yield Stack(tuple(frames), number, prefix, rank)


@dataclass
class Group:
    """The same sign of one or several ranks."""

    first: Timeout | Stack
    times: int = 0
    ranks: set[str] = field(default_factory=set)


@dataclass
class Standing:
    """All signs in logs, equal ones grouped; the number of groups is limited.

    Attributes:
        timeouts: by collective.
        stacks: by collective and its caller.
        count: the number of all signs.
    """

    timeouts: dict[tuple[str, ...], Group] = field(default_factory=dict)
    stacks: dict[tuple[str, ...], Group] = field(default_factory=dict)
    count: int = 0

    def add(self, sign: Timeout | Stack) -> None:
        """Note a sign."""
        self.count += 1
        groups: dict[tuple[str, ...], Group]
        key: tuple[str, ...]
        if isinstance(sign, Timeout):
            key = (sign.backend, sign.collective, sign.sequence, sign.milliseconds, sign.group, sign.notice)
            groups = self.timeouts
        else:
            groups, key = self.stacks, (collective(sign.frames), *caller(sign.frames))
        if key not in groups and len(groups) >= _MOST_GROUPS:
            return
        group = groups.setdefault(key, Group(sign))
        group.times += 1
        note_rank(group.ranks, sign.rank)

    def disagreeing(self) -> list[list[Group]]:
        """The timeouts of one number in one process group in which the ranks were in different collectives."""
        alike: dict[tuple[str, str], list[Group]] = {}
        for group in self.timeouts.values():
            first = group.first
            if isinstance(first, Timeout) and first.sequence:
                alike.setdefault((first.group, first.sequence), []).append(group)
        return [groups for groups in alike.values() if len({_collective_of(group) for group in groups}) > 1]


def _collective_of(group: Group) -> str:
    return group.first.collective if isinstance(group.first, Timeout) else ""
