"""Version guards: which copy of the metadata counts, and what it says."""

from __future__ import annotations

import pytest

from rlhf_patches import Guard
from rlhf_patches.versions import Finding, Verdict, check, why_absent, worst


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
    finding = check(Guard(framework.distribution, guard), str(file))
    assert (finding.verdict, finding.version) == (verdict, version)
    assert version in finding.reason
    assert framework.distribution in finding.reason


@pytest.mark.parametrize("spelling", ["DIST_{}", "Dist.{}", "dist--{}"])
def test_names_are_normalised(framework, spelling):
    finding = check(Guard(spelling.format(framework.name), "==1.0"), str(framework.write("mod", "")))
    assert finding.verdict is Verdict.AFFECTED


@pytest.mark.parametrize("origin", [None, "built-in", "/elsewhere/mod.py"])
def test_metadata_that_does_not_own_the_file(framework, origin):
    finding = check(Guard(framework.distribution, ""), origin)
    assert (finding.verdict, finding.version) == (Verdict.UNKNOWN, None)
    assert f"(1.0) does not belong to {origin}" in finding.reason


def test_a_folder_with_the_same_beginning_does_not_own_the_file(framework):
    neighbour = framework.site.with_name(framework.site.name + "-2") / "mod.py"
    assert check(Guard(framework.distribution, ""), str(neighbour)).verdict is Verdict.UNKNOWN


def test_a_link_to_the_file_is_the_file(framework, tmp_path):
    file = framework.write("mod", "")
    link = tmp_path / "link"
    link.symlink_to(framework.site)
    assert check(Guard(framework.distribution, ""), str(link / file.relative_to(framework.site))).version == "1.0"


def test_no_metadata(framework):
    finding = check(Guard("no-such-distribution", ""), "/x.py")
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
