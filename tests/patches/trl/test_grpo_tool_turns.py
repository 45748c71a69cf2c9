"""``trl-grpo-tool-turns``: TRL's own tool loop and `VLLMGeneration`, with a server whose answers tell what was asked.

tool_loop.py has the server: what it answers is made from the prompt alone. A turn is right where it is what that very
conversation, up to there, is answered; and so are its log-probabilities.
"""

from __future__ import annotations

import os

import pytest

from rlhf_patches.patches.trl.grpo_tool_turns import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same",
    "no side effects": "because a variable of the context says it, and nothing is written to what the user holds",
    "backward compatible": ("test_what_was_right_is_the_same", "test_a_subclass_that_overrides_the_method_works"),
    "no new blocking": "because it is a number on one rank: no lock, no collective",
    "was right": "test_what_was_right_is_the_same",
    "first turn is unchanged": "test_each_conversation_is_continued_with_its_own_turn",
    "gives each rank its own": "test_grpo_tool_lockstep.py::test_together_with_the_patch_of_one_rank",
}
WORKER = "rlhf_patches.patches.trl.proofs.tool_loop_ranks"
ASKED = ("server", "evaluated", "one turn")
SAME = ("colocate", "no tools", "not vllm")
BESIDE = Level("tests.harness.loading:trl", str(folder("trl-1.5")))


class TestContract(PatchContract):
    patch = PATCH
    releases = (*(f"trl=={name}" for name in ("1.0.0", "1.1.0", "1.2.0", "1.9.2", "1.10.0", "1.14.0")), "trl==1.14.1")
    held = RULE_COVERAGE


@pytest.fixture
def report(run_ranks):
    given = ("--patches", PATCH.name, *ASKED, *SAME)
    (found,) = run_ranks(WORKER, *given, levels=(*TORCH, BESIDE), ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == ("1.5.1", {PATCH.name: "applied"})
    assert 0 < found["reached"]["held"] < found["reached"]["asked"]  # not in one process
    return found


def wrong(found):
    """How many turns were made for another conversation, and whether one of them is a first turn."""
    return sum(turns.count("wrong") for turns in found["turns"]), any(turns[0] == "wrong" for turns in found["turns"])


def is_repaired(found, case):
    for state in ("before", "reverted"):
        if state in found:
            number, first = wrong(found[state][case])
            assert number >= 2, state
            assert not first, state
            assert any(n == 2 for _, n in found[state][case]["asked"][1:]), "of each prompt two, after a tool call too"
    assert wrong(found["after"][case]) == (0, False)
    first, *others = found["after"][case]["asked"]
    assert first == found["before"][case]["asked"][0] == [4, 2]
    assert others == ([[5, 1], [2, 1]] if case != "one turn" else [[5, 1]]), "each conversation that called, once"


@pytest.mark.parametrize("case", ASKED)
def test_each_conversation_is_continued_with_its_own_turn(report, case):
    """Of the eight conversations five call the tool, and then two again."""
    is_repaired(report, case)


@pytest.mark.parametrize("case", SAME)
def test_what_was_right_is_the_same(report, case):
    assert report["after"][case] == report["before"][case] == report["reverted"][case]
    assert "failed" not in report["after"][case]


def test_a_subclass_that_overrides_the_method_works(report):
    """It has the signature that it had."""
    assert report["overridden"] == {"before": "wrong", "after": "own"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["1.0.0", "1.1.0", "1.2.0", "1.9.2", "1.10.0", "1.14.0"])
def test_other_releases(run_ranks, version):
    """The transformers of 1.5.1, with which all of these work."""
    folders = [unpacked.folders(f"trl=={version}"), str(folder("trl-1.5"))]
    level = Level("tests.harness.loading:transformers_alone", os.pathsep.join(folders))
    given = ("--patches", PATCH.name, "server", "colocate")
    (found,) = run_ranks(WORKER, *given, levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == (version, {PATCH.name: "applied"})
    is_repaired(found, "server")
    assert found["after"]["colocate"] == found["before"]["colocate"]
