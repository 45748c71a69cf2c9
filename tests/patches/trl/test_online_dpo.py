"""``trl-online-dpo-server``, ``-server-padding``, ``-sleep-weights``, ``-tensor-parallel``: TRL's Online DPO with vLLM.

online_dpo_ranks.py trains with what stands for the server and for the engine; the gradient's definition is that
of online_dpo_accumulation_ranks.py, in float64.
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.trl import _engine_prompts, _engine_weights, online_dpo
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": (
        "test_prompts_of_one_length_are_the_tokenizer_s_own",
        "test_an_engine_of_one_rank_gets_the_very_prompts",
        "test_without_sleep_mode_nothing_changes",
    ),
    "no side effects": "because each is an expression of the function that it stands in; nothing is assigned",
    "backward compatible": ("test_an_answer_without_masks_is_left", "test_without_sleep_mode_nothing_changes"),
    "no new blocking": "because prompts are gathered only where the ranks of an engine have to come together anyway",
    "In the trainer's own process": "test_without_sleep_mode_nothing_changes",
    "all prompts have one length nothing changes": "test_prompts_of_one_length_are_the_tokenizer_s_own",
    "Without sleep mode nothing changes": "test_without_sleep_mode_nothing_changes",
    "an engine has one rank nothing changes": "test_an_engine_of_one_rank_gets_the_very_prompts",
    "The patch does not change a trainer": "test_a_rank_waits_for_none_that_a_users_step_may_keep_away",
}
WORKER = "tests.patches.trl.online_dpo_ranks"
NAMES = ("trl-online-dpo-server", "trl-online-dpo-server-padding", "trl-online-dpo-sleep-weights")
TOGETHER = "trl-online-dpo-tensor-parallel"
ROUNDING = 1e-5
"""Forward and backward in float32, of a model of one layer; seen are 6e-7."""
CASES = ("server", "server, one length", "sleep", "awake")


class TestServer(PatchContract):
    patch = online_dpo.PATCH_SERVER
    releases = tuple(f"trl=={name}" for name in ("0.23.0", "0.25.1", "0.26.0", "1.7.1", "1.8.0"))


class TestPadding(PatchContract):
    patch = online_dpo.PATCH_PADDING
    releases = ("trl==0.23.0", "trl==0.26.0", "trl==1.16.0")


class TestSleep(PatchContract):
    patch = online_dpo.PATCH_SLEEP
    releases = ("trl==0.27.2", "trl==0.28.0", "trl==1.16.0")


class TestTogether(PatchContract):
    patch = online_dpo.PATCH_TOGETHER
    releases = ("trl==0.23.0", "trl==0.26.0", "trl==1.16.0")


def beside(release):
    return (*TORCH, Level("tests.harness.loading:trl", str(folder(release))))


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, *CASES, levels=beside("trl-1.5"), ranks=1, ACCELERATE_USE_CPU="true")
    assert [found[name] for name in NAMES] == [["1.5.1", "applied"]] * 3
    return found


def test_a_server_s_completions_are_trained_on_whole(report):
    before, server, after = (report[state]["server"] for state in ("before", "server", "after"))
    assert (before["asked"], after["asked"]) == ([4], [8]), "of eight prompts"
    assert before["error"] > 0.5
    assert server["error"] > 0.1, "the other bug"
    assert after["error"] < ROUNDING
    assert after["logged"] == [pytest.approx(after["loss"], abs=1e-4)]


def test_prompts_of_one_length_are_the_tokenizer_s_own(report):
    case = "server, one length"
    assert report["before"][case]["error"] > 0.5
    assert report["server"][case]["error"] < ROUNDING
    assert report["after"][case] == report["server"][case]
    assert report["padding"][case] == report["before"][case]
    ids, masks = torch.tensor([[5, 6], [7, 8]]), torch.ones(2, 2)
    assert _engine_prompts.unpadded({"input_ids": ids, "attention_mask": masks}) is ids


def test_an_answer_without_masks_is_left():
    ids = [[5, 6], [7, 8]]
    assert _engine_prompts.unpadded({"input_ids": ids}) is ids


def test_after_each_sleep_the_weights_are_the_policy_s(report):
    before, after = (
        [each["weights"] for each in report[state]["sleep"]["generations"]] for state in ("before", "after")
    )
    assert [math.isnan(each) for each in before] == [False, True, False, True]
    assert after == [0.0] * 4
    assert report["after"]["sleep"]["calls"] == ["load", "generate"] * 4


def test_without_sleep_mode_nothing_changes(report):
    assert report["after"]["awake"] == report["before"]["awake"]
    assert report["after"]["awake"]["calls"] == ["load", "generate", "generate"] * 2


def test_each_condition_holds_where_its_bug_is(report):
    """Of two runs with a server, whose prompts differ in length in one, and of two with four generations each."""

    def told(name, state="after"):
        return [report["reached"][state][name][count] for count in ("calls", "asked", "held")]

    server, padding, sleep = NAMES
    assert told(server) == [2, 2, 2]
    assert told(padding) == [2, 2, 1]
    assert told(sleep) == [8, 8, 2], "the second generation of each step, and only with sleep mode"
    assert told(TOGETHER) == [8, 8, 0], "an engine of one rank"


def colocated(asleep=True, step=3, last=3, **more):
    return SimpleNamespace(
        args=SimpleNamespace(vllm_enable_sleep_mode=asleep),
        state=SimpleNamespace(global_step=step),
        _last_loaded_step=last,
        **more,
    )


def test_what_the_conditions_say():
    asks, dropped = _engine_prompts.asks_a_server, _engine_weights.generates_with_dropped_weights
    assert asks(SimpleNamespace(vllm_mode="server"), ["w1"]) is True
    for trainer, prompts in (("server", None), ("server", []), ("colocate", ["w1"])):
        assert asks(SimpleNamespace(vllm_mode=trainer), prompts) is None
    assert asks(SimpleNamespace(), ["w1"]) is None
    assert _engine_prompts.one_engine_per_rank(SimpleNamespace(vllm_tensor_parallel_size=1)) is False
    for trainer in (SimpleNamespace(vllm_tensor_parallel_size=2), SimpleNamespace()):
        assert _engine_prompts.one_engine_per_rank(trainer) is None
    assert dropped(colocated()) is True
    assert dropped(colocated(last=2)) is dropped(colocated(asleep=False)) is False
    users = {"_move_model_to_vllm": lambda: None}
    for trainer in (
        SimpleNamespace(),
        SimpleNamespace(args=colocated().args),
        colocated(**users),
        colocated(last=None),
    ):
        assert dropped(trainer) is None


@pytest.mark.parametrize(
    ("prompts", "differ"),
    [
        ([["a"], ["a"]], False),
        ([["a"], ["b"]], True),
        ([["a"], ["a", "b"]], True),
        ([[{"prompt": "a", "multi_modal_data": {}}]] * 2, None),
        ([[{"prompt": "a", "multi_modal_data": {}}], [{"prompt": "b", "multi_modal_data": {}}]], True),
    ],
)
def test_whether_the_prompts_of_an_engine_differ(prompts, differ):
    assert _engine_prompts._differ(prompts) is differ


@pytest.mark.parametrize("case", ["server", "server, one length"])
def test_reverted_it_is_trl_s_own_again(report, case):
    assert report["reverted"][case] == report["before"][case]


@pytest.mark.parametrize("method", [None, "training_step", "_generate_vllm", "_generate_vllm_colocate"])
@pytest.mark.parametrize(
    ("ranks", "plugin", "fsdp", "waits"),
    [(2, 3, None, True), (2, None, object(), True), (2, 2, None, False), (2, None, None, False), (1, 3, None, False)],
)
def test_a_rank_waits_for_none_that_a_users_step_may_keep_away(method, ranks, plugin, fsdp, waits):
    """TRL's own trainer loads after each sleep; one with a user's method as released, where ranks gather weights."""
    from trl.experimental.online_dpo import OnlineDPOTrainer

    kind = type("Own", (OnlineDPOTrainer,), {} if method is None else {method: lambda self, *_: None})
    trainer = object.__new__(kind)
    deepspeed = plugin and SimpleNamespace(zero_stage=plugin)
    state = SimpleNamespace(deepspeed_plugin=deepspeed, fsdp_plugin=fsdp)
    trainer.accelerator = SimpleNamespace(num_processes=ranks, state=state)
    trainer.args = SimpleNamespace(vllm_enable_sleep_mode=True)
    assert _engine_weights.slept(trainer) is (method is None or not waits)
    trainer.args.vllm_enable_sleep_mode = False
    assert not _engine_weights.slept(trainer)


def test_an_engine_of_one_rank_gets_the_very_prompts():
    seen = []
    llm = SimpleNamespace(generate=lambda prompts, config, use_tqdm: seen.append((prompts, config, use_tqdm)))
    trainer = SimpleNamespace(llm=llm, vllm_tensor_parallel_size=1, generation_config=object())
    prompts = ["w1"]
    _engine_prompts.generated_together(trainer, prompts, None)
    assert seen == [(prompts, trainer.generation_config, False)]
    assert seen[0][0] is prompts


def test_each_rank_of_an_engine_keeps_its_own():
    """Of four ranks and two engines, each rank with another number of prompts."""
    ranks = [["a"], ["b", "c"], ["d", "e", "f"], ["g"]]
    for rank, own in enumerate(ranks):
        llm = SimpleNamespace(generate=lambda prompts, *_, **__: [f"{each}!" for each in prompts])
        trainer = SimpleNamespace(
            llm=llm,
            vllm_tensor_parallel_size=2,
            generation_config=None,
            accelerator=SimpleNamespace(process_index=rank),
        )
        assert _engine_prompts.generated_together(trainer, own, lambda _: ranks) == [f"{each}!" for each in own]


def test_the_ranks_of_an_engine_get_the_same_prompts(run_ranks):
    """Two of them. The stand-in's halves of an engine have one seed, as vLLM's: equal prompts are equal samples."""
    reports = run_ranks(WORKER, "together", levels=beside("trl-1.5"), ACCELERATE_USE_CPU="true")
    assert all(found["trl-online-dpo-tensor-parallel"] == ["1.5.1", "applied"] for found in reports)

    def prompts(state):
        return [[each["prompts"] for each in found[state]["together"]["generations"]] for found in reports]

    first, second = prompts("before")
    assert all(own != other for own, other in zip(first, second, strict=True))
    assert (
        prompts("after")[0] == prompts("after")[1] == [[*own, *other] for own, other in zip(first, second, strict=True)]
    )
    for found in reports:
        reached = found["reached"]["after"][TOGETHER]
        assert reached["held"] == reached["asked"] == reached["calls"] == len(first)
        assert set(found["before"]["together"]["own"]) == set(found["after"]["together"]["own"]) == {True}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("version", "more"),
    [("0.23.1", "transformers-4.57"), ("0.25.1", "transformers-4.57"), ("0.26.0", "transformers-4.57"), ("1.7.1", "")],
)
def test_other_releases_with_a_server(run_ranks, version, more):
    folders = [unpacked.folders(f"trl=={version}"), *([str(folder(more))] if more else [])]
    level = Level("tests.harness.loading:transformers_alone", os.pathsep.join(folders))
    (found,) = run_ranks(WORKER, "server", levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert found[NAMES[0]] == found[NAMES[1]] == [version, "applied"]
    before = found["before"]["server"]
    if version < "0.26":
        assert before["failed"] == "ValueError: too many dimensions 'str'"
    else:
        assert before["error"] > 0.5
    assert found["after"]["server"]["error"] < ROUNDING


@pytest.mark.exhaustive
def test_the_newest_release(run_ranks):
    (found,) = run_ranks(
        WORKER, "server", "sleep", "awake", levels=beside("trl-1.16"), ranks=1, ACCELERATE_USE_CPU="true"
    )
    assert [found[name][1] for name in NAMES] == ["unaffected", "applied", "applied"]
    assert found["before"]["server"]["error"] > 0.1
    assert found["after"]["server"]["error"] < ROUNDING
    assert [each["weights"] for each in found["after"]["sleep"]["generations"]] == [0.0] * 4
    assert found["after"]["awake"] == found["before"]["awake"]
