"""What reading a release takes in memory and time, each in a process with limits."""

from __future__ import annotations

import os

import pytest

from rlhf_patches.guards.places import Unreadable
from rlhf_patches.offline.archive import open_release
from tests.harness.archives import (
    BAD_HEADERS,
    END,
    FILES,
    MIB,
    WHOLE,
    extended,
    header,
    make_directory,
    make_tar,
    make_wheel,
    member,
    record,
)
from tests.harness.forks import Forks

pytestmark = pytest.mark.usefixtures("untouched")

_CHILD = """\
signal.alarm(60)
resource.setrlimit(resource.RLIMIT_AS, (700 * 2**20,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
try:
    releases.open_release(sys.argv[1])
except releases.ReleaseError as error:
    print(error)
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def child():
    """Reads a release in a process that has 5 seconds and little memory: for what would hang or swap this one."""
    made = Forks("import resource, signal; from rlhf_patches.offline import archive as releases", _CHILD)
    yield lambda path: made.run(str(path))
    made.close()


@pytest.fixture
def refused_within_limits(child):
    """As `refused`, there."""

    def refused(path, *says):
        status, said = child(path)
        assert status == 3, (status, said[-500:])
        for words in (str(path), *says):
            assert words in said

    return refused


def test_a_long_name_costs_no_more_than_its_length(refused_within_limits, tmp_path):
    names = [f"{letter}/" * 32_000 + "x.py" for letter in "abcdefghij"]
    refused_within_limits(make_wheel(tmp_path, {**FILES, **dict.fromkeys(names, "")}))


@pytest.mark.parametrize("size", [-1, -100, -512, -10_000, -(2**40)])
@pytest.mark.parametrize("name", ["slime-1.5/x.py", "slime-1.5/x.bin"])
def test_negative_sizes(refused_within_limits, tmp_path, size, name):
    refused_within_limits(make_tar(tmp_path, WHOLE, header(name, size), END), "slime-1.5")
    stated = extended(record(b"size", b"%d" % size))
    refused_within_limits(make_tar(tmp_path, WHOLE, stated, header(name), END), "slime-1.5")


def test_digits_without_end(refused_within_limits, tmp_path):
    """Few enough to be read, and some seconds of the time of tarfile's regular expressions (CVE-2024-6232)."""
    path = make_tar(tmp_path, WHOLE, extended(b"1" * 20_000), member("slime-1.5/x"), END)
    refused_within_limits(path, "an invalid header")


@pytest.mark.one_python
@pytest.mark.parametrize("make", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_gigantic_headers_in_a_small_archive(refused_within_limits, tmp_path, make):
    path = make_tar(tmp_path, WHOLE, make(), END, level=1)
    assert path.stat().st_size < 5 * MIB
    refused_within_limits(path)


# --------------------------------------------------------------------------------------------- in a directory


@pytest.mark.one_python
@pytest.mark.parametrize("special", ["fifo", "/dev/zero"])
def test_modules_and_metadata_that_never_end(child, tmp_path, special):
    """Read in another process: this one would wait for ever, or swap."""

    def put(name):
        folder = make_directory(tmp_path / name.replace("/", "-"), FILES)
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        os.mkfifo(file) if special == "fifo" else file.symlink_to(special)
        return folder

    with pytest.raises(Unreadable, match="not a regular file"):
        open_release(str(put("slime/deep/mod.py"))).source("slime.deep.mod")
    for name in ("PKG-INFO", "slime-1.5.dist-info/METADATA", "slime.egg-info/PKG-INFO", "slime.egg-info", "src"):
        status, said = child(put(name))
        assert status in (0, 3), (name, said[-500:])
