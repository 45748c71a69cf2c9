"""trl-chunked-nll-zero3 stays away from what it was not written for; on text alone, and nothing is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_patches import Status
from rlhf_patches.definitions import registry
from rlhf_patches.offline import archive, download, evaluate
from tests.harness import look_alikes
from tests.harness.by_case import exhaustive_but

NAME = "trl-chunked-nll-zero3"
CACHE = Path(__file__).parents[2] / ".cache" / "rlhf-patches"


def test_the_installed_release_is_recognized():
    report = evaluate.inspect(*registry.load())
    assert report[NAME].status is Status.APPLIES, report[NAME]
    assert not report.problems


@pytest.mark.parametrize("release", exhaustive_but(["trl==1.3.0", "trl==1.15.0"], "trl==1.3.0"))
def test_releases_without_the_defect_are_left_alone(release):
    """The published wheels, as text: 1.3.0 has no chunked loss yet, 1.15.0 has a fused one."""
    report = evaluate.check(archive.open_release(str(download.fetch(release, CACHE))), *registry.load())
    for name in (NAME, "trl-chunked-divergence-zero3"):
        row = report[name]
        assert row.status in (Status.UNAFFECTED, Status.ABSENT), row
        assert row.version == release.removeprefix("trl==")
        assert not row.unreviewed, "the defect is not in its code"


SUMMED = "loss = loss + chunk_loss"


@pytest.mark.parametrize(
    ("version", "edit", "status"),
    [
        (None, (SUMMED, "loss = loss + 1.0 * chunk_loss"), "refused"),
        ("unknown", (SUMMED, "loss = loss + 1.0 * chunk_loss"), "unaffected"),
    ],
)
def test_other_versions_and_lookalikes(tmp_path, version, edit, status):
    row = look_alikes.doctor_row(tmp_path, NAME, version=version, edit=look_alikes.replacing(*edit))
    assert row["status"] == status, row


def test_every_fingerprint_that_is_recognized_has_its_shape():
    """An implementation that met one without would fail in the middle of training."""
    from rlhf_patches.patches.trl import _chunked_head, chunked_divergence_zero3, chunked_nll_zero3

    fingerprints = [
        fingerprint
        for module in (chunked_nll_zero3, chunked_divergence_zero3)
        for variant in module.PATCH.variants
        for change in variant.changes
        for fingerprint in change.fingerprints
    ]
    assert sorted(_chunked_head._SHAPES) == sorted(fingerprints)
