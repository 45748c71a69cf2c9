"""`verify`: all ranks of a process group find out whether they run the same patches; with RLHF_PATCHES_VERIFY=1 by
itself, as soon as the default group is there.

The ranks exchange a few hundred bytes each through the store that torch.distributed was initialised with: no
collective, no device, any backend (docs/decisions/0022 has the reasons). torch is used only if it is imported already.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from .. import settings
from ..engine import functions, import_hooks, trampolines
from ..engine.engine import engine
from ..engine.log import logger, speaks
from ..guards import locating
from ..import_system import no_signal
from ..ranks import place, ranks_text
from ..settings import PREFIX, SettingsError
from . import comparison
from .comparison import VerifyError, differences, where
from .processes import Process

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT = 600.0
"""Seconds; as long as torch itself waits for a rank under NCCL."""
_ONE_WAIT = 30.0  # seconds of one wait for the others: the connection to the store is taken meanwhile
_FAREWELL = 10.0  # seconds for which the first rank, which may be the store's host, lets the others read the verdict
_PROTOCOL = "rlhf_patches/verify/1"
_C10D = "torch.distributed.distributed_c10d"


def verify(group: ProcessGroup | None = None, timeout: float | timedelta = TIMEOUT) -> None:
    """Check that all ranks of a process group have the same patches in force. Every rank of the group has to call it.

    Compared are, for each patch: whether it is in force (applied, or pending and about to be), the version of the
    framework, and a fingerprint of the code; and the version of rlhf_patches. Not compared: whether a module has been
    imported yet, observations, and what makes no difference (a patch that acts on no rank and is disabled on some).

    Nothing is imported or patched. Through the group's store: no collective, no device. A rank that is not a member
    of the group returns at once, as from torch's collectives, and so does a group of one, and a process that no
    launcher has started as one of several.

    Args:
        group: None means the default group.
        timeout: seconds, or a timedelta, that the first rank to call waits for the last.

    Raises:
        VerifyError: on every rank, naming ranks, hosts and differences; or the ranks that did not come in time.
        SettingsError: an argument is wrong. The other ranks wait for this one then.
    """
    limit = settings.seconds(timeout)
    found = _look_up(group)
    if found is not None and len(found.ranks) > 1:
        own = comparison.own_process(found.rank, engine)
        error = _Exchange(found, limit).run(own)
        if error is not None:
            raise VerifyError(error)


# ------------------------------------------------------------------------------------- what is torch's


@dataclass(frozen=True)
class _Group:
    """A process group: the ranks are those of the default group, ``rank`` is this process's."""

    store: Any
    name: str
    ranks: list[int]
    rank: int


def _look_up(group: Any) -> _Group | None:
    """The group and its store; None if this process is not a member or there are no other processes.

    Run on torch 2.13. Everything is public there but `_get_default_store`, which torch's own packages use.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        rank, _, size = place()
        # No launcher has started others, and no driver will say so later.
        if size == "1" or (rank is None and "ray" not in sys.modules):
            return None
        raise VerifyError("there is no process group yet: call torch.distributed.init_process_group() before verify()")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise SettingsError(f"group is {group!r}: expected a torch.distributed.ProcessGroup, or None")
    rank, backend = dist.get_rank(), dist.get_backend(group)
    ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
    if backend == "fake" or rank not in ranks:
        return None
    if backend == "mpi":
        raise VerifyError("the MPI backend has no store, through which verify() could compare the ranks")
    find = getattr(sys.modules[_C10D], "_get_default_store", None)
    if find is None:
        version = sys.modules["torch"].__version__
        raise VerifyError(f"torch {version} has no {_C10D}._get_default_store, which verify() needs; please report it")
    # Not a clone() of it: with 32 ranks on one machine a second connection took 5 s.
    store = find()
    everyone = len(ranks) == dist.get_world_size()
    name = "world" if everyone else hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return _Group(dist.PrefixStore(f"{_PROTOCOL}/{name}", store), name, ranks, rank)


# ------------------------------------------------------------------------------------- the exchange


class _Exchange:
    """One call of `verify` on all ranks. No rank is special, so any of them may be missing and is then named.

    Each rank writes down what it has and counts itself in. The last to come compares and writes the verdict; if none
    does in time, the first to have waited long enough. The others wait for that one key.
    """

    def __init__(self, group: _Group, limit: float) -> None:
        self._group = group
        self._limit = limit
        self._started = time.monotonic()

    def run(self, own: Process) -> str | None:
        """Take part; returns what is wrong, None if nothing is."""
        try:
            return self._run(own)
        except RuntimeError as error:  # what torch's stores raise is that or a subclass
            raise VerifyError(
                f"rank {own.rank} has lost the store of the process group during verify(). It lives in the process of "
                "rank 0, or in the launcher (torchrun), on the master host: that process has ended. "
                f"{type(error).__name__}: {_first_line(error)}"
            ) from error

    def _run(self, own: Process) -> str | None:
        store, ranks, rank = self._group.store, self._group.ranks, self._group.rank
        # Numbered in the store, not here: a process that was started again, or a group that was initialised again
        # on the same store, must not read what is left of an earlier call.
        self._call = store.add(f"calls/{rank}", 1)
        self._set(f"state/{rank}", comparison.to_dict(own))
        if store.add(self._key("arrived"), 1) == len(ranks) or not self._wait_for_verdict():
            self._decide()
        verdict = self._get("verdict")
        # The store may live in the first rank's process, which may end right after this.
        if store.add(self._key("seen"), 1) == verdict["present"]:
            store.set(self._key("done"), "1")
        elif rank == ranks[0]:
            self._wait("done", _FAREWELL)
        error: str | None = verdict["error"]
        if error is None and rank == ranks[0] and speaks():
            logger().info("verified: %d ranks have the same patches in force", len(ranks))
        return error

    def _wait_for_verdict(self) -> bool:
        """Whether it came in time."""
        warned = False
        while (left := self._limit - (time.monotonic() - self._started)) > 0:
            if self._wait("verdict", min(left, _ONE_WAIT)):
                return True
            if left > _ONE_WAIT and not warned and speaks():
                warned = True
                logger().warning("verify() waits for %s, for %.0f s at most", ranks_text(self._missing()), left)
        return False

    def _decide(self) -> None:
        """Compare and write the verdict, unless another rank has."""
        if self._group.store.check([self._key("verdict")]):
            return
        missing = self._missing()
        present = [rank for rank in self._group.ranks if rank not in missing]
        processes = self._processes(present)
        if missing:
            have = "has" if len(missing) == 1 else "have"
            error: str | None = (
                f"{ranks_text(missing)} of {len(self._group.ranks)} {have} not called rlhf_patches.verify() within "
                f"{self._limit:.0f} s: killed, stuck, not come this far, or without rlhf_patches (or "
                f"RLHF_PATCHES_VERIFY). Here {'is' if len(present) == 1 else 'are'} {where(processes)}"
            )
        else:
            error = differences(processes)
            if error is not None:
                error = (
                    f"the {len(present)} ranks of this process group do not run the same patches.\n{error}\n"
                    "`rlhf-patches doctor` on each of these hosts, in the run's environment, says more."
                )
        # Only the first verdict counts: a rank that comes too late must not contradict what the others were told.
        self._group.store.compare_set(self._key("verdict"), "", _pack({"present": len(present), "error": error}))

    def _missing(self) -> list[int]:
        store, ranks = self._group.store, self._group.ranks
        if store.check([self._key(f"state/{rank}") for rank in ranks]):
            return []
        return [rank for rank in ranks if not store.check([self._key(f"state/{rank}")])]

    def _processes(self, ranks: list[int]) -> list[Process]:
        store, keys = self._group.store, [self._key(f"state/{rank}") for rank in ranks]
        values = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return [comparison.from_dict(_unpack(value)) for value in values]

    def _wait(self, name: str, seconds: float) -> bool:
        """Whether the key is there after that time at most."""
        started = time.monotonic()
        try:
            # Stores count whole milliseconds, and to most of them 0 is no limit at all.
            self._group.store.wait([self._key(name)], timedelta(milliseconds=math.ceil(seconds * 1000)))
        except RuntimeError:
            # Only some stores have a type of their own for a timeout. What comes too early is something else.
            if time.monotonic() - started < 0.9 * seconds:
                raise
            return False
        return True

    def _set(self, name: str, value: Mapping[str, Any]) -> None:
        self._group.store.set(self._key(name), _pack(value))

    def _get(self, name: str) -> Any:
        return _unpack(self._group.store.get(self._key(name)))

    def _key(self, name: str) -> str:
        return f"{self._call}/{name}"


def _pack(value: Mapping[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpack(value: bytes) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(value)))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


# ------------------------------------------------------------------------------------- RLHF_PATCHES_VERIFY

_hooked: dict[FunctionType, tuple[CodeType, CodeType]] = {}
_verified: int | None = None  # the id() of the default group that was compared last; a reference would keep it alive


def arrange() -> None:
    """Have every default process group verified once: from now on on its initialisation, and now if it is there.

    Raises:
        VerifyError: torch's function is not one that can be hooked; or the ranks of the present group differ.
    """
    import_hooks.watch(_C10D, _hook)
    module = sys.modules.get(_C10D)
    if module is not None and import_hooks.is_ready(module):
        _hook(_C10D, module)
        default = locating.namespace_of(module)["GroupMember"].WORLD
        if default is not None and id(default) != _verified:
            _verify_default(TIMEOUT)


def cancel() -> None:
    """Undo `arrange`."""
    import_hooks.unwatch(_C10D, _hook)
    for function, (original, ours) in _hooked.items():
        if function.__code__ is ours:
            function.__code__ = original
    _hooked.clear()


def _hook(name: str, module: ModuleType) -> None:
    """Have init_process_group call `verify` afterwards. By its code, so that references taken before are reached.

    The outermost function, a decorator's: a patch of the function itself keeps out of our way, and torch's logging
    of exceptions does not count ours.
    """
    function = locating.namespace_of(module).get("init_process_group")
    try:
        if type(function) is not FunctionType:
            raise TypeError(f"it is a {type(function).__name__}, not a function")
        if function in _hooked and function.__code__ is _hooked[function][1]:
            return
        what = PREFIX + "VERIFY"
        code = trampolines.build(
            function, function.__code__, _initialise_and_verify, wraps=True, binding="function", by=what
        )
        functions.check_swap(function, code)
    except no_signal(Exception) as error:
        raise VerifyError(
            f"RLHF_PATCHES_VERIFY is set, but {name}.init_process_group cannot be hooked: {error}. Unset it, and call "
            "rlhf_patches.verify() after the initialisation"
        ) from error
    _hooked[function] = (function.__code__, code)
    function.__code__ = code


def _initialise_and_verify(
    wrapped: Callable[..., Any], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result = wrapped(*args, **kwargs)
    # As init_process_group(backend, init_method, timeout, ...) is given, but no longer than by default. 0 is no limit.
    given = args[2] if len(args) > 2 else kwargs.get("timeout")
    seconds = given.total_seconds() if isinstance(given, timedelta) else 0.0
    _verify_default(min(TIMEOUT, seconds) if seconds > 0 else TIMEOUT)
    return result


def _verify_default(timeout: float) -> None:
    global _verified
    _verified = id(sys.modules[_C10D].GroupMember.WORLD)  # first: not again after a failure, which might hang
    verify(timeout=timeout)
