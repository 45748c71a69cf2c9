"""The lock file of a build of a C++ extension: take it over if its builder is gone, and log the wait otherwise.

The kernel shows whether a builder is alive, since it releases the locks and files of a process that ends, however it
ends:

- A builder with the patch holds the ``flock`` of its file, and has written its identity into the file. A process on the
  same boot of the same machine gets the flock once the builder is gone, on any file system.
- A builder without the patch, including torch 2.14, keeps its empty file open while it builds. The kernel grants a
  write lease on a file only while no other process has it open, in any container.
- Builders on other machines are not visible, so they count as alive, unless the file system belongs to this machine:
  then no other machine builds there, and a file from before this boot belongs to no process.

A builder that was killed may leave compilers behind, which work in its folder.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import stat
import sys
import time
from typing import Any, NamedTuple

logger = logging.getLogger("rlhf_patches")

TELL_SECONDS = 60.0
"""Interval between two log lines of a waiting process."""
LOOK_SECONDS = 1.0
"""Interval between two checks. A builder is gone after two checks: it closes its file just before it removes it."""
OWN = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
"""File systems that only one kernel writes to."""
FIRST_NAMESPACE = 0xEFFFFFFC
"""The process id namespace that contains every process of a machine (PROC_PID_INIT_INO)."""
_LONGEST = 4096


class Seen(NamedTuple):
    """The result of one check of a lock file.

    Attributes:
        builder: the process that created the file, as far as known.
        alive: why a process may be building; empty where it is certain that none is.
        file: identifies the file while nothing is written to it.
        fd: the file's descriptor, where this process has taken the file over.
    """

    builder: str
    alive: str
    file: tuple[int, ...] = ()
    fd: int | None = None


def acquired(baton: Any) -> bool:
    """Replaces ``baton.try_acquire()``: whether this process has to build; if not, no process builds any more.

    Raises:
        OSError: as `try_acquire`: the file cannot be created.
    """
    made = bool(baton.try_acquire())
    if sys.platform != "linux":
        return made  # and the caller waits, as released
    if made:
        _sign(baton)
    return made or _taken_over(baton)


def _taken_over(baton: Any) -> bool:
    """Wait as ``baton.wait()`` does. Returns True where the builder is gone and this process has to build."""
    path = os.fspath(baton.lock_file_path)
    began = reported = looked = time.monotonic()
    gone: tuple[int, ...] = ()
    while os.path.exists(path):
        now = time.monotonic()
        if now >= looked:
            looked = now + LOOK_SECONDS
            seen = _look(path, gone)
            if seen.fd is not None:
                baton.fd = seen.fd  # writes: as try_acquire does, and release() closes it
                logger.warning("%s, lock file of a build: %s is gone, so this process builds", path, seen.builder)
                return True
            gone = () if seen.alive else seen.file
            if seen.alive and now - reported >= TELL_SECONDS:
                reported = now
                logger.warning(
                    "%s, lock file of a build: waited for %.0f s; %s; if no build is under way anywhere, delete it",
                    *(path, now - began, seen.alive),
                )
        time.sleep(baton.wait_seconds)
    return False


def _look(path: str, gone: tuple[int, ...]) -> Seen:
    """Check a lock file, and take it over if its builder is gone, and was gone at the check that returned ``gone``.

    The function raises nothing: upstream only waits.
    """
    fd = None
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        state, owner = os.fstat(fd), _owner(fd)
        builder = f"process {owner['pid']} of {owner['host'][:100]!r}" if owner else "the process that made it"
        alive = _alive(fd, state, owner, builder)
        if not os.path.samestat(state, os.stat(path)):
            alive = "the file has been replaced"
        file = (state.st_ino, state.st_mtime_ns)
        if alive or file != gone:
            return Seen(builder, alive, file)
        _write(fd)
        found, fd = Seen(builder, "", file, fd), None
        return found
    except Exception as error:
        return Seen("", f"cannot determine whether its builder is alive ({error})")
    finally:
        if fd is not None:
            os.close(fd)


def _alive(fd: int, state: os.stat_result, owner: dict[str, Any] | None, builder: str) -> str:
    """Why a process may be building; empty where it is certain that none is, and this process then holds the flock."""
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        return "the file belongs to another user"
    kind, is_root = _mount(fd)
    here = owner is not None and owner["boot"] == _boot()
    if kind not in OWN and not here:
        return f"{builder} may be building on another machine, since {kind or 'the file system'} may be shared"
    if not _is_free(fd, leased=owner is None):
        return f"{builder} is building"
    if owner is not None and not here:
        return ""  # from another boot of this machine, which no process has survived
    namespace = os.stat("/proc/self/ns/pid").st_ino
    sees_all = namespace in (FIRST_NAMESPACE, owner["namespace"] if owner else None)
    if not sees_all and not (kind == "overlay" and is_root):  # which belongs to this container
        return f"{builder} is gone, but its compilers may still be running in another container"
    return _working_in(os.path.dirname(os.readlink(f"/proc/self/fd/{fd}")))


def _is_free(fd: int, leased: bool) -> bool:
    """Whether no other process on this machine holds a file's flock and, with ``leased``, none has the file open."""
    import fcntl

    try:
        if leased:
            # If a process opens the file meanwhile, the kernel sends SIGURG, which is ignored by default, not SIGIO.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            if leased:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return False
    return True


def _sign(baton: Any) -> None:
    """Lock a file that this process has created, and write its identity into it. On an error, it stays as released."""
    import fcntl

    fd = None
    try:
        # NFS grants the flock to descriptors that can write; upstream's descriptor is read-only.
        fd = os.open(baton.lock_file_path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        if os.path.samestat(os.fstat(fd), os.fstat(baton.fd)):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd)
            fd, baton.fd = baton.fd, fd  # writes: release() closes it, like the other descriptor
    except Exception as error:  # upstream builds anyway
        logger.debug("%s, lock file of a build, is not signed: %s", baton.lock_file_path, error)
    finally:
        if fd is not None:
            os.close(fd)


def _write(fd: int) -> None:
    owner = {"boot": _boot(), "namespace": os.stat("/proc/self/ns/pid").st_ino}
    line = json.dumps({**owner, "host": socket.gethostname(), "pid": os.getpid()})
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{line}\n".encode(), 0)


def _owner(fd: int) -> dict[str, Any] | None:
    """The identity that a file's creator has written into it; None where the file has none."""
    try:
        found = json.loads(os.pread(fd, _LONGEST, 0))
        kinds = {"boot": str, "namespace": int, "host": str, "pid": int}
        return found if all(isinstance(found[key], kind) for key, kind in kinds.items()) else None
    except (ValueError, TypeError, KeyError):
        return None


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _mount(fd: int) -> tuple[str, bool]:
    """The type of a file's file system, such as ``ext4`` or ``nfs4``, and whether all of it is mounted at ``/``."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        number = re.search(r"^mnt_id:\s*(\d+)$", file.read(), re.MULTILINE)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, of_kind = line.partition(" - ")
            mount, _, _, root, point, *_ = fields.split(" ")
            if number and mount == number[1]:
                return of_kind.split(" ")[0], root == point == "/"
    return "", False


def _working_in(folder: str) -> str:
    """A process that works in this folder, as ninja and compilers do; empty where there is none."""
    place = os.stat(folder)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                there = os.stat(f"/proc/{name}/cwd")
            except OSError:  # it has ended, or belongs to another user
                continue
            if os.path.samestat(there, place):
                return f"process {name} still works in the folder, although the builder is gone"
    return ""
