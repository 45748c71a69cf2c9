"""Reading a release as text: what is found in wheels, sdists and directories, and what hostile ones can do: nothing."""

from __future__ import annotations

import io
import os
import random
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from rlhf_patches import Guard, Patch, Rewrite, Status, Variant
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.guards.places import NotFound, Unreadable
from rlhf_patches.guards.versions import Verdict
from rlhf_patches.offline import archive, evaluate, members
from rlhf_patches.offline.archive import open_release
from rlhf_patches.offline.members import ReleaseError
from tests.harness.archives import (
    END,
    FILES,
    METADATA,
    TEXT,
    WHOLE,
    extended,
    header,
    make_directory,
    make_tar,
    make_wheel,
    make_zip,
    member,
    record,
)
from tests.harness.effort import SHARE

pytestmark = pytest.mark.usefixtures("untouched")
GUARD = Guard("slime", ">=1.0,<2.0")


def make_sdist(folder, files, metadata=METADATA, name="slime-1.5.tar.gz"):
    everything = {"PKG-INFO": metadata, **files}
    return make_tar(folder, *(member(f"slime-1.5/{n}", t) for n, t in everything.items()), END, name=name)


def below(prefix, files):
    return {f"{prefix}{name}": text for name, text in files.items()}


KINDS = {
    "wheel": make_wheel,
    "wheel, stored": lambda folder, files: make_wheel(folder, files, compression=zipfile.ZIP_STORED),
    "wheel, purelib": lambda folder, files: make_wheel(folder, below("slime-1.5.data/purelib/", files)),
    "wheel, platlib": lambda folder, files: make_wheel(folder, below("slime-1.5.data/platlib/", files)),
    "tar.gz": make_sdist,
    "tgz": lambda folder, files: make_sdist(folder, files, name="slime-1.5.tgz"),
    "tar.gz, src": lambda folder, files: make_sdist(folder, below("src/", files)),
    "zip": lambda folder, files: make_zip(folder / "s.zip", below("slime-1.5/", {"PKG-INFO": METADATA, **files})),
    "zip, src": lambda folder, files: make_zip(
        folder / "s.zip", below("slime-1.5/", {"PKG-INFO": METADATA, **below("src/", files)})
    ),
    "site-packages": lambda folder, files: make_directory(
        folder, {"slime-1.5.dist-info/METADATA": METADATA, "x-1.dist-info/METADATA": "Name: x\nVersion: 1\n", **files}
    ),
    "directory called .whl": lambda folder, files: make_directory(
        folder / "slime-1.5.whl", {"slime.egg-info/PKG-INFO": METADATA, **files}
    ),
    "unpacked sdist": lambda folder, files: make_directory(folder, {"PKG-INFO": METADATA, **files}),
    "checkout, built": lambda folder, files: make_directory(
        folder, below("src/", {"slime.egg-info/PKG-INFO": METADATA, **files})
    ),
}
WHEEL_AND_SDIST = pytest.mark.parametrize("make", [make_wheel, make_sdist], ids=["wheel", "sdist"])


@pytest.fixture
def build(tmp_path):
    """Makes a release of a kind in a folder of its own."""

    def make(kind, files=FILES):
        (tmp_path / "release").mkdir()
        return str(KINDS[kind](tmp_path / "release", files))

    return make


def refused(path, *says):
    """Reading fails, names the file, says these words, and leaves all files as they were."""
    around = Path(path).parent
    before = sorted(around.rglob("*"))
    with pytest.raises(ReleaseError) as caught:
        open_release(str(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for words in says:
        assert words in message
    assert sorted(around.rglob("*")) == before


# --------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read(build, kind):
    path = build(kind)
    release = open_release(path)
    source = release.source("slime.deep.mod")
    assert (source.module, source.text) == ("slime.deep.mod", TEXT)
    assert source.filename.startswith(f"{path}/")
    assert source.filename.endswith("slime/deep/mod.py")
    assert ("slime", "1.5") in release.claims
    finding = release.finding(GUARD)
    assert (finding.verdict, finding.version) == (Verdict.AFFECTED, "1.5")
    for missing in ("slime.deep.other", "slime.other.mod", "deep.mod", "slime.deep.mod.more", "slime.deep"):
        with pytest.raises(NotFound, match=missing):
            release.source(missing)


@pytest.mark.parametrize("kind", ["wheel", "tar.gz", "zip", "site-packages"])
def test_finding_a_module_is_pythons_way(build, kind):
    release = open_release(
        build(
            kind,
            {
                "both/__init__.py": "package",
                "both.py": "module",
                "spaces/inner.py": "below a namespace package",
                "spaces.py": "module",
                "hidden.py": "text",
                "hidden.cpython-311-x86_64-linux-gnu.so": b"\x7fELF",
                "whole/__init__.abi3.so": b"\x7fELF",
                "whole/__init__.py": "text",
                "compiled.pyc": b"\0",
                "beside.py": "text",
                "beside.pyc": b"\0",
                "beside2.so": b"\x7fELF",
                "src/lower.py": "x",
            },
        )
    )
    assert release.source("both").text == "package"
    assert release.source("spaces").text == "module"
    assert release.source("spaces.inner").text == "below a namespace package"
    assert release.source("beside").text == "text"
    for module, what in (("hidden", "compiled extension"), ("whole", "compiled extension"), ("compiled", "bytecode")):
        with pytest.raises(Unreadable, match=what):
            release.source(module)


def test_the_root_comes_before_src(build):
    release = open_release(
        build("tar.gz", {"src/slime/mod.py": "in src", "slime/mod.py": "root", "src/slime/other.py": "src"})
    )
    assert release.source("slime.mod").text == "root"
    assert release.source("slime.other").text == "src"


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1024, 9999])
def test_files_that_do_and_do_not_fill_their_blocks(build, size):
    files = {f"slime/m{n}.py": "#" * size for n in range(3)}
    release = open_release(build("tar.gz", {**files, "slime/data.bin": b"1" * size, "slime/last.py": "x = 1\n"}))
    assert [len(release.source(f"slime.m{n}").text) for n in range(3)] == [size] * 3
    assert release.source("slime.last").text == "x = 1\n"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfx = 1\r\ny = 2\rz = 3\n", "x = 1\ny = 2\nz = 3\n"),
        ("# coding: latin-1\nx = 'é'\n".encode("latin-1"), "# coding: latin-1\nx = 'é'\n"),
        (b"x = 'caf\xe9'\n", None),
        (b"# coding: no-such-thing\n", None),
        (b"\xef\xbb\xbf# coding: latin-1\n", None),
        (b"# coding: ascii\nx = 1\n", "# coding: ascii\nx = 1\n"),
        # Codecs that do not give text, fail with an error of another kind, or take a minute for a kilobyte.
        (b"# coding: hex\n00", None),
        (b"# coding: punycode\n-", None),
        (b"# coding: utf-7\nx = 1\n", None),
        (b"# coding: rot13\nk = 1\n", None),
        (b"# coding: undefined\n", None),
    ],
)
@pytest.mark.parametrize("kind", ["wheel", "site-packages"])
def test_encodings(build, kind, data, text):
    release = open_release(build(kind, {"slime/mod.py": data}))
    if text is None:
        with pytest.raises(Unreadable, match=r"slime.mod cannot be decoded: .*slime/mod.py"):
            release.source("slime.mod")
    else:
        assert release.source("slime.mod").text == text


# ------------------------------------------------------------------------------------------- what it calls itself


@pytest.mark.parametrize(
    ("metadata", "verdict", "version", "reason"),
    [
        ("Name: Slime\nVersion: 1.0+cu128\n", Verdict.AFFECTED, "1.0+cu128", "is affected"),
        ("Name: slime\nVersion: 2.0\n", Verdict.OUTSIDE, "2.0", "not affected"),
        ("Name: slime\nVersion: head\n", Verdict.UNKNOWN, "head", "not PEP 440"),
        ("Name: slime\n", Verdict.UNKNOWN, None, "states no version"),
        ("Name: slime\nVersion:\n", Verdict.UNKNOWN, None, "states no version"),
        ("Name: other\nVersion: 1.5\n", Verdict.UNKNOWN, None, "no metadata of slime"),
        ("Version: 1.5\n", Verdict.UNKNOWN, None, "no metadata of slime"),
        (b"Name: slime\nVersion: 1.\xff\n", Verdict.UNKNOWN, "1.\N{REPLACEMENT CHARACTER}", "not PEP 440"),
        ("", Verdict.UNKNOWN, None, "no metadata of slime"),
        # More digits than Python converts.
        (f"Name: slime\nVersion: {'9' * 5000}\n", Verdict.UNKNOWN, "9" * 5000, "not PEP 440"),
    ],
)
@WHEEL_AND_SDIST
def test_metadata(tmp_path, make, metadata, verdict, version, reason):
    finding = open_release(str(make(tmp_path, FILES, metadata))).finding(GUARD)
    assert (finding.verdict, finding.version) == (verdict, version)
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("files", "version", "reason"),
    [
        ({}, None, "no metadata of slime"),
        ({"slime-1.0.dist-info/METADATA": "Name: slime\nVersion: 1.0\n"}, "1.0", "is affected"),
        ({"other-1.0.dist-info/METADATA": "Name: other\nVersion: 1.0\n"}, None, "no metadata of slime"),
        ({"slime-1.0.dist-info/METADATA": "Name: slime\n"}, None, "states no version"),
        ({"slime-1.0.dist-info/RECORD": ""}, None, "no metadata of slime"),
        ({"slime-1.dist-info/METADATA": METADATA, "SLIME.egg-info/PKG-INFO": METADATA}, "1.5", "is affected"),
        (
            {"a.dist-info/METADATA": METADATA, "src/b.egg-info/PKG-INFO": "Name: SLIME\nVersion: 1.6\n"},
            None,
            "several versions of slime: 1.5, 1.6",
        ),
        (
            {"a.dist-info/METADATA": METADATA, "b.dist-info/METADATA": "Name: slime\n"},
            None,
            "several versions of slime: 1.5, no version",
        ),
    ],
)
def test_directories_and_their_metadata(tmp_path, files, version, reason):
    finding = open_release(str(make_directory(tmp_path / "d", {**FILES, **files}))).finding(GUARD)
    assert finding.version == version
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (TEXT, Status.APPLIES, "and the code is recognized"),
        ("def add(a, b):\n    return a + b\n", Status.UNAFFECTED, "the code does not have the defect"),
        ("def add(a, b:\n", Status.REFUSED, "does not parse"),
        ("# coding: hex\n00", Status.REFUSED, "cannot be decoded"),
        (None, Status.ABSENT, "there is no module slime.deep.mod"),
    ],
)
def test_a_bare_checkout_is_of_unknown_version_and_its_shape_decides(tmp_path, text, status, reason):
    files = {"slime/__init__.py": "", **({} if text is None else {"slime/deep/mod.py": text})}
    row = judge(make_directory(tmp_path / "d", files))
    assert (row.status, row.version) == (status, None)
    assert reason in row.reason


def judge(path):
    patch = Patch(
        name="slime-bug",
        summary="a bug",
        symptom="it breaks",
        cause="a mistake",
        repair="a fix",
        references=("https://example.invalid/1",),
        variants=(Variant(GUARD, (Rewrite("slime.deep.mod:add", "$A - $B", "$A + $B"),)),),
        obsolete_when="never",
    )
    (row,) = evaluate.check(open_release(str(path)), [Registered(patch, "tests")])
    return row


# ------------------------------------------------------------------------------------- no release, or a broken one


def test_what_is_no_release(tmp_path):
    refused(tmp_path / "missing.whl", "does not exist", archive.KINDS)
    os.mkfifo(tmp_path / "pipe.whl")
    refused(tmp_path / "pipe.whl", "not a regular file")
    refused("/dev/zero", "not a regular file")
    for suffix in (".whl", ".zip", ".tar.gz", ".tgz"):
        for content in (b"", b"hello\n", bytes(2000)):
            (tmp_path / f"x{suffix}").write_bytes(content)
            refused(tmp_path / f"x{suffix}", "damaged or truncated")
    for suffix in (".py", ".tar", ".tar.bz2", ".egg", ""):
        (tmp_path / f"x{suffix}").write_bytes(b"x = 1\n")
        refused(tmp_path / f"x{suffix}", "unknown type", archive.KINDS)


def test_wheels_without_or_with_two_sets_of_metadata(tmp_path):
    refused(make_zip(tmp_path / "a.whl", FILES), "not a wheel", "has 0 files *.dist-info/METADATA")
    two = {"a.dist-info/METADATA": METADATA, "b.dist-info/METADATA": METADATA}
    refused(make_zip(tmp_path / "b.whl", two), "has 2 files")
    below_another = {"x/a.dist-info/METADATA": METADATA}
    refused(make_zip(tmp_path / "c.whl", below_another), "has 0 files")


@pytest.mark.parametrize(
    "blocks",
    [
        (),
        (member("slime-1.5/slime/mod.py"),),
        (member("slime-1.5/PKG-INFO"), member("other/mod.py")),
        (member("PKG-INFO"), member("slime/mod.py")),
        (member("slime-1.5/slime.egg-info/PKG-INFO"), member("slime-1.5/slime/mod.py")),
    ],
)
def test_archives_that_are_no_sdist(tmp_path, blocks):
    refused(make_tar(tmp_path, *blocks, END), "not an sdist", "give the directory")


def result(path):
    """What matters of a release; None where it is refused."""
    try:
        release = open_release(str(path))
        return release.source("slime.deep.mod").text, release.claims
    except (ReleaseError, Unreadable) as error:
        return None if str(path) in str(error) else error
    except NotFound as error:  # a wrong answer: what is damaged is not absent
        return error


def damage(path, versions):
    """What is read of each version of a file's bytes: the same as ever, or nothing, and never anything else."""
    expected = result(path)
    assert expected is not None
    count = {True: 0, False: 0}
    for data in versions:
        path.write_bytes(data)
        found = result(path)
        assert found in (expected, None), data
        count[found is None] += 1
    return count


@WHEEL_AND_SDIST
def test_no_truncated_archive_is_read(tmp_path, make):
    noise = random.Random(1).randbytes(200)  # so that a wheel's and an sdist's bytes are not mostly headers
    path = make(tmp_path, {**FILES, "slime/noise.bin": noise, "slime/last.py": "x = 1\n"})
    whole = path.read_bytes()
    assert damage(path, (whole[:end] for end in range(0, len(whole), SHARE)))[False] == 0


@WHEEL_AND_SDIST
def test_no_flipped_byte_goes_unnoticed(tmp_path, make):
    """A file that vanishes because its name is damaged would count as absent: it has to be an error."""
    path = make(tmp_path, FILES)
    whole = path.read_bytes()

    def flipped():
        for position in range(0, len(whole), SHARE):
            for bits in (0x01, 0x10, 0xFF):
                data = bytearray(whole)
                data[position] ^= bits
                yield bytes(data)

    assert damage(path, flipped())[True] > len(whole) / SHARE


def test_a_name_damaged_in_a_zips_directory_is_an_error(tmp_path):
    path = make_wheel(tmp_path, FILES)
    data = path.read_bytes()
    for damaged in (b"slime/deep/mod.pz", b"slime/deep/mod.p/", b"slime/deep/mad.py"):
        head, _, tail = data.rpartition(b"slime/deep/mod.py")
        path.write_bytes(head + damaged + tail)
        refused(path, "damaged")


def test_a_tar_cut_within_a_whole_gzip(tmp_path):
    """What gzip cannot notice: the compressed stream is complete and its checksum right."""
    for end in range(0, len(WHOLE) + 512, 64):
        refused(make_tar(tmp_path, (WHOLE + END)[:end]), "damaged")
    assert result(make_tar(tmp_path, (WHOLE + END)[: len(WHOLE) + 512])) is not None


def test_a_damaged_header_within_a_whole_gzip(tmp_path):
    """tarfile takes it for the end of the archive, without a word."""
    for position in range(0, 512, 7):
        block = bytearray(member("slime-1.5/slime/deep/mod.py", TEXT))
        block[position] ^= 0x15
        refused(make_tar(tmp_path, member("slime-1.5/PKG-INFO", METADATA), bytes(block), END), "damaged")


def test_what_follows_a_gzip(tmp_path):
    path = make_tar(tmp_path, WHOLE, END)
    whole = path.read_bytes()
    path.write_bytes(whole + b"garbage")
    refused(path, "damaged")
    path.write_bytes(whole + bytes(700))
    assert result(path) is not None


# --------------------------------------------------------------------------------------------- built to do harm

ESCAPES = ["../evil.py", "/tmp/evil.py", "slime/../../evil.py", "slime/..", "..", "a\\..\\b.py", "C:/x.py", "C:x.py"]


@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_lead_out(tmp_path, name):
    refused(make_wheel(tmp_path, {**FILES, name: ""}), repr(name), "leads out")
    refused(make_tar(tmp_path, WHOLE, member(name), END), repr(name), "leads out")
    refused(make_tar(tmp_path, WHOLE, extended(record(b"path", name.encode())), member("x"), END), "leads out")


def test_names_with_a_nul(tmp_path):
    """zipfile cuts a name there, so that a file would be read under a name that another tool does not give it."""
    refused(make_tar(tmp_path, WHOLE, extended(record(b"path", b"slime-1.5/a.py\0b")), member("x"), END), "leads out")
    path = make_wheel(tmp_path, {**FILES, "slime/new.py_x": ""})
    path.write_bytes(path.read_bytes().replace(b"new.py_x", b"new.py\0x"))
    refused(path, r"new.py\x00x")


@WHEEL_AND_SDIST
def test_names_of_any_bytes_are_only_names(tmp_path, make):
    path = make(tmp_path, {**FILES, "slime/caf\u00e9 \u4e2d.py": "", "slime/x\x1b[31m.py": "", "slime/a\nb.py": ""})
    assert result(path) is not None


def test_names_that_are_not_utf_8(tmp_path):
    block = bytearray(member("slime-1.5/slime/caf_.py"))
    block[block.index(b"_.py")] = 0xE9
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:512]) + 8 * 32)
    assert result(make_tar(tmp_path, WHOLE, bytes(block), END)) is not None
    path = make_wheel(tmp_path, {**FILES, "slime/\u00e9.py": ""})
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xff"))  # and they are said to be UTF-8
    refused(path, "damaged")
    folder = make_directory(tmp_path / "d", FILES)
    with open(os.fsencode(folder) + b"/slime/caf\xe9.py", "w"):
        pass
    assert result(folder) is not None


@pytest.mark.parametrize(
    ("name", "kind", "target", "says"),
    [
        ("slime/x", tarfile.SYMTYPE, "/etc/passwd", "out of the archive"),
        ("slime/x", tarfile.SYMTYPE, "../../../x", "out of the archive"),
        ("slime/x", tarfile.SYMTYPE, "../../..", "out of the archive"),
        ("slime/x", tarfile.LNKTYPE, "../x", "out of the archive"),
        ("slime/x", tarfile.LNKTYPE, "/etc/passwd", "out of the archive"),
        ("slime/x", tarfile.FIFOTYPE, "", "a device, a pipe"),
        ("slime/x", tarfile.CHRTYPE, "", "a device, a pipe"),
        ("slime/x", tarfile.BLKTYPE, "", "a device, a pipe"),
        ("slime/x.py", tarfile.GNUTYPE_SPARSE, "", "sparse"),
    ],
)
def test_links_out_of_an_archive_and_special_files(tmp_path, name, kind, target, says):
    path = make_tar(tmp_path, WHOLE, header(f"slime-1.5/{name}", 0, kind, target), END)
    refused(path, f"slime-1.5/{name}", says)


def test_pax_sparse_files(tmp_path):
    sparse = record(b"GNU.sparse.map", b"0,1") + record(b"GNU.sparse.size", b"9")
    refused(make_tar(tmp_path, WHOLE, extended(sparse), member("slime-1.5/x.py", "1"), END), "sparse")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize(
    ("name", "target"), [("slime/deep/mod.py", "PKG-INFO"), ("slime/deep", "lib/deep"), ("slime", "lib")]
)
def test_a_module_behind_a_link_is_refused_and_not_absent(tmp_path, kind, name, target):
    link = header(f"slime-1.5/{name}", 0, kind, target)
    other = member("slime-1.5/lib/deep/mod.py", TEXT)
    row = judge(make_tar(tmp_path, member("slime-1.5/PKG-INFO", METADATA), link, other, END))
    assert (row.status, row.version) == (Status.REFUSED, "1.5")
    assert "links are not followed" in row.reason


def test_links_in_a_wheel(tmp_path):
    link = zipfile.ZipInfo("slime/deep/mod.py")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    row = judge(make_wheel(tmp_path, {"slime/__init__.py": "", link: "/etc/passwd"}))
    assert row.status is Status.REFUSED
    assert "slime/deep/mod.py" in row.reason
    assert "links are not followed" in row.reason
    link.filename = link.orig_filename = "slime-1.5.dist-info/METADATA"
    refused(make_zip(tmp_path / "x.whl", {**FILES, link: "/etc/passwd"}), "links are not followed")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicates(tmp_path):
    path = tmp_path / "x.whl"
    for second in ("slime/mod.py", "slime//mod.py", "./slime/mod.py", "slime/./mod.py"):
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("slime-1.dist-info/METADATA", "slime/mod.py", second):
                archive.writestr(name, METADATA)
        refused(path, "'slime/mod.py' twice")
    refused(make_tar(tmp_path, WHOLE, member("slime-1.5/slime/deep/mod.py"), END), "twice")
    link = header("slime-1.5/slime/deep/mod.py", 0, tarfile.SYMTYPE, "x")
    refused(make_tar(tmp_path, WHOLE, link, END), "twice")


@WHEEL_AND_SDIST
def test_too_many_members_of_any_kind(tmp_path, make, monkeypatch):
    monkeypatch.setattr(members, "MAX_MEMBERS", 20)
    assert result(make(tmp_path, {**FILES, **{f"slime/{n}.txt": "" for n in range(10)}})) is not None
    refused(make(tmp_path, {**FILES, **{f"slime/{n}.txt": "" for n in range(20)}}), "more than 20 members")
    folders = [header(f"slime-1.5/{n}", 0, tarfile.DIRTYPE) for n in range(20)]
    refused(make_tar(tmp_path, WHOLE, *folders, END), "more than 20 members")


@WHEEL_AND_SDIST
def test_files_of_stated_size(tmp_path, make, monkeypatch):
    monkeypatch.setattr(members, "MAX_FILE", 2**20)
    assert result(make(tmp_path, {**FILES, "slime/x.py": "#" * 2**20})) is not None
    assert result(make(tmp_path, {**FILES, "slime/x.bin": bytes(2**22)})) is not None
    unread(make(tmp_path, {**FILES, "slime/x.py": "#" * (2**20 + 1)}), "slime.x", "has 1.0 MiB, more than the 1 MiB")
    monkeypatch.setattr(members, "MAX_TEXT", 2**21)
    refused(make(tmp_path, {**FILES, **{f"slime/{n}.py": "#" * 2**20 for n in range(2)}}), "more than 2 MiB of source")


def test_a_large_file_in_a_directory(tmp_path):
    folder = make_directory(tmp_path / "d", {"PKG-INFO": METADATA})
    (folder / "slime").mkdir()
    with open(folder / "slime" / "mod.py", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(Unreadable, match="more than the 2 MiB"):
        open_release(str(folder)).source("slime.mod")


def unread(path, module, *says):
    """One module is not read, the others are: no release is refused for a table that nobody patches."""
    assert result(path) is not None
    with pytest.raises(Unreadable) as caught:
        open_release(str(path)).source(module)
    for words in (str(path), *says):
        assert words in str(caught.value)


def little_memory(path, *says, check=refused):
    tracemalloc.start()
    try:
        check(path, *says)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_a_real_bomb_in_a_wheel(tmp_path):
    """100 MiB of zeros in 100 KiB: said to be so, said to be 10 bytes, and said to be just within the limit."""
    path = make_wheel(tmp_path, {**FILES, "slime/bomb.py": bytes(100 * 2**20)})
    data = bytearray(path.read_bytes())
    assert len(data) < 2**18
    little_memory(path, "slime.bomb", "has 100.0 MiB", check=unread)
    entry = data.rindex(b"PK\1\2")
    for lie in (10, members.MAX_FILE):
        data[entry + 24 : entry + 28] = struct.pack("<I", lie)
        path.write_bytes(data)
        little_memory(path, "damaged")
    data[entry + 24 : entry + 28] = struct.pack("<I", 2**32 - 2)
    path.write_bytes(data)
    little_memory(path, "slime.bomb", "has 4096.0 MiB", check=unread)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 99])
def test_compressions_that_no_wheel_has(tmp_path, method):
    """zipfile unpacks bzip2 and LZMA as far as they go: a few bytes of them become gigabytes."""
    path = make_wheel(tmp_path, FILES, compression=zipfile.ZIP_STORED if method == 99 else method)
    data = bytearray(path.read_bytes())
    if method == 99:
        entry = data.rindex(b"PK\1\2")
        data[entry + 10 : entry + 12] = struct.pack("<H", 99)
        path.write_bytes(data)
    refused(path, "compress")


def test_a_bzip2_bomb_behind_a_small_size(tmp_path):
    path = make_wheel(tmp_path, {**FILES, "slime/bomb.py": bytes(64 * 2**20)}, compression=zipfile.ZIP_BZIP2)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\1\2")
    data[entry + 24 : entry + 28] = struct.pack("<I", 10)
    path.write_bytes(data)
    little_memory(path)


@pytest.mark.parametrize("flag", [0x1, 0x20, 0x40])
def test_encrypted_wheels(tmp_path, flag):
    path = make_wheel(tmp_path, FILES)
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2") + 8] |= flag
    path.write_bytes(data)
    refused(path, "'slime/deep/mod.py' cannot be read")


def test_a_wheel_for_a_zip_of_the_future(tmp_path):
    path = make_wheel(tmp_path, FILES)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 6] = 99
    path.write_bytes(data)
    refused(path, "9.9")


def test_a_bomb_in_an_sdist(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "MAX_UNPACKED", 14 * 2**20)
    small = [member(f"slime-1.5/{n}.bin", bytes(2 * 2**20)) for n in range(6)]
    assert result(make_tar(tmp_path, WHOLE, *small, END)) is not None
    bomb = make_tar(tmp_path, WHOLE, *small, member("slime-1.5/9.bin", bytes(4 * 2**20)), END)
    assert bomb.stat().st_size < 2**20
    little_memory(bomb, "unpacks to more than")
    little_memory(make_tar(tmp_path, WHOLE, END, bytes(16 * 2**20)), "unpacks to more than")  # behind its end


@pytest.mark.parametrize("size", [2**20, 2**33 - 1, 2**62])
def test_tar_headers_that_promise_more_than_there_is(tmp_path, size):
    for name in ("slime-1.5/x.py", "slime-1.5/x.bin"):
        refused(make_tar(tmp_path, WHOLE, header(name, size), END))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"hdrcharset", b"\xff\xfe"),
        (b"GNU.sparse.map", b"a,b"),
        (b"GNU.sparse.size", b"zz"),
        (b"GNU.sparse.realsize", b"zz"),
    ],
)
def test_pax_headers_that_tarfile_does_not_expect(tmp_path, key, value):
    path = make_tar(tmp_path, WHOLE, extended(record(key, value)), member("slime-1.5/x"), END)
    assert result(path) in (None, (TEXT, (("slime", "1.5"),)))  # newer Pythons pass over some of them


def test_pax_headers_and_long_names_of_real_sdists(tmp_path):
    path = tmp_path / "slime-1.5.tar.gz"
    deep = "slime/" + "x" * 90 + "/" + "y" * 90 + "/" + "z" * 90
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(path, "w:gz", format=form, pax_headers={"comment": "0" * 40}) as archive:
            for name, text in {"PKG-INFO": METADATA, f"{deep}/caf\u00e9.py": "x = 1\n", **FILES}.items():
                info = tarfile.TarInfo(f"slime-1.5/{name}")
                info.size, info.mtime, info.uname = len(text), 1700000000.123456, "\u00e9"
                archive.addfile(info, io.BytesIO(text.encode()))
        assert result(path) == (TEXT, (("slime", "1.5"),))
        assert open_release(str(path)).source(f"{deep.replace('/', '.')}.caf\u00e9").text == "x = 1\n"


def test_links_in_a_directory_are_followed(tmp_path):
    """uv's environments consist of them. A loop of links has no end and is an error."""
    real = make_directory(tmp_path / "real", FILES)
    folder = make_directory(tmp_path / "d", {"slime-1.5.dist-info/METADATA": METADATA})
    (folder / "slime").symlink_to(real / "slime")
    (folder / "loop.py").symlink_to(folder / "loop.py")
    assert result(folder) == (TEXT, (("slime", "1.5"),))
    with pytest.raises(ReleaseError, match=r"loop.py cannot be read"):
        open_release(str(folder)).source("loop")


def test_a_folder_where_a_file_should_be(tmp_path):
    folder = make_directory(tmp_path / "d", {"slime/mod.py/x": "", "PKG-INFO/x": "", "slime.egg-info/PKG-INFO/x": ""})
    with pytest.raises(Unreadable, match="not a regular file"):
        open_release(str(folder)).source("slime.mod")
