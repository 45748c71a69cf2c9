"""A file system whose locks fail, as an NFS mount without a lock manager: a library in front of libc's ``flock``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

WAYS = ("never", "no unlock")
"""Every call fails with ENOLCK; or locks are taken, and their release fails with EIO."""

_TEXT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/file.h>
int flock(int file, int operation) {
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    if (NEVER) { errno = ENOLCK; return -1; }
    int done = real(file, operation);
    if (operation & LOCK_UN) { errno = EIO; return -1; }
    return done;
}
"""


def can_be_made() -> bool:
    """Whether there is a compiler."""
    return shutil.which("gcc") is not None


def preload(folder: Path, way: str) -> dict[str, str]:
    """The variable that puts the library in front, for a process."""
    library = folder / f"{way.replace(' ', '-')}.so"
    command = ["gcc", "-shared", "-fPIC", f"-DNEVER={int(way == WAYS[0])}", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=_TEXT, text=True, check=True)
    return {"LD_PRELOAD": str(library)}
