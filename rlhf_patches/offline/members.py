"""The members of an archive that are read, with limits for their names and sizes."""

from __future__ import annotations

import posixpath

from ..guards.versions import MAX_METADATA

# In brackets after each limit: the largest value in the wheels of the supported frameworks and of some eighty others,
# including torch and transformers.

MAX_FILE = 2 * 2**20
"""Bytes of one source file (1.3 MiB in torch, 0.2 MiB in a framework)."""
MAX_TEXT = 128 * 2**20
"""Bytes of all source and metadata of one archive together (52 MiB)."""
MAX_UNPACKED = 2**30
"""Bytes of a whole sdist, unpacked: any access requires decompression from its beginning."""
MAX_MEMBERS = 30_000
"""Files and folders of one archive (15,586)."""
MAX_NAME = 4096
MAX_NAMES = 16 * 2**20
"""Characters of all members' names together (1 MiB)."""
MAX_DIRECTORY = 8 * 2**20
"""Bytes of a zip's directory (1.7 MiB): zipfile reads it whole before the number of entries is known."""
MAX_HEADERS = 32 * 2**10
"""Bytes of headers before one member of an sdist: tarfile reads them whole and keeps their contents."""
MAX_RECORDS = 10 * MAX_MEMBERS
"""Keys in all extended headers of an sdist together (setuptools writes one or two for a member)."""
MAX_GLOBALS = 100
"""Keys in its global headers, which tarfile copies for every member (git writes one)."""
MAX_STREAMS = 100
"""Consecutive compressed streams in an sdist (1)."""

LINK = "is a link, and links are not followed"


class ReleaseError(ValueError):
    """A file or directory is not a readable release; the message has its name and the reason."""


def too_large(size: int, limit: int) -> str:
    return f"has {size / 2**20:.1f} MiB, more than the {limit / 2**20:.0f} MiB that such a file may have"


class Files(dict[str, "bytes | str"]):
    """The relevant files of an archive, by name; a string instead of bytes is the reason why a file is not read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: set[str] = set()
        self._members = 0
        self._characters = 0
        self._bytes = 0

    def name(self, stated: str) -> str:
        """A file's name, normalized, if it stays within the archive."""
        self.refuse_outside(stated)
        name = posixpath.normpath(stated)
        if name in self._seen:
            raise ReleaseError(f"{self.path} has the member {name!r} twice, so it is ambiguous what an installer takes")
        self._seen.add(name)
        self._characters += len(stated)
        if self._characters > MAX_NAMES:
            raise ReleaseError(f"{self.path} has names of more than {MAX_NAMES} characters: too many for a release")
        return name

    def refuse_outside(self, stated: str) -> None:
        """Raise if a member, also a folder, leads out of the archive."""
        if len(stated) > MAX_NAME:
            raise ReleaseError(f"{self.path} has a member {stated[:40]!r}... with a name of {len(stated)} characters")
        parts = stated.split("/")
        if stated.startswith("/") or ".." in parts or "\\" in stated or "\0" in stated or ":" in parts[0]:
            raise ReleaseError(f"{self.path} has a member {stated!r}, which leads out of it: it is malicious")

    def count(self) -> None:
        """Count a member, also a folder."""
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise ReleaseError(f"{self.path} has more than {MAX_MEMBERS} members: too many for a release")

    def takes(self, name: str, size: int) -> bool:
        """Whether a file is relevant and must be read; called before its ``size`` bytes are read."""
        if name.endswith((".so", ".pyd", ".pyc")):
            self[name] = "hides a module's text"
        elif name.endswith(".py") or posixpath.basename(name) in ("METADATA", "PKG-INFO"):
            limit = MAX_FILE if name.endswith(".py") else MAX_METADATA
            if size > limit:
                self[name] = too_large(size, limit)
                return False
            self._bytes += size
            if self._bytes > MAX_TEXT:
                raise ReleaseError(
                    f"{self.path} has more than {MAX_TEXT // 2**20} MiB of source: too much for a release"
                )
            return True
        return False
