"""One release of a framework as text: a wheel, an sdist or a directory. Nothing of it is imported, run or unpacked.

What comes from an archive is treated as hostile. Only the source files and the metadata are read, into memory,
each up to a limit; no file is ever written. An archive whose names lead out of it, or that does not read to its
end, is refused as a whole: half an archive proves nothing about a release.
"""

from __future__ import annotations

import email.parser
import gzip
import importlib.util
import os
import posixpath
import stat
import tarfile
import zipfile
import zlib
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
            except (SyntaxError, UnicodeDecodeError) as error:
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
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise ReleaseError(f"{path} is damaged or truncated ({error}); get it again") from error
    except Unreadable as error:  # the metadata
        raise ReleaseError(str(error)) from error
    except OSError as error:
        raise ReleaseError(f"{path} cannot be read: {error}") from error
    raise ReleaseError(f"{path} is of an unknown kind; expected {KINDS}")


def _same(name: str, other: str) -> bool:
    return canonicalize_name(name) == canonicalize_name(other)


# ---------------------------------------------------------------------------------------- directories


def _directory(path: str) -> Release:
    base = Path(path)
    claims = versions.claims([str(base), str(base / "src")])
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
        # A link is followed: uv's environments consist of them. A device or a pipe would never end.
        state = os.stat(file)
        if not stat.S_ISREG(state.st_mode):
            raise Unreadable(f"{file} is no regular file")
        if state.st_size > MAX_FILE:
            raise Unreadable(_too_large(file, state.st_size))
        with open(file, "rb") as stream:
            return stream.read(MAX_FILE)
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error}") from error


# ------------------------------------------------------------------------------------------- archives


class _Files(dict[str, "bytes | None"]):
    """The files of an archive that matter, by name; None stands for a link, and for what hides a module's text."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: set[str] = set()
        self._bytes = 0

    def name(self, stated: str) -> str:
        """A member's name, normalised, if it stays within the archive."""
        parts = stated.split("/")
        if stated.startswith("/") or ".." in parts or "\\" in stated or "\0" in stated or ":" in parts[0]:
            raise ReleaseError(f"{self.path} has a member {stated!r}, which leads out of it: it is built to do harm")
        name = posixpath.normpath(stated)
        if name in self._seen:
            raise ReleaseError(f"{self.path} has the member {name!r} twice, so what an installer takes cannot be told")
        self._seen.add(name)
        if len(self._seen) > MAX_MEMBERS:
            raise ReleaseError(f"{self.path} has more than {MAX_MEMBERS} members: too many for a release")
        return name

    def make_room(self, name: str, size: int) -> None:
        """Called before ``size`` bytes of text are read."""
        if size > MAX_FILE:
            raise ReleaseError(f"{self.path}: {_too_large(name, size)}")
        self._bytes += size
        if self._bytes > MAX_TEXT:
            raise ReleaseError(f"{self.path} has more than {MAX_TEXT // 2**20} MiB of source: too much for a release")


def _in_memory(files: _Files, metadata: Iterable[str], roots: tuple[str, ...]) -> Release:
    path = files.path
    folders: dict[str, set[str]] = {}
    for name in files:
        # Each folder on the way is a name in the one above it.
        while name:
            folder, _, last = name.rstrip("/").rpartition("/")
            folders.setdefault(f"{folder}/" if folder else "", set()).add(last)
            name = folder

    def content(name: str) -> bytes:
        data = files[name]
        if data is None:
            raise Unreadable(f"{name} in {path} is a link, and links are not followed")
        return data

    claims = []
    for name in metadata:
        claims.append(_claim(content(name)))
    return Release(path, tuple(claims), roots, lambda folder: folders.get(folder, ()), content)


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
            if member.is_dir():
                continue
            name = files.name(member.filename)
            if _hides(name) or (_wanted(name) and stat.S_ISLNK(member.external_attr >> 16)):
                files[name] = None
            elif _wanted(name):
                files.make_room(name, member.file_size)
                try:
                    with archive.open(member) as stream:
                        # Never more than was stated; the checksum, which zipfile compares at the end, covers less.
                        files[name] = stream.read(member.file_size + 1)
                except (RuntimeError, NotImplementedError) as error:  # encrypted; an unknown compression
                    raise ReleaseError(f"{path}: {name} cannot be read: {error}") from error
    if path.lower().endswith(".zip"):
        return _sdist(files)
    metadata = [name for name in files if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
    if len(metadata) != 1:
        raise ReleaseError(f"{path} is no wheel: it has {len(metadata)} files *.dist-info/METADATA, expected 1")
    data = metadata[0].removesuffix(".dist-info/METADATA") + ".data/"
    return _in_memory(files, metadata, ("", f"{data}purelib/", f"{data}platlib/"))


def _tar(path: str) -> Release:
    files = _Files(path)
    with gzip.open(path) as unpacked:
        limited = _Limited(path, unpacked)
        with tarfile.open(fileobj=limited, mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                if not member.isdir():
                    _add(files, archive, member)
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

    def read(self, size: int) -> bytes:
        """As a file's."""
        # tarfile reads the long names and extended headers of a member whole, as large as they say they are.
        if not 0 <= size <= MAX_FILE:
            raise ReleaseError(f"{self._path} has a header of {size / 2**20:.0f} MiB: it is built to do harm")
        self._last = self._stream.read(size)
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
