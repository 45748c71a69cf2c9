"""Wheels, sdists and directories for tests of ``check``: well made, and badly."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

TEXT = "def add(a, b):\n    return a - b\n"
FILES = {"slime/__init__.py": "", "slime/deep/mod.py": TEXT}  # deep is a namespace package
METADATA = "Metadata-Version: 2.1\nName: slime\nVersion: 1.5\n"


# ------------------------------------------------------------------------------------------- making releases


Files = Mapping[Any, str | bytes]


def encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def make_zip(path: Path, files: Files, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """``files`` maps names, or ZipInfo objects, to contents."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, text in files.items():
            archive.writestr(name, encoded(text))
    return path


def make_wheel(folder: Path, files: Files, metadata: str | bytes = METADATA, **more: Any) -> Path:
    everything = {"slime-1.5.dist-info/METADATA": metadata, **files}
    return make_zip(folder / "slime-1.5-py3-none-any.whl", everything, **more)


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    """One tar header; unlike tarfile's own, of a size that need not be true."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, abs(size)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if size < 0:
        block[124:136] = vars(tarfile)["itn"](size, 12, tarfile.GNU_FORMAT)
        block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:512]) + 8 * 32)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def member(name: str, text: str | bytes = b"") -> bytes:
    return header(name, len(encoded(text))) + padded(encoded(text))


def extended(data: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("extended", len(data), kind) + padded(data)


def record(key: bytes, value: bytes) -> bytes:
    """One record of a PAX header: its length, which counts itself, key and value."""
    size = len(key) + len(value) + 3
    while len(str(size)) + len(key) + len(value) + 3 != size:
        size = len(str(size)) + len(key) + len(value) + 3
    return b"%d %s=%s\n" % (size, key, value)


END = bytes(1024)
WHOLE = member("slime-1.5/PKG-INFO", METADATA) + b"".join(member(f"slime-1.5/{n}", t) for n, t in FILES.items())


def make_tar(folder: Path, *blocks: bytes, name: str = "slime-1.5.tar.gz", level: int = 6) -> Path:
    path = folder / name
    with gzip.GzipFile(path, "wb", level, mtime=0) as stream:
        for block in blocks:
            stream.write(block)
    return path


def make_directory(folder: Path, files: Files) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(text))
    return folder


def old_sparse(blocks: int) -> bytes:
    """A sparse file of GNU tar whose map goes on for so many blocks."""
    first = bytearray(header("slime-1.5/x", 0, tarfile.GNUTYPE_SPARSE))
    first[482] = 1
    first[148:156] = b"%06o\0 " % (sum(first[:148]) + sum(first[156:512]) + 8 * 32)
    return bytes(first) + (b"00000000001\0" * 42 + b"\1" + bytes(7)) * blocks


MIB = 2**20
BAD_HEADERS: dict[str, Callable[[], bytes]] = {
    "long name": lambda: extended(b"a" * 40 * MIB, tarfile.GNUTYPE_LONGNAME) + member("x"),
    "long link": lambda: extended(b"a" * 40 * MIB, tarfile.GNUTYPE_LONGLINK) + member("x"),
    "pax": lambda: extended(record(b"comment", b"a" * 40 * MIB)) + member("slime-1.5/x"),
    "pax, every member": lambda: b"".join(
        extended(record(b"comment", b"a" * 15 * MIB)) + member(f"slime-1.5/{n}") for n in range(3)
    ),
    "global pax, copied for every member": lambda: (
        extended(b"".join(record(b"%x" % n, b"") for n in range(200_000)), tarfile.XGLTYPE)
        + b"".join(member(f"slime-1.5/{n}") for n in range(100))
    ),
    "many headers before one member": lambda: extended(record(b"comment", b"x")) * 2000 + member("slime-1.5/x"),
    "many long names before one member": lambda: (
        extended(b"slime-1.5/x\0", tarfile.GNUTYPE_LONGNAME) * 2000 + member("x")
    ),
    "digits, which tarfile's regular expressions try again and again": lambda: (
        extended(b"1" * 60_000) + member("slime-1.5/x")
    ),
    "sparse map": lambda: old_sparse(200_000),
    "promised": lambda: header("x", 2**40, tarfile.GNUTYPE_LONGNAME) + member("slime-1.5/x"),
}


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test runs in an empty folder, which stays empty, and so do the folders above it."""
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    yield
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "a").rglob("*")] == ["a/b"]
