"""What `rlhf-patches check` takes for releases that were built to do harm: ``python benchmarks/check_limits.py``.

CPU seconds and peak memory of the command with its children, for each attack in the size in which it was found. The
aim is 10 s and 500 MB. Status 2 is an archive that is not read, in one line; status 1 one whose module is refused.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: skyrl\nVersion: 0.3.0\n"
MODULE = "skyrl/backends/skyrl_train/distributed/megatron/model_utils.py"
AIM = 10.0, 500.0


def wheel(folder: Path, text: str | bytes) -> Path:
    """A SkyRL whose patched module has this text."""
    path = folder / "skyrl-0.3.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("skyrl-0.3.0.dist-info/METADATA", METADATA)
        archive.writestr(MODULE, text)
    return path


def many_entries(folder: Path) -> Path:
    """A zip whose directory has a million entries of nothing."""
    path = folder / "skyrl-0.3.0-py3-none-any.whl"
    count = 1_000_000
    with path.open("wb") as file:
        for number in range(count):
            name = b"skyrl/%07d.py" % number
            head = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, len(name), *[0] * 6)
            file.write(head + name)
        size = file.tell()
        file.write(struct.pack("<4sLQ2H2L4Q", b"PK\6\6", 0, 44, 45, 45, 0, 0, count, count, size, 0)[:56])
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, size, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, size, 0xFFFFFFFF, 0))
    return path


def sdist(folder: Path, members: Iterator[tarfile.TarInfo]) -> Path:
    """An sdist with these members, all of them empty."""
    path = folder / "skyrl-0.3.0.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("skyrl-0.3.0/PKG-INFO")
        info.size = len(METADATA)
        archive.addfile(info, io.BytesIO(METADATA.encode()))
        for member in members:
            archive.addfile(member)
    return path


def with_headers(number: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"skyrl-0.3.0/{number}.py")
    info.pax_headers = {f"key{key}": "x" for key in range(4000)}
    return info


def gzip_of(folder: Path, data: bytes) -> Path:
    path = folder / "skyrl-0.3.0.tar.gz"
    path.write_bytes(data)
    return path


def long_name() -> bytes:
    packed = zlib.compressobj(wbits=-15)
    body = packed.compress(bytes(10240)) + packed.flush()
    head = b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * 100_000_000 + b"\0"
    return head + body + struct.pack("<2L", zlib.crc32(bytes(10240)), 10240)


def directory(folder: Path, make: Callable[[Path], object]) -> Path:
    """A directory whose metadata is something that `make` puts there."""
    made = folder / "site"
    (made / "skyrl").mkdir(parents=True)
    (made / "x.dist-info").mkdir()
    make(made / "x.dist-info" / "PKG-INFO")
    return made


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(300 << 20)


ATTACKS: dict[str, Callable[[Path], Path]] = {
    "no attack: 900 lines": lambda f: wheel(f, "def f(a, b):\n    return a - b\n" * 300),
    "x=1+1+... in 642 bytes": lambda f: wheel(f, "x=" + "1+" * 60_000 + "1"),
    "an expression of 15 MiB in 16 KB": lambda f: wheel(f, "x=" + "1+" * 7_500_000 + "1"),
    "an expression of 2 MiB, <": lambda f: wheel(f, "x=" + "1<" * 1_000_000 + "1"),
    "an expression of 2 MiB, ()": lambda f: wheel(f, "x=f" + "()" * 1_000_000),
    "64 KB of def f():0": lambda f: wheel(f, "def f():0\n" * 6500),
    "a punycode cookie": lambda f: wheel(f, b"# coding: punycode\n" + b"x-" * 30_000),
    "a zip of 1,000,000 entries": many_entries,
    "an sdist of 190,000 members": lambda f: sdist(f, (tarfile.TarInfo(f"skyrl-0.3.0/{n}") for n in range(190_000))),
    "1,000 headers of 4,000 keys": lambda f: sdist(f, map(with_headers, range(1000))),
    "a gzip name of 100 MB": lambda f: gzip_of(f, long_name()),
    "4,000,000 empty gzip members": lambda f: gzip_of(f, gzip.compress(b"") * 4_000_000),
    "metadata that is a FIFO": lambda f: directory(f, os.mkfifo),
    "metadata that is /dev/zero": lambda f: directory(f, lambda path: path.symlink_to("/dev/zero")),
    "metadata of 300 MiB of nothing": lambda f: directory(f, sparse),
}

# ru_maxrss is of the largest child, the command itself being one.
RUN = (
    "import json, resource, subprocess, sys\n"
    "done = subprocess.run([sys.executable, '-m', 'rlhf_patches.cli', 'check', sys.argv[1]], capture_output=True)\n"
    "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    "lines = done.stderr.decode(errors='replace').splitlines()\n"
    "print(json.dumps([done.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, len(lines)]))\n"
)


def main() -> int:
    print(f"{'attack':36} {'status':>6} {'CPU s':>7} {'peak MB':>8} {'lines of error':>14}")
    all_within = True
    for name, make in ATTACKS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = make(Path(folder))
            done = subprocess.run(
                [sys.executable, "-c", RUN, str(path)], capture_output=True, text=True, cwd=folder, timeout=600
            )
            status, seconds, memory, lines = json.loads(done.stdout)
        within = seconds <= AIM[0] and memory <= AIM[1]
        all_within = all_within and within
        print(f"{name:36} {status:6} {seconds:7.1f} {memory:8.0f} {lines:14}{'' if within else '   beyond the aim'}")
    return int(not all_within)


if __name__ == "__main__":
    raise SystemExit(main())
