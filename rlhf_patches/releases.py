"""One release of a framework as text: a wheel, an sdist or a directory. Nothing of it is imported, run or unpacked.

What comes from an archive is treated as hostile. Only the source files and the metadata are read, into memory,
each up to a limit; no file is ever written. An archive whose names lead out of it, or that does not read to its
end, is refused as a whole: half an archive proves nothing about a release.
"""

from __future__ import annotations

import email.parser
import gzip
import importlib.util
import itertools
import os
import posixpath
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from . import versions
from .sources import NotFound, Source, Unreadable
from .versions import Finding
from .vocabulary import Guard

MAX_FILE = 16 * 2**20
"""Bytes of one source or metadata file. The largest module of any framework read so far has 0.5 MiB."""
MAX_TEXT = 256 * 2**20
"""Bytes of all such files of one archive together."""
MAX_UNPACKED = 2 * 2**30
"""Bytes of a whole sdist, unpacked: it has to be decompressed from its beginning to find anything in it."""
MAX_MEMBERS = 200_000
MAX_NAME = 4096
MAX_HEADERS = 64 * 2**10
"""Bytes of headers before one member of an sdist: tarfile reads them whole, and keeps what they say."""

KINDS = "a wheel (.whl), an sdist (.tar.gz, .tgz, .zip) or a directory"

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

    def source(self, module: str) -> Source:
        """The text of a module.

        Raises:
            NotFound: there is no such module.
            Unreadable: it is not there as text, or cannot be decoded.
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
                text = importlib.util.decode_source(self._read(path))
            except (SyntaxError, UnicodeError, LookupError) as error:  # LookupError: a codec that gives no text
                raise Unreadable(
                    f"the source of {module} cannot be decoded: {error} ({path} in {self.label})"
                ) from error
            return Source(module, f"{self.label}/{path}", text)
        if f"{stem}.pyc" in names:
            raise Unreadable(f"module {module} is there as bytecode only ({folder}{stem}.pyc in {self.label})")
        return None

    def finding(self, guard: Guard) -> Finding:
        """What the version guard says of this release."""
        own = {version for name, version in self.claims if _same(name, guard.distribution)}
        if not own:
            return versions.unknown(f"{self.label} has no metadata of {guard.distribution}")
        if len(own) > 1:
            several = ", ".join(sorted(version or "no version" for version in own))
            return versions.unknown(f"{self.label} has metadata of several versions of {guard.distribution}: {several}")
        return versions.judge(guard, own.pop())


def read(path: str) -> Release:
    """Read a wheel, an sdist or a directory.

    A directory is the root of a checkout (packages in it or in its ``src``), an unpacked archive, or a
    site-packages folder.

    Raises:
        ReleaseError: it is none of these, is damaged, or is built to do harm.
    """
    if not os.path.exists(path):
        raise ReleaseError(f"{path} does not exist; expected {KINDS}")
    if not os.path.isdir(path) and not os.path.isfile(path):
        raise ReleaseError(f"{path} is no regular file; expected {KINDS}")
    name = path.lower()
    try:
        if os.path.isdir(path):
            return _directory(path)
        if name.endswith((".whl", ".zip")):
            return _zip(path)
        if name.endswith((".tar.gz", ".tgz")):
            return _tar(path)
    except ReleaseError:
        raise
    except Unreadable as error:  # the metadata
        raise ReleaseError(str(error)) from error
    # Bad bytes show as anything: zipfile and tarfile let ValueError, struct.error, RecursionError and more through.
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise ReleaseError(f"{path} cannot be read: {error}") from error
        raise ReleaseError(f"{path} is damaged or truncated ({error}); get it again") from error
    raise ReleaseError(f"{path} is of an unknown kind; expected {KINDS}")


def _same(name: str, other: str) -> bool:
    return canonicalize_name(name) == canonicalize_name(other)


# ---------------------------------------------------------------------------------------- directories


def _directory(path: str) -> Release:
    base = Path(path)
    folders = [folder for folder in (base, base / "src") if folder.is_dir()]
    for folder in folders:
        for pattern in ("*.dist-info/METADATA", "*.egg-info/PKG-INFO", "*.egg-info"):
            for metadata in folder.glob(pattern):
                if metadata.exists() and not metadata.is_dir():
                    _check_file(str(metadata))  # importlib.metadata would read a pipe or a device for ever
    claims = versions.claims([str(folder) for folder in folders])
    if not claims and (base / "PKG-INFO").is_file():
        claims = [_claim(_read_file(str(base), "PKG-INFO"))]

    def names(folder: str) -> list[str]:
        try:
            return os.listdir(base / folder)
        except OSError:
            return []

    return Release(path, tuple(dict.fromkeys(claims)), _FOLDERS, names, lambda name: _read_file(path, name))


def _read_file(base: str, name: str) -> bytes:
    file = os.path.join(base, name)
    try:
        _check_file(file)
        with open(file, "rb") as stream:
            return stream.read(MAX_FILE)
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error}") from error


def _check_file(file: str) -> None:
    # A link is followed: uv's environments consist of them. A device or a pipe would never end.
    state = os.stat(file)
    if not stat.S_ISREG(state.st_mode):
        raise Unreadable(f"{file} is no regular file")
    if state.st_size > MAX_FILE:
        raise Unreadable(_too_large(file, state.st_size))


# ------------------------------------------------------------------------------------------- archives


class _Files(dict[str, "bytes | None"]):
    """The files of an archive that matter, by name; None stands for a link, and for what hides a module's text."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: set[str] = set()
        self._members = 0
        self._bytes = 0

    def name(self, stated: str) -> str:
        """A member's name, normalised, if it stays within the archive."""
        if len(stated) > MAX_NAME:
            raise ReleaseError(f"{self.path} has a member {stated[:40]!r}... with a name of {len(stated)} characters")
        parts = stated.split("/")
        if stated.startswith("/") or ".." in parts or "\\" in stated or "\0" in stated or ":" in parts[0]:
            raise ReleaseError(f"{self.path} has a member {stated!r}, which leads out of it: it is built to do harm")
        name = posixpath.normpath(stated)
        if name in self._seen:
            raise ReleaseError(f"{self.path} has the member {name!r} twice, so what an installer takes cannot be told")
        self._seen.add(name)
        return name

    def count(self) -> None:
        """Called for every member, a folder as well."""
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise ReleaseError(f"{self.path} has more than {MAX_MEMBERS} members: too many for a release")

    def make_room(self, name: str, size: int) -> None:
        """Called before ``size`` bytes of text are read."""
        if size > MAX_FILE:
            raise ReleaseError(f"{self.path}: {_too_large(name, size)}")
        self._bytes += size
        if self._bytes > MAX_TEXT:
            raise ReleaseError(f"{self.path} has more than {MAX_TEXT // 2**20} MiB of source: too much for a release")


def _in_memory(files: _Files, metadata: Iterable[str], roots: tuple[str, ...]) -> Release:
    def content(name: str) -> bytes:
        data = files[name]
        if data is None:
            raise Unreadable(f"{name} in {files.path} is a link, and links are not followed")
        return data

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


def _too_large(name: str, size: int) -> str:
    return f"{name} has {size / 2**20:.0f} MiB, more than the {MAX_FILE / 2**20:.0f} MiB that a source file may have"


def _wanted(name: str) -> bool:
    return name.endswith(".py") or posixpath.basename(name) in ("METADATA", "PKG-INFO")


def _hides(name: str) -> bool:
    """Whether a file stands in for a module's text without being text."""
    return name.endswith((".so", ".pyd", ".pyc"))


def _zip(path: str) -> Release:
    files = _Files(path)
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            files.count()
            _check_entry(path, archive, member)
            if member.is_dir():
                continue
            # Not `filename`, which zipfile cuts at a NUL.
            name = files.name(member.orig_filename)
            if _hides(name) or (_wanted(name) and stat.S_ISLNK(member.external_attr >> 16)):
                files[name] = None
            elif _wanted(name):
                files.make_room(name, member.file_size)
                with archive.open(member) as stream:
                    # Never more than was stated; zipfile compares the checksum at the end.
                    files[name] = stream.read(member.file_size + 1)
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
    with gzip.open(path) as unpacked:
        limited = _Limited(path, unpacked)
        limited.allow(MAX_HEADERS)
        with tarfile.open(fileobj=limited, mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                archive.members = []  # tarfile keeps them all, with their headers
                files.count()
                if member.size < 0:
                    raise ReleaseError(f"{path}: {member.name!r} has a negative size: it is built to do harm")
                if not member.isdir():
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
        files[name] = None
    elif not member.isreg() or member.issparse():
        raise ReleaseError(f"{files.path}: {name} is a device, a pipe or a sparse file, which no release has")
    elif _hides(name):
        files[name] = None
    elif _wanted(name):
        files.make_room(name, member.size)
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


class _Limited:
    """What tarfile reads from: a decompressed stream that only goes forward, and not for ever."""

    def __init__(self, path: str, stream: gzip.GzipFile) -> None:
        self._path = path
        self._stream = stream
        self._last = b""
        self._left: int | None = None
        self._headers = True

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
        self._check(self._stream.tell())
        return self._last

    def seek(self, position: int) -> int:
        """As a file's."""
        # A negative size leads back, and would have tarfile read the same member for ever.
        if position < self._stream.tell():
            raise ReleaseError(f"{self._path} has a member of negative size: it is built to do harm")
        self._check(position)
        return self._stream.seek(position)

    def tell(self) -> int:
        """As a file's."""
        return self._stream.tell()

    def check_end(self) -> None:
        """Check that the archive is whole: tarfile takes a damaged header for the end, without a word.

        Raises:
            ReleaseError: what was read last is no end marker.
            EOFError, OSError: the checksum is wrong, or there is none.
        """
        if self._last != bytes(tarfile.BLOCKSIZE):
            raise ReleaseError(f"{self._path} is damaged or truncated: it has no end marker; get it again")
        while self.read(2**20):  # gzip compares its checksum at the end
            pass

    def _check(self, position: int) -> None:
        if position > MAX_UNPACKED:
            raise ReleaseError(
                f"{self._path} unpacks to more than {MAX_UNPACKED // 2**30} GiB: too large for a release"
            )
