"""``trl-grpo-tool-overflow``: TRL's own tool loop where a tool result does not fit into the context.

tool_loop.py has the engine. The reference is what the batch itself says: a token is the model's where the engine
answers it to all that stands before.
"""

from __future__ import annotations

import os

import pytest

from rlhf_patches.patches.trl.grpo_tool_overflow import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_where_nothing_overflows_it_is_the_same_bit_for_bit",
    "no side effects": "because the numbers of a list that is made there are others",
    "backward compatible": "test_where_nothing_overflows_it_is_the_same_bit_for_bit",
    "no new blocking": "because it is a number in a list: no lock, no collective",
    "trains on the same tokens": "test_the_tool_s_tokens_are_not_the_model_s",
    "bit for bit": "test_where_nothing_overflows_it_is_the_same_bit_for_bit",
}
WORKER = "rlhf_patches.patches.trl.proofs.tool_loop_ranks"
OVERFLOW, FITS = "overflow", "colocate"


class TestContract(PatchContract):
    patch = PATCH
    releases = tuple(f"trl=={name}" for name in ("0.26.0", "0.28.0", "0.29.1", "1.0.0rc1", "1.0.0", "1.1.0", "1.2.0"))
    held = RULE_COVERAGE


def reported(run_ranks, version):
    level = Level(
        "tests.harness.loading:transformers_alone",
        os.pathsep.join([unpacked.folders(f"trl=={version}"), str(folder("trl-1.5"))]),
    )
    given = ("--patches", PATCH.name, OVERFLOW, FITS)
    (found,) = run_ranks(WORKER, *given, levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == (version, {PATCH.name: "applied"})
    return found


@pytest.fixture
def report(run_ranks):
    return reported(run_ranks, "1.1.0")


def is_repaired(found):
    assert found["before"][OVERFLOW]["tokens"] == found["after"][OVERFLOW]["tokens"]
    for state in ("before", "reverted"):
        overflowing = [row for row in found[state][OVERFLOW]["turns"] if "wrong" in row]
        assert len(overflowing) == 2, "both completions of the prompt that leaves no room"
    after = found["after"][OVERFLOW]
    assert {kind for row in after["turns"] for kind in row} == {"own"}
    changed = [
        (score, now)
        for row in range(len(after["mask"]))
        for score, was, now in zip(
            after["scores"][row], found["before"][OVERFLOW]["mask"][row], after["mask"][row], strict=True
        )
        if was != now
    ]
    assert changed, "tokens of a tool"
    assert set(changed) == {(0.0, 0)}, "no more than those that the engine has not sampled"


def test_the_tool_s_tokens_are_not_the_model_s(report):
    is_repaired(report)


def test_where_nothing_overflows_it_is_the_same_bit_for_bit(report):
    assert report["after"][FITS] == report["before"][FITS] == report["reverted"][FITS]
    assert "failed" not in report["after"][FITS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["1.0.0rc1", "1.0.0"])
def test_other_releases(run_ranks, version):
    is_repaired(reported(run_ranks, version))
