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

# What frameworks are written in. Others take minutes for a few bytes (punycode), or give no text at all (hex).
_ENCODINGS = ("utf-8", "utf-8-sig", "iso8859-1", "ascii")

# Where a distribution keeps its packages, seen from its root; a wheel's data folders are added to these.
_FOLDERS = ("", "src/")


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
        if guard.co_installed is None or found.verdict is Verdict.OUTSIDE:
            return found
        if not any(_same(name, guard.co_installed.distribution) for name, _ in self.claims):
            return found._replace(reason=f"{found.reason}, beside {guard.co_installed}")
        return versions.beside(
            guard, found, self._finding(Guard(guard.co_installed.distribution, guard.co_installed.versions))
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
            return _zip(path, zips.read(path))
        if name.endswith((".tar.gz", ".tgz")):
            return _sdist(tarballs.read(path))
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
        raise Unreadable(f"{file} {too_large(len(data), limit)}")
    return data


def _check_regular(file: str, state: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise Unreadable(f"{file} is no regular file")
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
        # A package that is a link would otherwise count as not there.
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
        raise ReleaseError(f"{path} is no wheel: it has {len(metadata)} files *.dist-info/METADATA, expected 1")
    data = metadata[0].removesuffix(".dist-info/METADATA") + ".data/"
    return _in_memory(files, metadata, ("", f"{data}purelib/", f"{data}platlib/"))


def _sdist(files: Files) -> Release:
    tops = {name.partition("/")[0] for name in files}
    metadata = [name for name in files if name.endswith("/PKG-INFO") and name.count("/") == 1]
    if len(tops) != 1 or len(metadata) != 1:
        raise ReleaseError(
            f"{files.path} is no sdist: expected one folder with a PKG-INFO in it, found {len(tops)} folders with "
            f"source and {len(metadata)} PKG-INFO. If it is an archive of a checkout, unpack it and give the directory"
        )
    top = tops.pop()
    return _in_memory(files, metadata, tuple(f"{top}/{folder}" for folder in _FOLDERS))
