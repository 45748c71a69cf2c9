"""A wheel, or another zip."""

from __future__ import annotations

import io
import stat
import zipfile

from . import members
from .members import LINK, Files, ReleaseError


def read(path: str) -> Files:
    """The files of a wheel or a zip that matter."""
    files = Files(path)
    with _Directory(path) as stream, zipfile.ZipFile(stream) as archive:
        stream.opening = False
        for member in archive.infolist():
            files.count()
            _check_entry(path, archive, member)
            if member.is_dir():
                files.refuse_outside(member.orig_filename)
                continue
            # Not `filename`, which zipfile cuts at a NUL.
            name = files.name(member.orig_filename)
            if files.takes(name, member.file_size):
                if stat.S_ISLNK(member.external_attr >> 16):
                    files[name] = LINK
                    continue
                with archive.open(member) as text:
                    # Never more than was stated; zipfile compares the checksum at the end.
                    files[name] = text.read(member.file_size + 1)
    return files


def _check_entry(path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    # zipfile decompresses bzip2 and LZMA without a bound, whatever size is stated.
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ReleaseError(
            f"{path}: {member.filename!r} has a compression that no release has ({member.compress_type})"
        )
    # A flipped bit in a comment's length swallows the entries that follow.
    if member.comment:
        raise ReleaseError(f"{path} is damaged: {member.filename!r} has a comment; get it again")
    try:
        archive.open(member).close()  # compares the name in the directory with the one in front of the data
    except (RuntimeError, NotImplementedError) as error:  # encrypted; a zip of the future
        raise ReleaseError(f"{path}: {member.filename!r} cannot be read: {error}") from error


class _Directory(io.BufferedReader):
    """What zipfile reads from. While it opens the archive, it reads no directory that no release has."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self._path = path
        self.opening = True

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file's."""
        if self.opening and size is not None and size > members.MAX_DIRECTORY:
            raise ReleaseError(f"{self._path} has a directory of {size / 2**20:.0f} MiB: too large for a release")
        data = super().read(size)
        # Every entry begins with this, whatever number of entries is stated.
        if self.opening and data.count(b"PK\1\2") > members.MAX_MEMBERS:
            raise ReleaseError(f"{self._path} has more than {members.MAX_MEMBERS} members: too many for a release")
        return data
