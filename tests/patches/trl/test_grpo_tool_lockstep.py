"""``trl-grpo-tool-lockstep``: TRL's own tool loop and `VLLMGeneration` on two gloo ranks with unlike numbers of calls.

tool_loop.py has the engines: what they answer is made from the prompt alone, and they refuse to be asked for nothing.
Where ranks part, the run is over for them: such a case is run alone, before it is repaired.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.trl.grpo_tool_lockstep import PATCH, decide, generates_together
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same_with_no_collective_more",
    "no side effects": "because local variables get other values; nothing is written to what the user holds",
    "backward compatible": "test_what_was_right_is_the_same_with_no_collective_more",
    "no new blocking": ("test_the_ranks_leave_the_loop_together", "test_one_collective_more_for_each_turn"),
    "one more collective": "test_one_collective_more_for_each_turn",
    "takes part without prompts": "test_the_ranks_leave_the_loop_together",
    "stay bit for bit identical": "test_what_was_right_is_the_same_with_no_collective_more",
    "the other ranks wait, as before": "test_one_collective_more_for_each_turn",
    "at the same point as without the patch": "test_a_users_own_turn_is_not_asked_without_prompts",
}
WORKER = "rlhf_patches.patches.trl.proofs.tool_loop_ranks"
TURNS = "trl-grpo-tool-turns"
MIXED = "3 and 1"
PARTED = ("0 and 2", "1 and 3", "one engine, 3 and 1")
"""A rank has no tool call at all; or too few completions; or what ranks hold of one engine is not the same."""
TOGETHER = (*PARTED, "3 and 1, then 1 and 0", "one engine, then 1 and 0", "overlong on one rank")
SAME = ("own engines", "no tools")
EQUAL = "server"
"""Both ranks have the same conversations."""


class TestContract(PatchContract):
    patch = PATCH
    releases = tuple(f"trl=={name}" for name in ("1.0.0rc1", "1.0.0", "1.1.0", "1.9.2", "1.10.0", "1.14.0", "1.16.0"))
    held = RULE_COVERAGE


@pytest.fixture
def run(run_ranks):
    def run(*given, patches=PATCH.name, levels=TRL, ranks=2):
        return run_ranks(WORKER, "--patches", patches, *given, levels=levels, ranks=ranks, ACCELERATE_USE_CPU="true")

    return run


@pytest.fixture
def reports(run):
    """What does not part the ranks, in all states."""
    return run(MIXED, *SAME, EQUAL)


@pytest.fixture
def repaired(run):
    return run("--only", "after", *TOGETHER)


def turns(reports, case, state="after"):
    assert [found[state][case].get("failed") for found in reports] == [None] * len(reports)
    return [kind for found in reports for row in found[state][case]["turns"] for kind in row]


def test_each_rank_gets_its_own_completions(reports):
    """Rank 0 has three conversations that called the tool, rank 1 one."""
    for found in reports:
        assert (found["version"], found["status"]) == ("1.14.2", {PATCH.name: "applied"})
    for state in ("before", "reverted"):
        assert "wrong" in turns(reports, MIXED, state)
    assert set(turns(reports, MIXED)) == {"own"}
    assert reports[0]["after"][MIXED]["asked"] == [[6, 2], [4, 1]]


def test_one_collective_more_for_each_turn(reports):
    """After the only turn, and after it has been found that nobody goes on: twice one object of each rank."""
    for found in reports:
        names = {state: found[state][MIXED]["collectives"] for state in ("before", "after")}
        assert names["after"].count("all_gather_object") == names["before"].count("all_gather_object") + 2
        assert len(names["after"]) == len(names["before"]) + 2
    assert reports[0]["after"][MIXED]["collectives"] == reports[1]["after"][MIXED]["collectives"]


@pytest.mark.parametrize("case", TOGETHER)
def test_the_ranks_leave_the_loop_together(repaired, case):
    assert set(turns(repaired, case)) == {"own"}
    assert repaired[0]["after"][case]["collectives"] == repaired[1]["after"][case]["collectives"]


def test_one_engine_is_given_the_same_on_all_its_ranks(repaired):
    for case in TOGETHER:
        if case.startswith("one engine"):
            assert repaired[0]["after"][case]["asked"] == repaired[1]["after"][case]["asked"]


def test_its_condition_holds_where_numbers_differ(reports, repaired):
    """Not with the same numbers, nor with engines of their own; without tools there is no loop."""
    for found in reports:
        reached = found["reached"]
        assert (reached["calls"], reached["asked"], reached["held"]) == (3, 3, 1)
    for found in repaired:
        reached = found["reached"]
        assert reached["held"] == reached["asked"] == reached["calls"] == len(TOGETHER)


def trainer_of(mode="server", use_vllm=True, ranks=2, size=1):
    return SimpleNamespace(
        use_vllm=use_vllm,
        vllm_mode=mode,
        accelerator=SimpleNamespace(num_processes=ranks),
        vllm_generation=SimpleNamespace(tensor_parallel_size=size),
    )


def test_what_the_condition_says():
    for trainer in (trainer_of(), trainer_of("colocate", size=2), SimpleNamespace(), None):
        assert generates_together(trainer) is None
    for trainer in (trainer_of(use_vllm=False), trainer_of(ranks=1), trainer_of("colocate")):
        assert generates_together(trainer) is False


@pytest.mark.parametrize(
    ("turns", "rank", "size", "told"),
    [
        ([[3, 1], [1, 0], [0, 0]], 0, 2, [True]),
        ([[2, 2], [1, 1], [0, 0]], 1, 2, [False]),
        ([[2, 2]], 1, 2, []),  # ended by the number of iterations
        ([[2, 2, 3, 1], [0, 0, 0, 0]], 0, 2, [False]),
        ([[2, 2, 3, 1], [0, 0, 0, 0]], 3, 2, [True]),
    ],
)
def test_it_is_decided_once_in_a_loop(monkeypatch, turns, rank, size, told):
    import rlhf_patches

    found = []
    monkeypatch.setattr(rlhf_patches, "decided", lambda name, met: found.append(met))
    for _ in range(2):
        generates_together(trainer_of())
        for numbers in turns:
            decide(numbers, rank, size)
    assert found == told * 2


@pytest.mark.parametrize("case", exhaustive_but(PARTED, "1 and 3", "one engine, 3 and 1"))
def test_unpatched_they_fail(run, case):
    """A rank leaves alone: gloo ends a rank whose collective is another one, or it waits, here for 8 seconds.

    One engine has all prompts on each rank, of which each then takes by its own number.
    """
    ended = ""
    reports = []
    try:
        reports = run("--only", "before", case)
    except RuntimeError as error:
        ended = str(error)
    parted = "collective mismatch" in ended or "imed out" in ended
    failed = any("failed" in found["before"][case] for found in reports)
    assert parted or failed or "wrong" in turns(reports, case, "before")


@pytest.mark.parametrize("case", SAME)
def test_what_was_right_is_the_same_with_no_collective_more(reports, case):
    for found in reports:
        assert found["after"][case] == found["before"][case] == found["reverted"][case]
        assert "failed" not in found["after"][case]


@pytest.mark.parametrize("own", [None, "_generate", "_tool_call_loop", "_generate_single_turn", "generate"])
@pytest.mark.parametrize("assigned", [False, True])
def test_a_users_own_turn_is_not_asked_without_prompts(own, assigned):
    """It may have no collective, and may need a prompt: each rank leaves the loop by itself, as released."""
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer.grpo_trainer import GRPOTrainer

    from rlhf_patches.patches.trl import _tool_ranks

    def users(*_):
        raise IndexError("of no prompt")

    def made(kind, methods):
        found = object.__new__(type("Own", (kind,), {} if assigned else methods))
        vars(found).update(methods if assigned else {})
        return found

    engine = own == "generate"
    trainer = made(GRPOTrainer, {own: users} if own and not engine else {})
    trainer.vllm_generation = made(VLLMGeneration, {own: users} if engine else {})
    trainer.use_vllm, trainer.vllm_mode, trainer.accelerator = True, "server", SimpleNamespace(num_processes=2)
    assert _tool_ranks.together(trainer) is (own is None)
    if own:
        assert [_tool_ranks.left(trainer, each) for each in ([], [0])] == [False, True], "without a collective"


def test_together_with_the_patch_of_one_rank(run):
    """1.5.1 has both bugs, in the same function."""
    levels = (*TORCH, Level("tests.harness.loading:trl", str(folder("trl-1.5"))))
    reports = run("--only", "after", MIXED, *PARTED, patches=f"{PATCH.name},{TURNS}", levels=levels)
    for found in reports:
        assert (found["version"], found["status"]) == ("1.5.1", {PATCH.name: "applied", TURNS: "applied"})
    for case in (MIXED, *PARTED):
        assert set(turns(reports, case)) == {"own"}
    assert reports[0]["after"][MIXED]["asked"] == [[6, 2], [4, 1]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["1.0.0", "1.1.0", "1.9.2", "1.10.0", "1.14.0", "1.16.0"])
def test_other_releases(run, version):
    older = [] if version == "1.16.0" else [str(folder("trl-1.5"))]
    folders = os.pathsep.join([unpacked.folders(f"trl=={version}"), *older])
    level = Level("tests.harness.loading:transformers_alone", folders)
    all_of_it = [PATCH.name, *([TURNS] if older else [])]
    if version in ("1.0.0", "1.1.0"):
        all_of_it.append("trl-grpo-tool-overflow")  # of the conversation that does not fit
    reports = run("--only", "after", MIXED, *TOGETHER, patches=",".join(all_of_it), levels=(*TORCH, level))
    for found in reports:
        assert (found["version"], set(found["status"].values())) == (version, {"applied"})
    for case in (MIXED, *TOGETHER):
        assert set(turns(reports, case)) == {"own"}
