"""The text of one release of a framework: a wheel, an sdist or a directory. Nothing is imported, run or unpacked.

Archives are treated as hostile. Only source files and metadata are read, into memory, each up to a limit; no file is
written. An archive with names that lead out of it, or that cannot be read to its end, is refused as a whole: a part of
an archive proves nothing about a release.
"""

from __future__ import annotations

import codecs
import email.parser
import functools
import importlib.util
import io
import itertools
import os
import stat
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from ..definitions.guard import Guard
from ..guards import versions
from ..guards.places import NotFound, Source, Unreadable
from ..guards.versions import MAX_METADATA, Finding, Verdict
from . import members, tarballs, zips
from .members import Files, ReleaseError, too_large

KINDS = "a wheel (.whl), an sdist (.tar.gz, .tgz, .zip) or a directory"

# Encodings of frameworks' source. Others take minutes for a few bytes (punycode), or give no text (hex).
_ENCODINGS = ("utf-8", "utf-8-sig", "iso8859-1", "ascii")

# The folders of packages, relative to the root; a wheel's data folders are added.
_FOLDERS = ("", "src/")


@dataclass(frozen=True)
class Release:
    """The source files of one release, and the distributions in its metadata.

    Attributes:
        label: the given path, for messages.
        claims: (distribution, version) of all metadata; empty for a bare checkout.
    """

    label: str
    claims: tuple[tuple[str, str | None], ...]
    _roots: tuple[str, ...]
    _names: Callable[[str], Iterable[str]]  # a folder -> the names in it
    _read: Callable[[str], bytes]

    def has_package(self, name: str) -> bool:
        """Whether the release has a top-level package or module ``name``."""
        names = (existing for root in self._roots for existing in self._names(root))
        return any(existing == name or existing.startswith(f"{name}.") for existing in names)

    def source(self, module: str) -> Source:
        """The text of a module.

        Raises:
            NotFound: there is no such module.
            Unreadable: the module has no source text, or it cannot be decoded.
            ReleaseError: the release is a directory, and an existing file or folder cannot be read.
        """
        parent, _, last = module.replace(".", "/").rpartition("/")
        for root in self._roots:
            folder = f"{root}{parent}/" if parent else root
            names = set(self._names(folder))
            if last in names:
                package = f"{folder}{last}/"
                source = self._file(module, package, "__init__", set(self._names(package)))
                if source is not None:
                    return source
            source = self._file(module, folder, last, names)
            if source is not None:
                return source
        raise NotFound(f"there is no module {module} in {self.label}")

    def _file(self, module: str, folder: str, stem: str, names: set[str]) -> Source | None:
        # In the order of Python's own finder: an extension module takes precedence over a source file.
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
            raise Unreadable(f"module {module} exists as bytecode only ({folder}{stem}.pyc in {self.label})")
        return None

    def finding(self, guard: Guard) -> Finding:
        """The version guard's finding for this release.

        If the guard requires another distribution that is not in the release, the finding holds with that distribution.
        """
        own_finding = self._finding(guard)
        if guard.co_installed is None or own_finding.verdict is Verdict.OUTSIDE:
            return own_finding
        if not any(_same(name, guard.co_installed.distribution) for name, _ in self.claims):
            return own_finding._replace(reason=f"{own_finding.reason}, with {guard.co_installed}")
        return versions.beside(
            guard, own_finding, self._finding(Guard(guard.co_installed.distribution, guard.co_installed.versions))
        )

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
        ReleaseError: the path is none of these, damaged, or malicious.
    """
    name = path.lower()
    try:
        state = os.stat(path)
        if stat.S_ISDIR(state.st_mode):
            return _directory(path)
        if not stat.S_ISREG(state.st_mode):
            raise ReleaseError(f"{path} is not a regular file; expected {KINDS}")
        if name.endswith((".whl", ".zip")):
            return _zip(path, zips.read(path))
        if name.endswith((".tar.gz", ".tgz")):
            return _sdist(tarballs.read(path))
    except (ReleaseError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise ReleaseError(f"{path} does not exist; expected {KINDS}") from error
    except Unreadable as error:  # the metadata
        raise ReleaseError(str(error)) from error
    # Bad bytes raise many exceptions: zipfile and tarfile pass on ValueError, struct.error, RecursionError and more.
    except Exception as error:
        if isinstance(error, OSError):
            raise ReleaseError(f"{path} cannot be read: {error}") from error
        raise ReleaseError(f"{path} is damaged or truncated ({error}); download it again") from error
    raise ReleaseError(f"{path} has an unknown type; expected {KINDS}")


def _decode(data: bytes) -> str:
    # Decode like Python. Raises SyntaxError or UnicodeError if Python cannot decode the text or the encoding is not
    # allowed; LookupError for a codec that gives no text, from Python 3.14 on.
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    if codecs.lookup(encoding).name not in _ENCODINGS:
        raise SyntaxError(f"its encoding is {encoding!r}, expected UTF-8, Latin-1 or ASCII")
    return importlib.util.decode_source(data)


def _same(name: str, other: str) -> bool:
    return canonicalize_name(name) == canonicalize_name(other)


# ---------------------------------------------------------------------------------------- directories


def _directory(path: str) -> Release:
    def names(folder: str) -> list[str]:
        return _list(os.path.join(path, folder))

    def content(name: str) -> bytes:
        file = os.path.join(path, name)
        try:
            return _read_file(file, members.MAX_FILE)
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
    # Only missing files count as absent: an unreadable file may be the wanted one.
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ReleaseError(f"{folder} cannot be read: {error}") from error


def _is_metadata(path: str, folder: str, name: str) -> bool:
    """Whether importlib.metadata, which the engine uses, takes the path for metadata."""
    name = name.lower()
    in_egg = not folder and os.path.basename(os.path.normpath(path)).lower().endswith(".egg")
    return name.endswith((".dist-info", ".egg-info")) or (in_egg and name == "egg-info")


def _metadata(folder: str, files: tuple[str, ...] = ("METADATA", "PKG-INFO", "")) -> list[tuple[str, str | None]]:
    """Name and version in the first existing one of these files; the folder may be a file itself."""
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
            except UnicodeDecodeError:  # no metadata, for the engine
                return []
            claim = _claim(data)
            return [claim] if claim[0] else []
    return []


def _read_file(file: str, limit: int) -> bytes:
    # Links are followed: uv's environments consist of them. A device or a pipe may never end.
    _check_regular(file, os.stat(file), limit)  # before opening: opening a device may have an effect
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        _check_regular(file, os.fstat(stream.fileno()), limit)
        data = stream.read(limit + 1)
    if data is None:  # a file whose read would block, as some of /proc
        raise Unreadable(f"{file} has no data yet")
    if len(data) > limit:  # files of /proc state no size
        raise Unreadable(f"{file} {too_large(len(data), limit)}")
    return data


def _check_regular(file: str, state: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise Unreadable(f"{file} is not a regular file")
    if state.st_size > limit:
        raise Unreadable(f"{file} {too_large(state.st_size, limit)}")


# ------------------------------------------------------------------------------------------- archives


def _in_memory(files: Files, metadata: Iterable[str], roots: tuple[str, ...]) -> Release:
    def content(name: str) -> bytes:
        data = files[name]
        if isinstance(data, str):
            raise Unreadable(f"{name} in {files.path} {data}")
        return data

    @functools.cache
    def names(folder: str) -> set[str]:
        # Otherwise a package that is a link would count as absent.
        for parent in itertools.accumulate(folder.split("/")[:-1], "{}/{}".format):
            if parent in files:
                content(parent)
        return {name[len(folder) :].partition("/")[0] for name in files if name.startswith(folder)}

    return Release(files.path, tuple(_claim(content(name)) for name in metadata), roots, names, content)


def _claim(metadata: bytes) -> tuple[str, str | None]:
    fields = email.parser.BytesHeaderParser().parsebytes(metadata)
    return str(fields["Name"] or ""), str(fields["Version"]) if fields["Version"] else None


def _zip(path: str, files: Files) -> Release:
    if path.lower().endswith(".zip"):
        return _sdist(files)
    metadata = [name for name in files if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
    if len(metadata) != 1:
        raise ReleaseError(f"{path} is not a wheel: it has {len(metadata)} files *.dist-info/METADATA, expected 1")
    data = metadata[0].removesuffix(".dist-info/METADATA") + ".data/"
    return _in_memory(files, metadata, ("", f"{data}purelib/", f"{data}platlib/"))


def _sdist(files: Files) -> Release:
    tops = {name.partition("/")[0] for name in files}
    metadata = [name for name in files if name.endswith("/PKG-INFO") and name.count("/") == 1]
    if len(tops) != 1 or len(metadata) != 1:
        raise ReleaseError(
            f"{files.path} is not an sdist: expected one folder with a PKG-INFO, but it has {len(tops)} folders with "
            f"source and {len(metadata)} PKG-INFO. If it is an archive of a checkout, unpack it and give the directory"
        )
    top = tops.pop()
    return _in_memory(files, metadata, tuple(f"{top}/{folder}" for folder in _FOLDERS))
