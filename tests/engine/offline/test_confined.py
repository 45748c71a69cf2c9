"""What releases can do to ``check`` that were built to: a line and status 2, within limits on time and memory.

The attacks are small versions of real ones, where a limit can be lowered, or a header promises what is not there.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import struct
import sys
import tarfile
import time
import zipfile
import zlib

import pytest

from rlhf_patches import Rewrite, Status, cli
from rlhf_patches.definitions import registry
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.guards import memory, patterns, rewriting, shapes, sources
from rlhf_patches.offline import archive, confined, evaluate, members
from rlhf_patches.offline.archive import open_release
from rlhf_patches.offline.members import ReleaseError
from tests.harness import toy_slime
from tests.harness.archives import (
    END,
    FILES,
    METADATA,
    WHOLE,
    extended,
    header,
    make_directory,
    make_tar,
    make_wheel,
    member,
    record,
)
from tests.harness.toy_slime import MODEL


def refused(path, *says):
    with pytest.raises(ReleaseError) as caught:
        open_release(str(path))
    for words in (str(path), *says):
        assert words in str(caught.value)


# ------------------------------------------------------------------------------------ a process with limits


def test_a_crash_is_one_line_and_hides_no_other_source(slime_wheel, tmp_path, monkeypatch, capfd):
    """Python 3.10 crashes on some sources; here it is made to, on every Python."""
    good, bad = slime_wheel(), tmp_path / "bad"
    make_directory(bad, {"slime/x.py": ""})
    judge = evaluate.check

    def crash(release, registered):
        if release.label == str(bad):
            os.write(2, b"Fatal Python error: Aborted\n")  # what Python itself may say
            os.abort()
        return judge(release, registered)

    monkeypatch.setattr(confined.evaluate, "check", crash)
    assert cli.main(["check", str(bad), good]) == 2
    said = capfd.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"rlhf-patches: {bad} is not judged: reading it crashed Python (SIGABRT)")
    assert f"{toy_slime.PATCH}  applies" in said.out


@pytest.mark.parametrize("terms", [20_000, 200_000])
def test_a_kilobyte_that_crashes_python_3_10(slime_wheel, terms, capfd):
    """With another Python the text does not compile; with 3.14 the shorter one does."""
    path = slime_wheel(change=lambda text: text + "x=1" + "+1" * terms)
    assert os.path.getsize(path) < 2048
    compiles = sys.version_info >= (3, 14) and terms == 20_000
    assert cli.main(["check", "--quiet", path]) in ((0,) if compiles else (1, 2))
    said = capfd.readouterr()
    assert [line.startswith(f"rlhf-patches: {path}") for line in said.err.splitlines()] == [True] * (not compiles)
    assert said.out == ""


def spin(*_, **__):
    while True:
        pass


def fill(*_, **__):
    taken = []
    while True:
        taken.append(bytearray(2**20))


def wait(*_, **__):
    time.sleep(60)


def test_a_limit_by_the_clock(slime_wheel, monkeypatch):
    """A network file system that does not answer takes no processor time."""
    monkeypatch.setattr(confined, "SECONDS", 1)
    monkeypatch.setattr(evaluate, "_judge", wait)
    with pytest.raises(ReleaseError, match=r"reading it took more than 1 seconds;"):
        confined.check(slime_wheel(), registry.load()[0])


@pytest.mark.parametrize(("harm", "says"), [(spin, "1 seconds of processor time"), (fill, "64 MiB of memory")])
def test_limits_on_time_and_memory(slime_wheel, monkeypatch, harm, says):
    monkeypatch.setattr(confined, "CPU_SECONDS", 1)
    monkeypatch.setattr(confined, "MEMORY", 64 * 2**20)
    monkeypatch.setattr(evaluate, "_judge", harm)
    with pytest.raises(ReleaseError, match=says):
        confined.check(slime_wheel(), registry.load()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="no limit on memory elsewhere")
def test_a_patch_that_runs_out_of_memory_makes_no_row(slime_wheel, monkeypatch):
    """A row of status `failed` would look like a finding about the release."""

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(shapes, "recognize_all", fail)
    with pytest.raises(ReleaseError, match="MiB of memory"):
        confined.check(slime_wheel(), registry.load()[0])


def test_a_result_is_what_it_is_in_this_process(slime_wheel):
    registered, failures = registry.load()
    checked = confined.check(slime_wheel(), registered, failures)
    assert checked.is_patched
    assert checked.report == evaluate.check(open_release(slime_wheel()), registered, failures)
    assert checked.report[toy_slime.PATCH].status is Status.APPLIES


def test_a_version_of_a_megabyte_is_no_megabyte_of_output(tmp_path):
    path = make_wheel(tmp_path, {MODEL: ""}, f"Name: slime\nVersion: {'1' * 900_000}\n")
    row = confined.check(str(path), registry.load()[0]).report[toy_slime.PATCH]
    assert len(row.version) < 2100
    assert row.version.endswith("... (900000 characters)")
    assert len(row.reason) < 2100


# ------------------------------------------------------------------------------------------- parsed once


def test_each_text_is_parsed_and_compiled_once(slime_wheel, monkeypatch):
    """64 KiB of `def f():0` took 20 s: every patch of a module parsed and compiled it several times."""
    counts = {}

    def counted(function, key):
        def call(*arguments, **options):
            text = key(*arguments)
            counts[text] = counts.get(text, 0) + 1
            return function(*arguments, **options)

        return call

    patch = next(item.patch for item in registry.load()[0] if item.patch.name == toy_slime.PATCH)
    registered = [Registered(patch, "x")] * 5
    release = open_release(slime_wheel(change=lambda text: text + "def f():0\n" * 100))
    monkeypatch.setattr(sources, "_parse", counted(sources._parse, lambda source: ("tree", source.text)))
    monkeypatch.setattr(patterns, "_by_line", counted(patterns._by_line, lambda text: ("nodes", text)))
    monkeypatch.setattr(rewriting, "_compile", counted(rewriting._compile, lambda text, _: ("code", text)))
    report = evaluate.check(release, registered)
    assert [row.status for row in report] == [Status.APPLIES] * 5
    assert [kind for kind, text in counts if "def f():0" in text] == ["tree", "nodes", "code", "code"]
    assert all(count == 1 for (_, text), count in counts.items() if "def f():0" in text)
    assert memory._memory.made is None


def test_what_does_not_parse_is_tried_once(tmp_path, monkeypatch):
    tried = []
    parse = sources._parse
    monkeypatch.setattr(sources, "_parse", lambda source: tried.append(source) or parse(source))
    release = open_release(str(make_directory(tmp_path / "d", {MODEL: "def train(:\n"})))
    patch = next(item.patch for item in registry.load()[0] if item.patch.name == toy_slime.PATCH)
    rows = list(evaluate.check(release, [Registered(patch, "x")] * 3))
    assert len({row.reason for row in rows}) == 1
    assert "does not parse" in rows[0].reason
    assert len(tried) == 1


def test_little_is_remembered_and_only_within(monkeypatch):
    made = itertools.count()
    assert memory.remembered("k", lambda: next(made)) == 0
    assert memory.remembered("k", lambda: next(made)) == 1
    with memory.parsed_once():
        with memory.parsed_once():
            assert memory.remembered("k", lambda: next(made)) == 2
        assert memory.remembered("k", lambda: next(made)) == 2
        for key in range(100):
            memory.remembered(key, lambda: None)
        assert len(memory._memory.made) < 20
        assert memory.remembered("k", lambda: next(made)) == 3
    assert memory.remembered("k", lambda: next(made)) == 4


def test_applying_parses_once_too_and_keeps_nothing(framework, engine, monkeypatch):
    """Trees and code of a module are many megabytes, and a training run is long."""
    framework.write("mod", "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a + b\n")
    patches = [
        framework.patch(Rewrite(framework.path("mod:add"), "$A - $B", "$A + $B"), name="framework-one"),
        framework.patch(Rewrite(framework.path("mod:sub"), "$A + $B", "$A - $B"), name="framework-two"),
    ]
    parsed, parse = [], sources._parse
    monkeypatch.setattr(sources, "_parse", lambda source: parsed.append(source) or parse(source))
    made = engine(*patches)
    made.apply()
    module = framework.load()
    assert (module.add(5, 2), module.sub(5, 2)) == (7, 3)
    assert len(parsed) == 1
    assert memory._memory.made is None
    made.revert()
    made.apply()
    assert (module.add(5, 2), module.sub(5, 2)) == (7, 3)
    assert len(parsed) == 2
    assert memory._memory.made is None


# ------------------------------------------------------------------------------------------- archives


def zip_directory(entries, stated):
    """An archive of so many entries, of one byte each; the number in its last record need not be true."""
    local = b"PK\3\4" + struct.pack("<HHHHHLLLHH", 20, *[0] * 7, 1, 0) + b"a"
    entry = b"PK\1\2" + struct.pack("<HHHHHHLLLHHHHHLL", 20, 20, *[0] * 7, 1, *[0] * 6) + b"a"
    end = struct.pack("<HHHHLLH", 0, 0, stated, stated, len(entry) * entries, len(local), 0)
    return local + entry * entries + b"PK\5\6" + end


@pytest.mark.parametrize("stated", [0, 1, 21])
def test_a_zip_is_not_opened_to_find_out_that_it_is_too_large(tmp_path, monkeypatch, stated):
    """zipfile takes half a minute for a million entries, whatever number is stated."""
    monkeypatch.setattr(members, "MAX_MEMBERS", 20)
    monkeypatch.setattr(zipfile, "ZipInfo", None)
    (tmp_path / "x.whl").write_bytes(zip_directory(21, stated))
    refused(tmp_path / "x.whl", "more than 20 members")
    monkeypatch.setattr(members, "MAX_DIRECTORY", 900)
    refused(tmp_path / "x.whl", "a directory of 0 MiB: too large")


def stream(data, name=b"", flags=0):
    """A gzip stream with a name in its header."""
    pack = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = pack.compress(data) + pack.flush()
    head = b"\x1f\x8b\x08" + bytes([flags | 8 * bool(name)]) + bytes(6) + (name + b"\0" if name else b"")
    return head + body + struct.pack("<LL", zlib.crc32(data), len(data))


def test_a_gzip_of_a_long_name_is_read_at_once(tmp_path, monkeypatch):
    """The module gzip reads it byte by byte: more than a minute for 100 MiB."""
    monkeypatch.setattr(gzip, "open", None)
    path = tmp_path / "slime-1.5.tar.gz"
    path.write_bytes(stream(WHOLE + END, name=b"a" * 30 * 2**20))
    assert open_release(str(path)).claims == (("slime", "1.5"),)


def test_a_gzip_of_several_streams(tmp_path):
    path = tmp_path / "slime-1.5.tar.gz"
    path.write_bytes(stream(WHOLE) + bytes(5) + stream(b"") + stream(END) + bytes(300_000))
    assert open_release(str(path)).claims == (("slime", "1.5"),)
    path.write_bytes(stream(WHOLE) + stream(b"") * 200 + stream(END))
    refused(path, "more than 100 gzip streams")
    wrong = bytearray(stream(WHOLE) + stream(END))
    wrong[-1] ^= 1
    path.write_bytes(wrong)
    refused(path, "damaged")


def test_many_keys_in_extended_headers(tmp_path, monkeypatch):
    """30 s for a thousand headers of 4,000 keys: each is small enough."""
    monkeypatch.setattr(members, "MAX_RECORDS", 100)
    keys = b"".join(record(b"k%d" % key, b"") for key in range(30))
    blocks = [extended(keys) + member(f"slime-1.5/{number}") for number in range(4)]
    assert open_release(str(make_tar(tmp_path, WHOLE, *blocks[:3], END))).claims
    refused(make_tar(tmp_path, WHOLE, *blocks, END), "more than 100 extended headers")


def test_many_keys_in_global_headers(tmp_path):
    """tarfile copies them all for every member."""

    def make(count):
        keys = b"".join(record(b"k%d" % key, b"") for key in range(count))
        return make_tar(tmp_path, extended(keys, b"g"), WHOLE, END)

    assert open_release(str(make(100))).claims
    refused(make(101), "more than 100 global headers")


@pytest.mark.parametrize("name", ["../out", "/out", "slime/../../out"])
def test_folders_that_lead_out_of_an_archive(tmp_path, name):
    refused(make_wheel(tmp_path, {**FILES, f"{name}/": ""}), "leads out of it")
    refused(make_tar(tmp_path, WHOLE, header(name, kind=tarfile.DIRTYPE), END), "leads out of it")


def test_many_long_names(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "MAX_NAMES", 1000)
    names = [f"slime/{'x' * 90}{number}.txt" for number in range(10)]
    assert open_release(str(make_wheel(tmp_path, {**FILES, **dict.fromkeys(names[:8], "")}))).claims
    refused(make_wheel(tmp_path, {**FILES, **dict.fromkeys(names, "")}), "names of more than 1000 characters")


def test_metadata_has_a_limit_of_its_own(tmp_path):
    refused(make_wheel(tmp_path, FILES, METADATA + "X: y\n" * 2**18), "METADATA", "more than the 1 MiB")
    folder = make_directory(tmp_path / "d", {**FILES, "a.dist-info/METADATA": METADATA + "X: y\n" * 2**18})
    with pytest.raises(ReleaseError, match=r"a.dist-info/METADATA has 1\.3 MiB, more than the 1 MiB"):
        open_release(str(folder))


def test_a_file_that_would_wait(tmp_path, monkeypatch):
    """As /proc/kmsg, a regular file of size 0; here the text of a metadata file gives None as it does."""
    folder = make_directory(tmp_path / "d", {**FILES, "a.dist-info/METADATA": METADATA})

    class Waits(io.BytesIO):
        def __init__(self, file):
            self.file = file

        def read(self, size=-1):
            os.close(self.file)

        def fileno(self):
            return self.file

    monkeypatch.setattr(archive, "open", lambda file, mode: Waits(file), raising=False)
    with pytest.raises(ReleaseError, match=r"a.dist-info/METADATA has no data yet$"):
        open_release(str(folder))


def test_many_links_to_one_file_of_metadata(tmp_path):
    """Thirty links to 10 MiB took 40 s."""
    (tmp_path / "big").write_text(METADATA + "X: y\n" * 2**21)
    for number in range(30):
        folder = tmp_path / "d" / f"{number}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").symlink_to(tmp_path / "big")
    refused(tmp_path / "d", "more than the 1 MiB")


@pytest.mark.parametrize(
    ("files", "claims"),
    [
        ({"a.dist-info/METADATA": "", "a.dist-info/PKG-INFO": METADATA}, (("slime", "1.5"),)),
        ({"a.dist-info/METADATA": METADATA, "a.dist-info/PKG-INFO": "Name: x\nVersion: 2\n"}, (("slime", "1.5"),)),
        ({"A.EGG-INFO": METADATA}, (("slime", "1.5"),)),
        ({"a.dist-info/METADATA": b"Name: slime\nVersion: 1\n\n\xff"}, ()),
        ({"a.dist-info/METADATA": "Version: 1\n"}, ()),
        ({"a.dist-info/METADATA": METADATA, "PKG-INFO": "Name: x\nVersion: 2\n"}, (("slime", "1.5"),)),
    ],
)
def test_the_same_metadata_as_the_engine_sees(tmp_path, monkeypatch, files, claims):
    folder = make_directory(tmp_path / "d", files)
    assert open_release(str(folder)).claims == claims
    from importlib.metadata import distributions

    found = []
    for one in distributions(path=[str(folder)]):
        try:
            found.append((one.metadata.get("Name"), one.metadata.get("Version")))
        except UnicodeDecodeError:
            continue
    assert tuple(claim for claim in found if claim[0]) == claims


BROKEN = {
    "the directory": "",
    "src": "src",
    "a package": "slime",
    "a folder in it": "slime/backends",
    "a module": MODEL,
    "its metadata": "slime-0.1.0.dist-info",
    "its metadata's file": "slime-0.1.0.dist-info/METADATA",
}


@pytest.mark.parametrize("where", BROKEN)
def test_what_cannot_be_read_is_not_absent(slime_wheel, tmp_path, where, capsys):
    """Root may read everything, but nobody gets through a link to itself."""
    with zipfile.ZipFile(slime_wheel()) as archive:
        archive.extractall(tmp_path / "d")
    assert cli.main(["check", "--quiet", str(tmp_path / "d")]) == 0
    broken = tmp_path / "d" / BROKEN[where]
    if broken.exists():
        broken.rename(tmp_path / "away")
    broken.symlink_to(broken.name)
    assert cli.main(["check", "--quiet", str(tmp_path / "d")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'd'}" in line
    assert "cannot be read: [Errno" in line


def test_a_folder_that_may_not_be_listed(slime_wheel, tmp_path, monkeypatch, capsys):
    with zipfile.ZipFile(slime_wheel()) as archive:
        archive.extractall(tmp_path / "d")
    listed = os.listdir

    def deny(folder):
        if str(folder).rstrip("/").endswith("megatron_utils"):
            raise PermissionError(13, "Permission denied", folder)
        return listed(folder)

    monkeypatch.setattr(os, "listdir", deny)
    assert cli.main(["check", "--quiet", str(tmp_path / "d")]) == 2
    assert "slime/backends/megatron_utils/ cannot be read: [Errno 13] Permission denied" in capsys.readouterr().err


def test_a_source_that_cannot_be_looked_at_is_not_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    assert cli.main(["check", "loop"]) == 2
    assert "loop cannot be read: [Errno" in capsys.readouterr().err
