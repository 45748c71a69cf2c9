"""`verify`: checks that all ranks of a process group have the same patches; RLHF_PATCHES_VERIFY=1 calls it as soon as
the default group is initialized.

Each rank exchanges a few hundred bytes through the store of torch.distributed: no collective, no device, any backend
(docs/decisions/0022 has the reasons). torch is used only if it is already imported.
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
"""The timeout in seconds, equal to torch's own for NCCL."""
_ONE_WAIT = 30.0  # seconds of one wait for the others, which blocks the connection to the store
_FAREWELL = 10.0  # seconds for which the first rank, which may be the store's host, lets the others read the verdict
_PROTOCOL = "rlhf_patches/verify/1"
_C10D = "torch.distributed.distributed_c10d"


def verify(group: ProcessGroup | None = None, timeout: float | timedelta = TIMEOUT) -> None:
    """Check that all ranks of a process group have the same patches in force. Every rank of the group must call it.

    For each patch it compares whether the patch is in force (applied, or pending), the version of the framework, and a
    fingerprint of the code; and the version of rlhf_patches. It does not compare whether a module is imported yet,
    observations, and differences without effect (a patch that acts on no rank and is disabled on some).

    It imports and patches nothing, and uses the group's store: no collective, no device. A rank outside the group
    returns at once, as from torch's collectives; so do a group of one, and a process without a launcher.

    Args:
        group: None means the default group.
        timeout: seconds, or a timedelta, that the first calling rank waits for the last one.

    Raises:
        VerifyError: on every rank, with ranks, hosts and differences; or the ranks that did not call in time.
        SettingsError: an argument is invalid. The other ranks then wait for this rank.
    """
    limit = settings.seconds(timeout)
    members = _look_up(group)
    if members is not None and len(members.ranks) > 1:
        own = comparison.own_process(members.rank, engine)
        error = _Exchange(members, limit).run(own)
        if error is not None:
            raise VerifyError(error)


# ------------------------------------------------------------------------------------- what is torch's


@dataclass(frozen=True)
class _Group:
    """A process group: ``ranks`` are global ranks, ``rank`` is this process's."""

    store: Any
    name: str
    ranks: list[int]
    rank: int


def _look_up(group: Any) -> _Group | None:
    """Return the group and its store; None if this process is not a member or there are no other processes.

    Tested on torch 2.13. Only `_get_default_store` is not public; torch's own packages use it.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        rank, _, size = place()
        # No launcher has started other processes, and no driver will add any.
        if size == "1" or (rank is None and "ray" not in sys.modules):
            return None
        raise VerifyError("there is no process group: call torch.distributed.init_process_group() before verify()")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise SettingsError(f"group is {group!r}: expected a torch.distributed.ProcessGroup, or None")
    rank, backend = dist.get_rank(), dist.get_backend(group)
    ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
    if backend == "fake" or rank not in ranks:
        return None
    if backend == "mpi":
        raise VerifyError("the MPI backend has no store, which verify() needs")
    find = getattr(sys.modules[_C10D], "_get_default_store", None)
    if find is None:
        version = sys.modules["torch"].__version__
        raise VerifyError(f"torch {version} has no {_C10D}._get_default_store, which verify() needs; please report it")
    # Not a clone(): with 32 ranks on one machine, a second connection took 5 s.
    store = find()
    everyone = len(ranks) == dist.get_world_size()
    name = "world" if everyone else hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return _Group(dist.PrefixStore(f"{_PROTOCOL}/{name}", store), name, ranks, rank)


# ------------------------------------------------------------------------------------- the exchange


class _Exchange:
    """One call of `verify` on all ranks. No rank is special, so any rank may be missing and is then named.

    Each rank writes its state and increments a counter. The last rank compares and writes the verdict; after a timeout,
    the first rank that times out does. The others wait for the verdict's key.
    """

    def __init__(self, group: _Group, limit: float) -> None:
        self._group = group
        self._limit = limit
        self._started = time.monotonic()

    def run(self, own: Process) -> str | None:
        """Take part; return the error, None if there is none."""
        try:
            return self._run(own)
        except RuntimeError as error:  # torch's stores raise it or a subclass
            raise VerifyError(
                f"rank {own.rank} has lost the store of the process group during verify(). The store's process (rank 0 "
                "or the launcher, torchrun, on the master host) has ended. "
                f"{type(error).__name__}: {_first_line(error)}"
            ) from error

    def _run(self, own: Process) -> str | None:
        store, ranks, rank = self._group.store, self._group.ranks, self._group.rank
        # The store numbers the calls: a restarted process, or a group that was initialized again on the same store,
        # must not read the keys of an earlier call.
        self._call = store.add(f"calls/{rank}", 1)
        self._set(f"state/{rank}", comparison.to_dict(own))
        if store.add(self._key("arrived"), 1) == len(ranks) or not self._wait_for_verdict():
            self._decide()
        verdict = self._get("verdict")
        # The first rank's process may host the store, and may end right after this.
        if store.add(self._key("seen"), 1) == verdict["present"]:
            store.set(self._key("done"), "1")
        elif rank == ranks[0]:
            self._wait("done", _FAREWELL)
        error: str | None = verdict["error"]
        if error is None and rank == ranks[0] and speaks():
            logger().info("verified: %d ranks have the same patches in force", len(ranks))
        return error

    def _wait_for_verdict(self) -> bool:
        """Wait for the verdict; return whether it came in time."""
        warned = False
        while (left := self._limit - (time.monotonic() - self._started)) > 0:
            if self._wait("verdict", min(left, _ONE_WAIT)):
                return True
            if left > _ONE_WAIT and not warned and speaks():
                warned = True
                logger().warning("verify() waits for %s, at most %.0f s more", ranks_text(self._missing()), left)
        return False

    def _decide(self) -> None:
        """Compare and write the verdict, unless another rank has written it."""
        if self._group.store.check([self._key("verdict")]):
            return
        missing = self._missing()
        present = [rank for rank in self._group.ranks if rank not in missing]
        processes = self._processes(present)
        if missing:
            have = "has" if len(missing) == 1 else "have"
            error: str | None = (
                f"{ranks_text(missing)} of {len(self._group.ranks)} {have} not called rlhf_patches.verify() within "
                f"{self._limit:.0f} s: killed, stuck, not this far yet, or without rlhf_patches (or "
                f"RLHF_PATCHES_VERIFY). Present: {where(processes)}"
            )
        else:
            error = differences(processes)
            if error is not None:
                error = (
                    f"the {len(present)} ranks of this process group have different patches.\n{error}\n"
                    "Run `rlhf-patches doctor` on each of these hosts, in the run's environment, for details."
                )
        # Only the first verdict counts: a late rank must not contradict the verdict that the others have read.
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
        """Wait for a key; return whether it exists within the time."""
        started = time.monotonic()
        try:
            # Stores count whole milliseconds, and most of them treat 0 as no limit.
            self._group.store.wait([self._key(name)], timedelta(milliseconds=math.ceil(seconds * 1000)))
        except RuntimeError:
            # Only some stores have a timeout exception. An earlier exception has another cause.
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
_verified: int | None = None  # the id() of the last compared default group; a reference would keep it alive


def arrange() -> None:
    """Verify every default process group once: on its initialization, or now if it exists.

    Raises:
        VerifyError: torch's function cannot be hooked; or the ranks of the existing group differ.
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
    """Make init_process_group call `verify` afterwards, by swapping its code, which affects existing references.

    It hooks the outermost function, a decorator's: a patch of the function itself does not conflict, and torch does not
    log our exceptions.
    """
    function = locating.namespace_of(module).get("init_process_group")
    try:
        if type(function) is not FunctionType:
            raise TypeError(f"it is a {type(function).__name__}, not a function")
        if function in _hooked and function.__code__ is _hooked[function][1]:
            return
        what = PREFIX + "VERIFY"
        code = trampolines.build(
            function, function.__code__, _initialize_and_verify, wraps=True, binding="function", by=what
        )
        functions.check_swap(function, code)
    except no_signal(Exception) as error:
        raise VerifyError(
            f"RLHF_PATCHES_VERIFY is set, but {name}.init_process_group cannot be hooked: {error}. Unset it, and call "
            "rlhf_patches.verify() after the initialization"
        ) from error
    _hooked[function] = (function.__code__, code)
    function.__code__ = code


def _initialize_and_verify(
    wrapped: Callable[..., Any], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result = wrapped(*args, **kwargs)
    # The timeout of init_process_group(backend, init_method, timeout, ...), at most the default. 0 is no limit.
    given = args[2] if len(args) > 2 else kwargs.get("timeout")
    seconds = given.total_seconds() if isinstance(given, timedelta) else 0.0
    _verify_default(min(TIMEOUT, seconds) if seconds > 0 else TIMEOUT)
    return result


def _verify_default(timeout: float) -> None:
    global _verified
    _verified = id(sys.modules[_C10D].GroupMember.WORLD)  # first: do not verify again after a failure, which might hang
    verify(timeout=timeout)
