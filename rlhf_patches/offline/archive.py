"""One release of a framework as text: a wheel, an sdist or a directory. Nothing of it is imported, run or unpacked.

What comes from an archive is treated as hostile. Only the source files and the metadata are read, into memory,
each up to a limit; no file is ever written. An archive whose names lead out of it, or that does not read to its
end, is refused as a whole: half an archive proves nothing about a release.
"""

from __future__ import annotations

import codecs
import email.parser
import functools
import importlib.util
import io
import itertools
import os
import posixpath
import re
import stat
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from packaging.utils import canonicalize_name

from ..definitions.patch import Guard
from ..guards import versions
from ..guards.sources import NotFound, Source, Unreadable
from ..guards.versions import MAX_METADATA, Finding, Verdict

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Beside each limit, in brackets, the most that was seen in the wheels of the frameworks that patches are for, and in
# some eighty others, torch's and transformers' among them.

MAX_FILE = 2 * 2**20
"""Bytes of one source file (1.3 MiB in torch, 0.2 MiB in a framework)."""
MAX_TEXT = 128 * 2**20
"""Bytes of all source and metadata of one archive together (52 MiB)."""
MAX_UNPACKED = 2**30
"""Bytes of a whole sdist, unpacked: it has to be decompressed from its beginning to find anything in it."""
MAX_MEMBERS = 30_000
"""Files and folders of one archive (15,586)."""
MAX_NAME = 4096
MAX_NAMES = 16 * 2**20
"""Characters of all members' names together (1 MiB)."""
MAX_DIRECTORY = 8 * 2**20
"""Bytes of a zip's directory (1.7 MiB): zipfile reads it whole, before it can be asked how many entries it has."""
MAX_HEADERS = 32 * 2**10
"""Bytes of headers before one member of an sdist: tarfile reads them whole, and keeps what they say."""
MAX_RECORDS = 10 * MAX_MEMBERS
"""Keys in all extended headers of an sdist together (setuptools writes one or two for a member)."""
MAX_GLOBALS = 100
"""Keys in its global headers, which tarfile copies for every member (git writes one)."""
MAX_STREAMS = 100
"""Compressed streams, one after the other, in an sdist (1)."""

KINDS = "a wheel (.whl), an sdist (.tar.gz, .tgz, .zip) or a directory"

# What frameworks are written in. Others take minutes for a few bytes (punycode), or give no text at all (hex).
_ENCODINGS = ("utf-8", "utf-8-sig", "iso8859-1", "ascii")

# Where a distribution keeps its packages, seen from its root; a wheel's data folders are added to these.
_FOLDERS = ("", "src/")


class ReleaseError(ValueError):
    """A file or directory is not a release that can be read; the message names it and says what is wrong."""


@dataclass(frozen=True)
class Release:
    """The source files of one release, and what its metadata says it is.

    Attributes:
        label: the path as it was given, for messages.
        claims: (distribution, version) of every piece of metadata found; empty for a bare checkout.
    """

    label: str
    claims: tuple[tuple[str, str | None], ...]
    _roots: tuple[str, ...]
    _names: Callable[[str], Iterable[str]]  # a folder -> the names in it
    _read: Callable[[str], bytes]

    def has_package(self, name: str) -> bool:
        """Whether there is a package or a module ``name`` at the top."""
        return any(found == name or found.startswith(f"{name}.") for root in self._roots for found in self._names(root))

    def source(self, module: str) -> Source:
        """The text of a module.

        Raises:
            NotFound: there is no such module.
            Unreadable: it is not there as text, or cannot be decoded.
            ReleaseError: it is in a directory, and a file or folder that is there cannot be read.
        """
        parent, _, last = module.replace(".", "/").rpartition("/")
        for root in self._roots:
            folder = f"{root}{parent}/" if parent else root
            names = set(self._names(folder))
            if last in names:
                package = f"{folder}{last}/"
                found = self._file(module, package, "__init__", set(self._names(package)))
                if found is not None:
                    return found
            found = self._file(module, folder, last, names)
            if found is not None:
                return found
        raise NotFound(f"there is no module {module} in {self.label}")

    def _file(self, module: str, folder: str, stem: str, names: set[str]) -> Source | None:
        # In the order of Python's own finder: an extension module hides the text that lies beside it.
        for name in names:
            if name.startswith(f"{stem}.") and name.endswith((".so", ".pyd")):
                raise Unreadable(f"module {module} is a compiled extension ({folder}{name} in {self.label})")
        path = f"{folder}{stem}.py"
        if f"{stem}.py" in names:
            try:
                text = _decode(self._read(path))
            except (SyntaxError, UnicodeError, LookupError) as error:
                raise Unreadable(
                    f"the source of {module} cannot be decoded: {error} ({path} in {self.label})"
                ) from error
            return Source(module, f"{self.label}/{path}", text)
        if f"{stem}.pyc" in names:
            raise Unreadable(f"module {module} is there as bytecode only ({folder}{stem}.pyc in {self.label})")
        return None

    def finding(self, guard: Guard) -> Finding:
        """What the version guard says of this release.

        Where another distribution counts that is not in it, nothing is known of that: what is found holds beside it.
        """
        found = self._finding(guard)
        if guard.beside is None or found.verdict is Verdict.OUTSIDE:
            return found
        if not any(_same(name, guard.beside.distribution) for name, _ in self.claims):
            return found._replace(reason=f"{found.reason}, beside {guard.beside}")
        return versions.beside(guard, found, self._finding(Guard(guard.beside.distribution, guard.beside.versions)))

    def _finding(self, guard: Guard) -> Finding:
        own = {version for name, version in self.claims if _same(name, guard.distribution)}
        if not own:
            return versions.unknown(f"{self.label} has no metadata of {guard.distribution}")
        if len(own) > 1:
            several = ", ".join(sorted(version or "no version" for version in own))
            return versions.unknown(f"{self.label} has metadata of several versions of {guard.distribution}: {several}")
        return versions.judge(guard, own.pop())


def open_release(path: str) -> Release:
    """Read a wheel, an sdist or a directory.

    A directory is the root of a checkout (packages in it or in its ``src``), an unpacked archive, or a
    site-packages folder.

    Raises:
        ReleaseError: it is none of these, is damaged, or is built to do harm.
    """
    name = path.lower()
    try:
        state = os.stat(path)
        if stat.S_ISDIR(state.st_mode):
            return _directory(path)
        if not stat.S_ISREG(state.st_mode):
            raise ReleaseError(f"{path} is no regular file; expected {KINDS}")
        if name.endswith((".whl", ".zip")):
            return _zip(path)
        if name.endswith((".tar.gz", ".tgz")):
            return _tar(path)
    except (ReleaseError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise ReleaseError(f"{path} does not exist; expected {KINDS}") from error
    except Unreadable as error:  # the metadata
        raise ReleaseError(str(error)) from error
    # Bad bytes show as anything: zipfile and tarfile let ValueError, struct.error, RecursionError and more through.
    except Exception as error:
        if isinstance(error, OSError):
            raise ReleaseError(f"{path} cannot be read: {error}") from error
        raise ReleaseError(f"{path} is damaged or truncated ({error}); get it again") from error
    raise ReleaseError(f"{path} is of an unknown kind; expected {KINDS}")


def _decode(data: bytes) -> str:
    # A text as Python decodes it. SyntaxError or UnicodeError where it does not, or where we do not let it; LookupError
    # for a codec that gives no text, from Python 3.14 on.
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    if codecs.lookup(encoding).name not in _ENCODINGS:
        raise SyntaxError(f"it is in the encoding {encoding!r}, expected UTF-8, Latin-1 or ASCII")
    return importlib.util.decode_source(data)


def _too_large(size: int, limit: int) -> str:
    return f"has {size / 2**20:.1f} MiB, more than the {limit / 2**20:.0f} MiB that such a file may have"


def _same(name: str, other: str) -> bool:
    return canonicalize_name(name) == canonicalize_name(other)


# ---------------------------------------------------------------------------------------- directories


def _directory(path: str) -> Release:
    def names(folder: str) -> list[str]:
        return _list(os.path.join(path, folder))

    def content(name: str) -> bytes:
        file = os.path.join(path, name)
        try:
            return _read_file(file, MAX_FILE)
        except OSError as error:
            raise ReleaseError(f"{file} cannot be read: {error}") from error

    claims = [
        claim
        for folder in _FOLDERS
        for name in names(folder)
        if _is_metadata(path, folder, name)
        for claim in _metadata(os.path.join(path, folder, name))
    ]
    if not claims:
        claims = _metadata(path, ("PKG-INFO",))
    return Release(path, tuple(dict.fromkeys(claims)), _FOLDERS, names, content)


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    # Nothing else counts as absent: what is there and cannot be read may be what is looked for.
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ReleaseError(f"{folder} cannot be read: {error}") from error


def _is_metadata(path: str, folder: str, name: str) -> bool:
    """As importlib.metadata, which the engine asks, sees it."""
    name = name.lower()
    in_egg = not folder and os.path.basename(os.path.normpath(path)).lower().endswith(".egg")
    return name.endswith((".dist-info", ".egg-info")) or (in_egg and name == "egg-info")


def _metadata(folder: str, files: tuple[str, ...] = ("METADATA", "PKG-INFO", "")) -> list[tuple[str, str | None]]:
    """What the first of these files that there is says; the folder may be a file itself."""
    for name in files:
        file = os.path.join(folder, name) if name else folder
        if os.path.isdir(file):
            continue
        try:
            data = _read_file(file, MAX_METADATA)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ReleaseError(f"{file} cannot be read: {error}") from error
        if data:
            try:
                data.decode()
            except UnicodeDecodeError:  # nothing, for the engine
                return []
            claim = _claim(data)
            return [claim] if claim[0] else []
    return []


def _read_file(file: str, limit: int) -> bytes:
    # A link is followed: uv's environments consist of them. A device or a pipe would never end.
    _check_regular(file, os.stat(file), limit)  # before it is opened: opening a device may do something
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        _check_regular(file, os.fstat(stream.fileno()), limit)
        data = stream.read(limit + 1)
    if data is None:  # of a file that would wait, as some of /proc
        raise Unreadable(f"{file} has nothing to read yet")
    if len(data) > limit:  # those of /proc state none
        raise Unreadable(f"{file} {_too_large(len(data), limit)}")
    return data


def _check_regular(file: str, state: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise Unreadable(f"{file} is no regular file")
    if state.st_size > limit:
        raise Unreadable(f"{file} {_too_large(state.st_size, limit)}")


# ------------------------------------------------------------------------------------------- archives


class _Files(dict[str, "bytes | str"]):
    """The files of an archive that matter, by name; text instead of bytes says why one is not read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: set[str] = set()
        self._members = 0
        self._characters = 0
        self._bytes = 0

    def name(self, stated: str) -> str:
        """A file's name, normalised, if it stays within the archive."""
        self.refuse_outside(stated)
        name = posixpath.normpath(stated)
        if name in self._seen:
            raise ReleaseError(f"{self.path} has the member {name!r} twice, so what an installer takes cannot be told")
        self._seen.add(name)
        self._characters += len(stated)
        if self._characters > MAX_NAMES:
            raise ReleaseError(f"{self.path} has names of more than {MAX_NAMES} characters: too many for a release")
        return name

    def refuse_outside(self, stated: str) -> None:
        """Raise where a member, a folder as well, leads out of the archive."""
        if len(stated) > MAX_NAME:
            raise ReleaseError(f"{self.path} has a member {stated[:40]!r}... with a name of {len(stated)} characters")
        parts = stated.split("/")
        if stated.startswith("/") or ".." in parts or "\\" in stated or "\0" in stated or ":" in parts[0]:
            raise ReleaseError(f"{self.path} has a member {stated!r}, which leads out of it: it is built to do harm")

    def count(self) -> None:
        """Called for every member, a folder as well."""
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise ReleaseError(f"{self.path} has more than {MAX_MEMBERS} members: too many for a release")

    def takes(self, name: str, size: int) -> bool:
        """Whether a file is one that matters, and is to be read; called before ``size`` bytes of it are."""
        if name.endswith((".so", ".pyd", ".pyc")):
            self[name] = "hides a module's text"
        elif name.endswith(".py") or posixpath.basename(name) in ("METADATA", "PKG-INFO"):
            limit = MAX_FILE if name.endswith(".py") else MAX_METADATA
            if size > limit:
                self[name] = _too_large(size, limit)
                return False
            self._bytes += size
            if self._bytes > MAX_TEXT:
                raise ReleaseError(
                    f"{self.path} has more than {MAX_TEXT // 2**20} MiB of source: too much for a release"
                )
            return True
        return False


def _in_memory(files: _Files, metadata: Iterable[str], roots: tuple[str, ...]) -> Release:
    def content(name: str) -> bytes:
        data = files[name]
        if isinstance(data, str):
            raise Unreadable(f"{name} in {files.path} {data}")
        return data

    @functools.cache
    def names(folder: str) -> set[str]:
        # A package that is a link would otherwise count as not there.
        for parent in itertools.accumulate(folder.split("/")[:-1], "{}/{}".format):
            if parent in files:
                content(parent)
        return {name[len(folder) :].partition("/")[0] for name in files if name.startswith(folder)}

    return Release(files.path, tuple(_claim(content(name)) for name in metadata), roots, names, content)


def _claim(metadata: bytes) -> tuple[str, str | None]:
    fields = email.parser.BytesHeaderParser().parsebytes(metadata)
    return str(fields["Name"] or ""), str(fields["Version"]) if fields["Version"] else None


_LINK = "is a link, and links are not followed"


class _Directory(io.BufferedReader):
    """What zipfile reads from. While it opens the archive, it reads no directory that no release has."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self._path = path
        self.opening = True

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file's."""
        if self.opening and size is not None and size > MAX_DIRECTORY:
            raise ReleaseError(f"{self._path} has a directory of {size / 2**20:.0f} MiB: too large for a release")
        data = super().read(size)
        # Every entry begins with this, whatever number of entries is stated.
        if self.opening and data.count(b"PK\1\2") > MAX_MEMBERS:
            raise ReleaseError(f"{self._path} has more than {MAX_MEMBERS} members: too many for a release")
        return data


def _zip(path: str) -> Release:
    files = _Files(path)
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
                    files[name] = _LINK
                    continue
                with archive.open(member) as text:
                    # Never more than was stated; zipfile compares the checksum at the end.
                    files[name] = text.read(member.file_size + 1)
    if path.lower().endswith(".zip"):
        return _sdist(files)
    metadata = [name for name in files if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
    if len(metadata) != 1:
        raise ReleaseError(f"{path} is no wheel: it has {len(metadata)} files *.dist-info/METADATA, expected 1")
    data = metadata[0].removesuffix(".dist-info/METADATA") + ".data/"
    return _in_memory(files, metadata, ("", f"{data}purelib/", f"{data}platlib/"))


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


def _tar(path: str) -> Release:
    files = _Files(path)
    with open(path, "rb") as packed:
        limited = _Limited(path, io.BufferedReader(_Gunzip(path, packed), _CHUNK))
        limited.allow(MAX_HEADERS)
        with tarfile.open(fileobj=limited, mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                archive.members = []  # tarfile keeps them all, with their headers
                files.count()
                if len(archive.pax_headers) > MAX_GLOBALS:
                    raise ReleaseError(f"{path} has more than {MAX_GLOBALS} global headers: it is built to do harm")
                if member.size < 0:
                    raise ReleaseError(f"{path}: {member.name!r} has a negative size: it is built to do harm")
                if member.isdir():
                    files.refuse_outside(member.name)
                else:
                    limited.allow(member.size + 1024, headers=False)
                    _add(files, archive, member)
                limited.allow(MAX_HEADERS)
            limited.allow(None)
            limited.check_end()
    return _sdist(files)


def _add(files: _Files, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    name = files.name(member.name)
    if member.issym() or member.islnk():
        _check_link(files.path, name, member)
        files[name] = _LINK
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


def _sdist(files: _Files) -> Release:
    tops = {name.partition("/")[0] for name in files}
    metadata = [name for name in files if name.endswith("/PKG-INFO") and name.count("/") == 1]
    if len(tops) != 1 or len(metadata) != 1:
        raise ReleaseError(
            f"{files.path} is no sdist: expected one folder with a PKG-INFO in it, found {len(tops)} folders with "
            f"source and {len(metadata)} PKG-INFO. If it is an archive of a checkout, unpack it and give the directory"
        )
    top = tops.pop()
    return _in_memory(files, metadata, tuple(f"{top}/{folder}" for folder in _FOLDERS))


_CHUNK = 2**18


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
        if self._streams > MAX_STREAMS:
            raise ReleaseError(f"{self._path} has more than {MAX_STREAMS} gzip streams: it is built to do harm")
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
        if self._records > MAX_RECORDS:
            raise ReleaseError(f"{self._path} has more than {MAX_RECORDS} extended headers: it is built to do harm")
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
        if position > MAX_UNPACKED:
            raise ReleaseError(
                f"{self._path} unpacks to more than {MAX_UNPACKED // 2**30} GiB: too large for a release"
            )
