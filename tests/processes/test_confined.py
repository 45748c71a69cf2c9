"""``check`` in a process of its own: limits, standard streams, interpreters that crash."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import zlib

import pytest

from rlhf_patches.definitions import registry
from rlhf_patches.offline import confined
from rlhf_patches.offline.members import ReleaseError


def test_the_process_leaves_nothing_behind(slime_wheel, tmp_path, monkeypatch):
    fork, children = os.fork, []
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])
    before = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    limits = [resource.getrlimit(limit) for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE)]
    for path in (slime_wheel(), str(tmp_path / "missing.whl")):
        try:
            confined.check(path, registry.load()[0])
        except ReleaseError:
            pass
    assert len(children) == 2
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    assert before is None or sorted(os.listdir("/proc/self/fd")) == before
    after = [resource.getrlimit(limit) for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE)]
    assert after == limits


def test_without_standard_streams(slime_wheel):
    """The pipe to the other process then gets one of their numbers."""
    code = (
        "import os, sys; from rlhf_patches.definitions import registry;"
        "from rlhf_patches.offline import confined; os.closerange(0, 3);"
        "os._exit(not confined.check(sys.argv[1], registry.load()[0]).is_patched)"
    )
    assert subprocess.run([sys.executable, "-c", code, slime_wheel()]).returncode == 0


def stream(data, name=b"", flags=0):
    """A gzip stream with a name in its header."""
    pack = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = pack.compress(data) + pack.flush()
    head = b"\x1f\x8b\x08" + bytes([flags | 8 * bool(name)]) + bytes(6) + (name + b"\0" if name else b"")
    return head + body + struct.pack("<LL", zlib.crc32(data), len(data))


# ------------------------------------------------------------------------------------------- directories

_READ = """\
import resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, (700 * 2**20,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
signal.alarm(60)
from rlhf_patches.offline import archive as releases
for path in sys.argv[1:]:
    try:
        releases.open_release(path)
        print("read")
    except releases.ReleaseError as error:
        print(error)
"""


@pytest.mark.parametrize("special", ["fifo", "/dev/zero", "sparse"])
def test_metadata_under_every_name_that_never_ends(tmp_path, special):
    """In another process: this one would wait for ever, or swap."""
    names = ["x.dist-info/METADATA", "x.dist-info/PKG-INFO", "X.EGG-INFO", "X.Egg-Info/PKG-INFO", "PKG-INFO"]
    names += [f"src/{name}" for name in names[:-1]]
    paths = []
    for number, name in enumerate([*names, "EGG-INFO/PKG-INFO"]):
        folder = tmp_path / (f"d{number}" if number < len(names) else "x.egg")
        file = folder / name
        file.parent.mkdir(parents=True)
        if special == "fifo":
            os.mkfifo(file)
        elif special == "sparse":
            with open(file, "wb") as stream:
                stream.truncate(2**40)
        else:
            file.symlink_to(special)
        paths.append((str(folder), str(file)))
    done = subprocess.run(
        [sys.executable, "-c", _READ, *(folder for folder, _ in paths)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-500:]
    for (_, file), line in zip(paths, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"{file} has 1048576.0 MiB" if special == "sparse" else f"{file} is not a regular file")
