"""Read an sdist as a forward-only stream."""

from __future__ import annotations

import io
import posixpath
import re
import tarfile
import zlib
from typing import IO, TYPE_CHECKING

from . import members
from .members import LINK, Files, ReleaseError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CHUNK = 2**18


def read(path: str) -> Files:
    """The relevant files of an sdist."""
    files = Files(path)
    with open(path, "rb") as packed:
        limited = _Limited(path, io.BufferedReader(_Gunzip(path, packed), _CHUNK))
        limited.allow(members.MAX_HEADERS)
        with tarfile.open(fileobj=limited, mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                archive.members = []  # otherwise tarfile keeps all members and their headers
                files.count()
                if len(archive.pax_headers) > members.MAX_GLOBALS:
                    raise ReleaseError(f"{path} has more than {members.MAX_GLOBALS} global headers: it is malicious")
                if member.size < 0:
                    raise ReleaseError(f"{path}: {member.name!r} has a negative size: it is malicious")
                if member.isdir():
                    files.refuse_outside(member.name)
                else:
                    limited.allow(member.size + 1024, headers=False)
                    _add(files, archive, member)
                limited.allow(members.MAX_HEADERS)
            limited.allow(None)
            limited.check_end()
    return files


def _add(files: Files, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    name = files.name(member.name)
    if member.issym() or member.islnk():
        _check_link(files.path, name, member)
        files[name] = LINK
    elif not member.isreg() or member.issparse():
        raise ReleaseError(f"{files.path}: {name} is a device, a pipe or a sparse file, which no release contains")
    elif files.takes(name, member.size):
        stream = archive.extractfile(member)
        assert stream is not None
        files[name] = stream.read()


def _check_link(path: str, name: str, member: tarfile.TarInfo) -> None:
    # A symbolic link's target is relative to the link's folder, a hard link's to the archive's root.
    base = posixpath.dirname(name) if member.issym() else ""
    target = posixpath.normpath(posixpath.join(base, member.linkname))
    if target.startswith(("/", "../")) or target == "..":
        raise ReleaseError(f"{path}: {name} is a link to {member.linkname!r}, out of the archive: it is malicious")


class _Gunzip(io.RawIOBase):
    """An unpacked gzip file. Python's own reader reads the name in the header byte by byte, without a limit."""

    def __init__(self, path: str, packed: IO[bytes]) -> None:
        self._path = path
        self._packed = packed
        self._rest = b""
        self._unzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._streams = 1

    def readable(self) -> bool:
        """As a file's."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """See `io.RawIOBase`; raises zlib.error for a wrong checksum."""
        view = memoryview(buffer).cast("B")
        while not self._unzip.eof or self._goes_on():
            packed = self._rest or self._unzip.unconsumed_tail or self._packed.read(_CHUNK)
            self._rest = b""
            data = self._unzip.decompress(packed, len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            if not packed and not self._unzip.eof:
                raise EOFError("the file ends before its end marker")
        return 0

    def _goes_on(self) -> bool:
        """Whether another stream follows, after optional zeros."""
        self._rest = self._unzip.unused_data.lstrip(b"\0")
        while not self._rest:
            packed = self._packed.read(_CHUNK)
            if not packed:
                return False
            self._rest = packed.lstrip(b"\0")
        self._streams += 1
        if self._streams > members.MAX_STREAMS:
            raise ReleaseError(f"{self._path} has more than {members.MAX_STREAMS} gzip streams: it is malicious")
        self._unzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
        return True


class _Limited:
    """A decompressed forward-only stream for tarfile, with limits."""

    def __init__(self, path: str, stream: io.BufferedReader) -> None:
        self._path = path
        self._stream = stream
        self._position = 0
        self._last = b""
        self._left: int | None = None
        self._headers = True
        self._records = 0

    def allow(self, size: int | None, headers: bool = True) -> None:
        """Set how many bytes may be read until the next call (None: any), and whether they are headers."""
        self._left = size
        self._headers = headers

    def read(self, size: int) -> bytes:
        """As a file's."""
        # tarfile reads the long names, extended headers and sparse maps of a member whole, at any size.
        if self._left is not None:
            self._left -= size
            if self._left < 0 or size < 0:
                raise ReleaseError(f"{self._path} has a gigantic header: it is malicious")
        self._last = self._stream.read(size)
        # tarfile's regular expressions take quadratic time (CVE-2024-6232, Pythons before the fix).
        if self._headers and re.search(rb"\d{256}", self._last):
            raise ReleaseError(f"{self._path} has an invalid header: it is malicious")
        self._records += self._last.count(b"\n") if self._headers else 0
        if self._records > members.MAX_RECORDS:
            raise ReleaseError(f"{self._path} has more than {members.MAX_RECORDS} extended headers: it is malicious")
        self._position += len(self._last)
        self._refuse_too_large(self._position)
        return self._last

    def seek(self, position: int) -> int:
        """As a file's."""
        # A negative size seeks back: tarfile would read the same member forever.
        if position < self._position:
            raise ReleaseError(f"{self._path} has a member of negative size: it is malicious")
        self._refuse_too_large(position)
        while self._position < position and (skipped := self._stream.read(min(position - self._position, _CHUNK))):
            self._position += len(skipped)
        return self._position

    def tell(self) -> int:
        """As a file's."""
        return self._position

    def check_end(self) -> None:
        """Check that the archive is complete: tarfile silently treats a damaged header as the end.

        Raises:
            ReleaseError: the end marker is missing.
            EOFError, zlib.error: the checksum is wrong or missing.
        """
        if self._last != bytes(tarfile.BLOCKSIZE):
            raise ReleaseError(f"{self._path} is damaged or truncated: it has no end marker; download it again")
        self._headers = False
        while self.read(2**20):  # zlib compares its checksum at the end
            pass

    def _refuse_too_large(self, position: int) -> None:
        if position > members.MAX_UNPACKED:
            raise ReleaseError(
                f"{self._path} unpacks to more than {members.MAX_UNPACKED // 2**30} GiB: too large for a release"
            )
