"""``trl-grpo-liger-tools``: GRPO with Liger's own loss, some tokens a tool's, against GRPO's formula in float64."""

from __future__ import annotations

import os

import pytest

from rlhf_patches.patches.trl.grpo_liger_tools import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import Level

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same_bit_for_bit",
    "no side effects": "because an argument of Liger's loss is another tensor; the batch is read",
    "backward compatible": "test_what_was_right_is_the_same_bit_for_bit",
    "no new blocking": "because it is a product on one rank: no lock, no collective",
    "the very arguments": "test_what_was_right_is_the_same_bit_for_bit",
    "may mask tool results itself": "test_what_is_the_users_own_stays",
    "as before": "test_tokens_of_tools_are_left_out",
}
WORKER = "rlhf_patches.patches.trl.proofs.grpo_liger_tools_ranks"
WRONG = ("tools", "tools, bnpo")
SAME = ("no tools", "tools, without Liger")
OWN = ("tools, own loss", "tools, own forward", "tools, own compute")
#: Both in float64, but for Liger's softmax, which it computes in float32.
ROUNDING = 1e-5


class TestContract(PatchContract):
    patch = PATCH
    releases = (*(f"trl=={name}" for name in ("0.26.0", "0.27.2", "0.28.0")), "trl==0.29.0")
    held = RULE_COVERAGE


def reported(run_ranks, version):
    folders = [unpacked.folders(f"trl=={version}"), str(side_by_side.folder("trl-1.5"))]
    levels = (
        Level("tests.harness.loading:torch_and_interpreter", str(side_by_side.folder("liger-0.8"))),
        Level("tests.harness.loading:trl_kto_with_liger", os.pathsep.join(folders)),
    )
    (found,) = run_ranks(WORKER, levels=levels, ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == (version, "applied")
    return found


@pytest.fixture
def report(run_ranks):
    return reported(run_ranks, "0.28.0")


def is_repaired(found):
    for case in WRONG:
        assert found["before"][case]["error"] > 0.1
        assert found["after"][case]["error"] < ROUNDING
        assert found["reverted"][case] == found["before"][case]


def test_tokens_of_tools_are_left_out(report):
    is_repaired(report)


@pytest.mark.parametrize("case", SAME)
def test_what_was_right_is_the_same_bit_for_bit(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]
    assert report["before"][case]["error"] < ROUNDING


@pytest.mark.parametrize("case", OWN)
def test_what_is_the_users_own_stays(report, case):
    """It may mask the tokens of tools itself, so it gets the mask that TRL passes."""
    assert report["before"][case] == report["after"][case] == report["reverted"][case]


def test_a_run_is_told_of_liger_s_own_loss_alone(report):
    assert report["reached"]["held"] == len(WRONG)
    assert report["reached"]["calls"] == report["reached"]["asked"] + len(OWN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["0.27.2"])
def test_other_releases(run_ranks, version):
    is_repaired(reported(run_ranks, version))
