"""trl-chunked-nll-zero3 stays away from what it was not written for; on text alone, and nothing is imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_patches import Status, download, inspection, plugins, releases, sources

NAME = "trl-chunked-nll-zero3"
MODULE = "trl.trainer.sft_trainer"
CACHE = Path(__file__).parents[2] / ".cache" / "rlhf-patches"


def doctor(path: Path) -> dict[str, str]:
    """What `rlhf-patches doctor` says of this patch, with a folder in front of the installed packages."""
    command = [sys.executable, "-m", "rlhf_patches.cli", "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, timeout=60)
    return next(row for row in json.loads(done.stdout) if row["name"] == NAME)


def copy(folder: Path, version: str | None, old: str = "", new: str = "") -> Path:
    """The installed module, edited or not, as a distribution that calls itself ``version``."""
    text = Path(str(sources.locate(MODULE).origin)).read_text()
    assert old in text
    package = folder / "trl" / "trainer"
    package.mkdir(parents=True)
    for part in (package.parent, package):
        (part / "__init__.py").touch()
    (package / "sft_trainer.py").write_text(text.replace(old, new))
    metadata = folder / f"trl-{version}.dist-info"
    metadata.mkdir()
    version = version or importlib.metadata.version("trl")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
    return folder


def test_the_installed_release_is_recognised():
    report = inspection.inspect(*plugins.load())
    assert report[NAME].status is Status.APPLIES, report[NAME]
    assert not report.problems


@pytest.mark.parametrize("release", ["trl==1.3.0", "trl==1.15.0"])
def test_releases_without_the_defect_are_left_alone(release):
    """The published wheels, as text: 1.3.0 has no chunked loss yet, 1.15.0 has a fused one."""
    report = inspection.check(releases.read(str(download.fetch(release, CACHE))), *plugins.load())
    for name in (NAME, "trl-chunked-divergence-zero3"):
        row = report[name]
        assert row.status in (Status.UNAFFECTED, Status.ABSENT), row
        assert row.version == release.removeprefix("trl==")
        assert not row.unread, "the defect is not in its code"


SUMMED = "loss = loss + chunk_loss"


@pytest.mark.parametrize(
    ("version", "edit", "status"),
    [
        (None, (), "applies"),  # shows that the others are not left alone for want of a working copy
        ("1.3.0", (), "unaffected"),
        ("1.15.0", (), "unaffected"),
        (None, (SUMMED, "loss = loss + 1.0 * chunk_loss"), "refused"),
        ("unknown", (SUMMED, "loss = loss + 1.0 * chunk_loss"), "unaffected"),
        ("unknown", (), "applies"),
    ],
)
def test_other_versions_and_lookalikes(tmp_path, version, edit, status):
    row = doctor(copy(tmp_path, version, *edit))
    assert row["status"] == status, row
