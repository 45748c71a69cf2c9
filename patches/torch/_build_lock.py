"""The lock file of a build of a C++ extension: one whose builder is gone is taken over, and who waits says so.

What is known of a builder comes from the kernel, which takes back what a process had when it ends, however it ends:

- A builder with the patch holds its file's ``flock``, and has written into it who it is. Whoever runs on the same boot
  of the same machine gets the flock once the builder is gone, whatever the file system is.
- A builder without it, torch 2.14 too, has its file, which is empty, open for as long as it builds. The kernel gives a
  write lease on a file only while nobody else has it open, in whatever container.
- Of other machines nothing is known, so their builders count as alive, unless the file system is this machine's own:
  then no other one builds there, and what was made before this boot is nobody's.

A builder that was killed may leave its compilers behind, which work in its folder.
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
"""Between two lines of one that waits."""
LOOK_SECONDS = 1.0
"""Between two looks. Gone is who is not there in two: a builder closes its file a moment before it removes it."""
OWN = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
"""File systems that one kernel alone writes to."""
FIRST_NAMESPACE = 0xEFFFFFFC
"""The namespace of process ids from which every process of a machine is seen (PROC_PID_INIT_INO)."""
_LONGEST = 4096


class Seen(NamedTuple):
    """What one look has shown of a lock file.

    Attributes:
        builder: who made it, as far as that is known.
        alive: why somebody may build; empty where it is certain that nobody does.
        file: which file it is, as long as it is not written to.
        fd: where it was taken over, its descriptor.
    """

    builder: str
    alive: str
    file: tuple[int, ...] = ()
    fd: int | None = None


def acquired(baton: Any) -> bool:
    """In place of ``baton.try_acquire()``: whether this process has to build; where not, nobody builds any more.

    Raises:
        OSError: as `try_acquire`: the file cannot be made.
    """
    made = bool(baton.try_acquire())
    if sys.platform != "linux":
        return made  # and the caller waits, as it is released
    if made:
        _sign(baton)
    return made or _taken_over(baton)


def _taken_over(baton: Any) -> bool:
    """Wait as ``baton.wait()`` does. Returns True where the builder is gone, and this process builds in its place."""
    path = os.fspath(baton.lock_file_path)
    began = told = looked = time.monotonic()
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
            if seen.alive and now - told >= TELL_SECONDS:
                told = now
                logger.warning(
                    "%s, lock file of a build: waited for %.0f s; %s; if no build is under way anywhere, delete it",
                    *(path, now - began, seen.alive),
                )
        time.sleep(baton.wait_seconds)
    return False


def _look(path: str, gone: tuple[int, ...]) -> Seen:
    """Look at a lock file, and take it over if its builder is gone, and was when ``gone`` was seen of it.

    It raises nothing: upstream only waits.
    """
    fd = None
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        state, owner = os.fstat(fd), _owner(fd)
        builder = f"process {owner['pid']} of {owner['host'][:100]!r}" if owner else "the process that made it"
        alive = _alive(fd, state, owner, builder)
        if not os.path.samestat(state, os.stat(path)):
            alive = "it is another one by now"
        file = (state.st_ino, state.st_mtime_ns)
        if alive or file != gone:
            return Seen(builder, alive, file)
        _write(fd)
        found, fd = Seen(builder, "", file, fd), None
        return found
    except Exception as error:
        return Seen("", f"whether its builder lives cannot be told ({error})")
    finally:
        if fd is not None:
            os.close(fd)


def _alive(fd: int, state: os.stat_result, owner: dict[str, Any] | None, builder: str) -> str:
    """Why somebody may build; empty where it is certain that nobody does, and then the flock is this process's."""
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        return "it is another user's"
    kind, is_root = _mount(fd)
    here = owner is not None and owner["boot"] == _boot()
    if kind not in OWN and not here:
        return f"{builder} may build on another machine, as far as {kind or 'its file system'} tells"
    if not _is_free(fd, leased=owner is None):
        return f"{builder} builds"
    if owner is not None and not here:
        return ""  # of another boot of this machine, which no process has outlived
    namespace = os.stat("/proc/self/ns/pid").st_ino
    sees_all = namespace in (FIRST_NAMESPACE, owner["namespace"] if owner else None)
    if not sees_all and not (kind == "overlay" and is_root):  # which is this container's
        return f"{builder} is gone, and its compilers may still be at work in another container"
    return _working_in(os.path.dirname(os.readlink(f"/proc/self/fd/{fd}")))


def _is_free(fd: int, leased: bool) -> bool:
    """Whether nobody on this machine has a file's flock, and with ``leased`` nobody has it open, but for this one."""
    import fcntl

    try:
        if leased:
            # If somebody opens the file meanwhile, the kernel says so, by a signal that nobody minds instead of SIGIO.
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
    """Hold a file that this process has made, and say in it whose it is. Where that cannot be, it stays as released."""
    import fcntl

    fd = None
    try:
        # NFS gives the flock to who may write; upstream's own descriptor reads.
        fd = os.open(baton.lock_file_path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        if os.path.samestat(os.fstat(fd), os.fstat(baton.fd)):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd)
            fd, baton.fd = baton.fd, fd  # writes: release() closes it, as it would the other
    except Exception as error:  # upstream builds all the same
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
    """Who has made a file, as it says; None where it says nothing."""
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
    """The kind of file system that a file is in, ``ext4`` or ``nfs4`` say, and whether it is the whole one at ``/``."""
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
    """A process whose working folder this is, as that of ninja and of compilers is; empty where there is none."""
    place = os.stat(folder)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                there = os.stat(f"/proc/{name}/cwd")
            except OSError:  # it has ended, or is another user's
                continue
            if os.path.samestat(there, place):
                return f"process {name} works in its folder, although the builder is gone"
    return ""
