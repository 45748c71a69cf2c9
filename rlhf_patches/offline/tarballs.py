"""An sdist, read as a stream that only goes forward."""

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
    """The files of an sdist that matter."""
    files = Files(path)
    with open(path, "rb") as packed:
        limited = _Limited(path, io.BufferedReader(_Gunzip(path, packed), _CHUNK))
        limited.allow(members.MAX_HEADERS)
        with tarfile.open(fileobj=limited, mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                archive.members = []  # tarfile keeps them all, with their headers
                files.count()
                if len(archive.pax_headers) > members.MAX_GLOBALS:
                    raise ReleaseError(
                        f"{path} has more than {members.MAX_GLOBALS} global headers: it is built to do harm"
                    )
                if member.size < 0:
                    raise ReleaseError(f"{path}: {member.name!r} has a negative size: it is built to do harm")
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
        raise ReleaseError(f"{files.path}: {name} is a device, a pipe or a sparse file, which no release has")
    elif files.takes(name, member.size):
        stream = archive.extractfile(member)
        assert stream is not None
        files[name] = stream.read()


def _check_link(path: str, name: str, member: tarfile.TarInfo) -> None:
    # A symbolic link's target counts from the link's folder, a hard link's from the archive's root.
    base = posixpath.dirname(name) if member.issym() else ""
    target = posixpath.normpath(posixpath.join(base, member.linkname))
    if target.startswith(("/", "../")) or target == "..":
        raise ReleaseError(
            f"{path}: {name} is a link to {member.linkname!r}, out of the archive: it is built to do harm"
        )


class _Gunzip(io.RawIOBase):
    """A gzip file, unpacked. Python's own reads the name in its header byte by byte, however long it is."""

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
        """As a file's; an error of zlib's if a checksum is wrong."""
        view = memoryview(buffer).cast("B")
        while not self._unzip.eof or self._goes_on():
            packed = self._rest or self._unzip.unconsumed_tail or self._packed.read(_CHUNK)
            self._rest = b""
            data = self._unzip.decompress(packed, len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            if not packed and not self._unzip.eof:
                raise EOFError("it ends before its end marker")
        return 0

    def _goes_on(self) -> bool:
        """Whether another stream follows; zeros may."""
        self._rest = self._unzip.unused_data.lstrip(b"\0")
        while not self._rest:
            packed = self._packed.read(_CHUNK)
            if not packed:
                return False
            self._rest = packed.lstrip(b"\0")
        self._streams += 1
        if self._streams > members.MAX_STREAMS:
            raise ReleaseError(f"{self._path} has more than {members.MAX_STREAMS} gzip streams: it is built to do harm")
        self._unzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
        return True


class _Limited:
    """What tarfile reads from: a decompressed stream that only goes forward, and not for ever."""

    def __init__(self, path: str, stream: io.BufferedReader) -> None:
        self._path = path
        self._stream = stream
        self._position = 0
        self._last = b""
        self._left: int | None = None
        self._headers = True
        self._records = 0

    def allow(self, size: int | None, headers: bool = True) -> None:
        """How many bytes may be read until the next call (None: any), and whether they are headers."""
        self._left = size
        self._headers = headers

    def read(self, size: int) -> bytes:
        """As a file's."""
        # tarfile reads the long names, extended headers and sparse maps of a member whole, however large.
        if self._left is not None:
            self._left -= size
            if self._left < 0 or size < 0:
                raise ReleaseError(f"{self._path} has a gigantic header: it is built to do harm")
        self._last = self._stream.read(size)
        # tarfile's regular expressions take the square of the time (CVE-2024-6232, Pythons before the fix).
        if self._headers and re.search(rb"\d{256}", self._last):
            raise ReleaseError(f"{self._path} has a header that is no header: it is built to do harm")
        self._records += self._last.count(b"\n") if self._headers else 0
        if self._records > members.MAX_RECORDS:
            raise ReleaseError(
                f"{self._path} has more than {members.MAX_RECORDS} extended headers: it is built to do harm"
            )
        self._position += len(self._last)
        self._refuse_too_large(self._position)
        return self._last

    def seek(self, position: int) -> int:
        """As a file's."""
        # A negative size leads back, and would have tarfile read the same member for ever.
        if position < self._position:
            raise ReleaseError(f"{self._path} has a member of negative size: it is built to do harm")
        self._refuse_too_large(position)
        while self._position < position and (skipped := self._stream.read(min(position - self._position, _CHUNK))):
            self._position += len(skipped)
        return self._position

    def tell(self) -> int:
        """As a file's."""
        return self._position

    def check_end(self) -> None:
        """Check that the archive is whole: tarfile takes a damaged header for the end, without a word.

        Raises:
            ReleaseError: what was read last is no end marker.
            EOFError, zlib.error: the checksum is wrong, or there is none.
        """
        if self._last != bytes(tarfile.BLOCKSIZE):
            raise ReleaseError(f"{self._path} is damaged or truncated: it has no end marker; get it again")
        self._headers = False
        while self.read(2**20):  # zlib compares its checksum at the end
            pass

    def _refuse_too_large(self, position: int) -> None:
        if position > members.MAX_UNPACKED:
            raise ReleaseError(
                f"{self._path} unpacks to more than {members.MAX_UNPACKED // 2**30} GiB: too large for a release"
            )
