"""``swift-kto-sequence-parallel`` on the real MegatronKTOTrainer, on both ends of the guard's range.

kto_sequence_parallel_ranks.py runs its ``forward_step`` as a later pipeline stage on two tensor-parallel ranks.
The crash of the original report, in TransformerEngine, cannot happen here; what it takes, an empty slice, can.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_patches import Status
from rlhf_patches.definitions import registry
from rlhf_patches.offline import evaluate
from tests.harness import look_alikes, side_by_side
from tests.harness.forkserver import swift
from tests.harness.logs import diagnosed

RULE_COVERAGE = {
    "minimal scope": "test_without_sequence_parallelism_it_changes_nothing",
    "no side effects": "because it divides a number, and reads one argument",
    "backward compatible": "test_without_sequence_parallelism_it_changes_nothing",
    "no new blocking": "because it is one division; no lock, no collective",
    "does not change the loss": "test_with_it_every_pass_gets_its_part_and_the_numbers_are_right",
}

NAME = "swift-kto-sequence-parallel"
STAGE = "tests.patches.swift.kto_sequence_parallel_ranks"
SILENT = "flash,middle,sequence,kl,shorter"
#: Of the cases that a release has; the worker runs all of them where none is named.
SOME = ["packed,last,sequence,kl,longer", SILENT, "packed,last,tensor,kl,longer", "padded,last,none,kl,longer"]
RELEASES = {
    "some": ("swift-3.12", "3.12.2", SOME, len(SOME)),
    "3.9": ("swift-3.9", "3.9.0", [], 20),
    "3.12": ("swift-3.12", "3.12.2", [], 60),
}
KTO_TRAINER = Path("swift/megatron/trainers/kto_trainer.py")
#: Of the largest value. float32 against float64 showed as up to 1.6e-6, slices at the wrong places as 0.7 to 1.5.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module", params=["some", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("3.9", "3.12"))]
)
def reports(request, run_ranks):
    """Of both ranks: each case without the patch, with it, and after it was reverted."""
    folder, version, named, cases = RELEASES[request.param]
    reports = run_ranks(STAGE, *named, levels=swift(folder, "swift_kto"))
    for report in reports:
        assert report["versions"]["ms-swift"] == version
        assert report["status"] == "applied"
        assert len(report["before"]) == len(report["after"]) == cases
    return reports


def cases_of(report, state, sequence_parallel):
    return {
        case: result
        for case, result in report[state].items()
        if (case.split(",")[2] == "sequence") == sequence_parallel
    }


def right_passes(case, result):
    """The forward passes in their order, each with what this rank holds of its part."""
    policy, reference, *kl = result["right inputs"]
    if ",kl," not in case:
        return [["reference", reference], ["policy", policy]]
    policy_kl, reference_kl = kl
    return [["reference", reference_kl], ["reference", reference], ["policy", policy_kl], ["policy", policy]]


def test_without_it_a_slice_is_empty_or_wrong(reports):
    """Empty where the KL part is absent or no longer than the policy's; else of a wrong length, and not always loud."""
    for report in reports:
        for case, result in cases_of(report, "before", True).items():
            passes = result["decoder inputs"]
            if not case.endswith(",kl,shorter"):
                (only,) = passes
                assert only[1][0] == 0
                assert "cannot reshape tensor of 0 elements" in result["failure"]
                assert diagnosed(result["log"]) == [(NAME, True)]
            else:
                assert passes[0] != right_passes(case, result)[0]
                assert (result["failure"] is None) == (case == SILENT)
        if SILENT in report["before"]:
            errors = report["before"][SILENT]["errors"]
            wrong = {name for name, error in errors.items() if error > 0.5}
            # Of the policy's output the first rank gets the beginning, which is right.
            assert wrong >= set(errors) - {"output of policy"}


def test_with_it_every_pass_gets_its_part_and_the_numbers_are_right(reports):
    """Outputs, the loss, the gradients of the policy and of what the previous stage sent."""
    for report in reports:
        for case, result in cases_of(report, "after", True).items():
            assert result["failure"] is None, (case, result)
            assert result["decoder inputs"] == right_passes(case, result)
            assert all(size > 0 for _, shape in result["decoder inputs"] for size in shape)
            parts = 4 if ",kl," in case else 2
            compared = parts + (3 if ",last," in case else 2)
            assert len(result["errors"]) == compared
            assert max(result["errors"].values()) < TOLERANCE, (case, result["errors"])


def test_a_repair_of_ones_own_is_not_divided_again(reports):
    for report in reports:
        assert report["own repair"] == report["own repair before"]
        for case, result in cases_of(report, "own repair", True).items():
            assert result["failure"] is None, (case, result)
            assert max(result["errors"].values()) < TOLERANCE, (case, result["errors"])


def test_without_sequence_parallelism_it_changes_nothing(reports):
    """Bit for bit, also on one tensor-parallel rank with the argument set; and it was right before."""
    for report in reports:
        before = cases_of(report, "before", False)
        assert cases_of(report, "after", False) == before
        for case, result in before.items():
            assert result["failure"] is None, (case, result)
            assert len(result["digest"]) == 64
            assert max(result["errors"].values()) < TOLERANCE, (case, result["errors"])


def test_reverted_the_trainer_is_itself_again(reports):
    for report in reports:
        assert report["own code again"]
        ((case, found),) = report["reverted"].items()
        assert found == report["before"][case]


@pytest.mark.exhaustive
def test_disabled_it_stays_away(run_ranks):
    case = "packed,last,sequence,kl,longer"
    for report in run_ranks(STAGE, case, levels=swift("swift-3.12", "swift_kto"), RLHF_PATCHES_DISABLE=NAME):
        assert report["status"] == "disabled"
        assert report["after"] == report["before"]
        assert report["before"][case]["failure"]


# ----------------------------------------------------------------------------------- on text, nothing is imported


def doctor(folder, release, version, edit=None):
    """What `rlhf-patches doctor` says of a release's trainer, edited or not, that calls itself ``version``."""

    def edited(text):
        for old, new in (edit or {}).items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        return text

    source = release if isinstance(release, Path) else side_by_side.folder(release) / KTO_TRAINER
    return look_alikes.doctor_row(folder, NAME, version=version, edit=edited, source=source)


SLICED_BY = "        length = self._get_kto_length(data)\n        with torch.no_grad()"
DIVIDED = (
    "\n        if self.args.sequence_parallel:\n            length //= mpu.get_tensor_model_parallel_world_size()\n"
)
# What 3.12.3 has, and other ways to the same.
FIXED = {SLICED_BY: SLICED_BY.replace("\n", DIVIDED, 1)}
ELSEWHERE = {
    "ref_model.set_input_tensor(self._get_input_tensor(input_tensor, True, True, length, 0))": (
        "ref_model.set_input_tensor(self._get_input_tensor(input_tensor, True, True, length // self.tp_size, 0))"
    ),
    "ref_model.set_input_tensor(self._get_input_tensor(input_tensor, False, True, length, 0))": (
        "ref_model.set_input_tensor(self._get_input_tensor(input_tensor, False, True, length // self.tp_size, 0))"
    ),
}
TWICE = {SLICED_BY: SLICED_BY.replace("\n", "\n        length = length // self.tp_size\n", 1)}


@pytest.mark.parametrize(
    ("release", "version", "edit", "status"),
    [
        ("swift-3.12", "3.12.3", FIXED, "unaffected"),
        ("swift-3.12", "unknown", FIXED, "unaffected"),
        ("swift-3.12", "3.12.2", FIXED, "refused"),
        ("swift-3.12", "3.12.2", ELSEWHERE, "refused"),
        ("swift-3.12", "unknown", ELSEWHERE, "unaffected"),
        ("swift-3.12", "3.12.2", TWICE, "refused"),
        ("swift-3.12", "unknown", TWICE, "unaffected"),
    ],
)
def test_other_versions_and_lookalikes(tmp_path, release, version, edit, status):
    row = doctor(tmp_path, release, version, edit)
    assert row["status"] == status, row


@pytest.mark.parametrize("version", ["unknown", "3.12.2"])
def test_the_newest_release_is_left_alone(tmp_path, version):
    """As it is installed; and its file, did it not say of which version it is, or say a wrong one."""
    assert evaluate.inspect(*registry.load())[NAME].status is Status.UNAFFECTED
    (module,) = next(item.patch for item in registry.load()[0] if item.patch.name == NAME).modules
    row = doctor(tmp_path, Path(evaluate.locating.locate(module).origin), version)
    assert row["status"] == ("unaffected" if version == "unknown" else "refused"), row
