"""Read a wheel or another zip."""

from __future__ import annotations

import io
import stat
import zipfile

from . import members
from .members import LINK, Files, ReleaseError


def read(path: str) -> Files:
    """The relevant files of a wheel or a zip."""
    files = Files(path)
    with _Directory(path) as stream, zipfile.ZipFile(stream) as archive:
        stream.opening = False
        for member in archive.infolist():
            files.count()
            _check_entry(path, archive, member)
            if member.is_dir():
                files.refuse_outside(member.orig_filename)
                continue
            # Not `filename`: zipfile cuts it at a NUL.
            name = files.name(member.orig_filename)
            if files.takes(name, member.file_size):
                if stat.S_ISLNK(member.external_attr >> 16):
                    files[name] = LINK
                    continue
                with archive.open(member) as text:
                    # At most the stated size; zipfile compares the checksum at the end.
                    files[name] = text.read(member.file_size + 1)
    return files


def _check_entry(path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    # zipfile decompresses bzip2 and LZMA without a limit, whatever the stated size.
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ReleaseError(
            f"{path}: {member.filename!r} has a compression that no release has ({member.compress_type})"
        )
    # A flipped bit in a comment's length hides the following entries.
    if member.comment:
        raise ReleaseError(f"{path} is damaged: {member.filename!r} has a comment; download it again")
    try:
        archive.open(member).close()  # compares the names in the directory and before the data
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or a future zip version
        raise ReleaseError(f"{path}: {member.filename!r} cannot be read: {error}") from error


class _Directory(io.BufferedReader):
    """A reader for zipfile with a limit for the archive's directory."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self._path = path
        self.opening = True

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file's."""
        if self.opening and size is not None and size > members.MAX_DIRECTORY:
            raise ReleaseError(f"{self._path} has a directory of {size / 2**20:.0f} MiB: too large for a release")
        data = super().read(size)
        # Every entry begins with this, whatever the stated number of entries.
        if self.opening and data.count(b"PK\1\2") > members.MAX_MEMBERS:
            raise ReleaseError(f"{self._path} has more than {members.MAX_MEMBERS} members: too many for a release")
        return data
