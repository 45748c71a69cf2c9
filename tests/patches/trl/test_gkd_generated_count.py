"""trl-gkd-generated-count: steps of TRL's own GKD trainer against the divergence's definition in float64.

The proof's worker trains steps whose completions the student or the teacher generates, on one rank and on two.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import pytest
import torch

from rlhf_patches.patches import _released
from rlhf_patches.patches.trl import _generated_count
from rlhf_patches.patches.trl.gkd_generated_count import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, TRL, Level, beside

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same_bit_for_bit",
    "no side effects": "because it multiplies gradients and a loss of upstream's, as the page says",
    "backward compatible": ("test_what_is_one_s_own_is_left_alone", "test_what_was_right_is_the_same_bit_for_bit"),
    "no new blocking": "test_on_two_ranks",
    "the patch logs so": "test_an_engine_that_keeps_gradients_itself_is_left",
    "bit for bit": "test_what_was_right_is_the_same_bit_for_bit",
    "What is sampled does not change": "test_the_mean_is_over_the_tokens_that_are_trained",
    "all factors are right": ("test_on_two_ranks", "test_gold_counts_the_tokens_of_its_buffer"),
    "The patch does not change": "test_what_is_one_s_own_is_left_alone",
}
WORKER = "rlhf_patches.patches.trl.proofs.gkd_generated_count_ranks"
WRONG = ("generated, accumulated", "generated", "mixed, accumulated", "by the teacher")
SAME = ("none generated", "of the data set")
OWN = ("own", "own, accumulated", "multiplied")
TOGETHER = ("generated, accumulated", "generated", "mixed, accumulated", "each rank's own", "none generated")
ROUNDING = 1e-5
"""Forward and backward in float32, of a model of one layer."""


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==1.7.0", "trl==1.16.0", "trl==1.3.0")
    held = RULE_COVERAGE


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, *WRONG, *SAME, levels=TRL, ranks=1)
    assert found[PATCH.name][1] == "applied"
    return found


def is_repaired(found, case, state="after"):
    before, after = found["before"][case], found[state][case]
    assert before["error"] > 0.05
    assert after["error"] < ROUNDING
    assert after["loss"] == pytest.approx(1, rel=1e-3), "the log has four digits"
    assert after["tokens"] == before["tokens"]


@pytest.mark.parametrize("case", WRONG)
def test_the_mean_is_over_the_tokens_that_are_trained(report, case):
    is_repaired(report, case)
    assert report["before"][case]["loss"] == pytest.approx(report["before"][case]["factor"], rel=1e-3)
    assert report["after"][case]["evaluated"] == report["before"][case]["evaluated"] != 0


@pytest.mark.parametrize("case", SAME)
def test_what_was_right_is_the_same_bit_for_bit(report, case):
    assert report["after"][case] == report["before"][case]
    assert report["after"][case]["error"] < ROUNDING


def test_what_is_one_s_own_is_left_alone(run_ranks):
    (found,) = run_ranks("tests.patches.trl.gkd_generated_count_own_ranks", *OWN, levels=TRL, ranks=1)
    assert found[PATCH.name][1] == "applied"
    assert found["after"] == found["before"]
    assert found["after"]["own"]["error"] < ROUNDING
    assert (found["reached"]["asked"], found["reached"]["held"]) == (0, 0), "it may be right, or not"


def test_how_often_it_was_met(report):
    steps = len(WRONG) + 1  # of the data set, nothing is counted
    assert (report["reached"]["asked"], report["reached"]["held"]) == (steps, len(WRONG))


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"][WRONG[0]] == report["before"][WRONG[0]]


def test_on_two_ranks(run_ranks):
    """With the number of ranks, which the other patch repairs; each rank's own tokens count without it."""
    reports = run_ranks(WORKER, *TOGETHER, levels=TRL)
    for found in reports:
        for case in TOGETHER[:3]:
            is_repaired(found, case, "both")
            assert found["after"][case]["factor"] == pytest.approx(0.5, rel=ROUNDING)
        is_repaired(found, "each rank's own")
        assert found["after"]["none generated"] == found["before"]["none generated"]
        for case in TOGETHER:
            assert found["both"][case]["gradient"] == reports[0]["both"][case]["gradient"]


def step_of(engine="NO", steps=2, **changes):
    """What a step passes on as the number of tokens; its own micro-batch has three, the data set nine."""
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value=engine), num_processes=1, sync_gradients=True, parallelism_config=None
    )
    trainer = SimpleNamespace(
        lmbda=1.0,
        seq_kd=False,
        accelerator=accelerator,
        args=SimpleNamespace(average_tokens_across_devices=True),
        current_gradient_accumulation_steps=steps,
        generalized_jsd_loss=of_trl(lambda: None),
    )
    vars(trainer).update(changes)
    vars(accelerator).update({name: value for name, value in changes.items() if hasattr(accelerator, name)})
    items = changes.get("items", torch.tensor(9))
    labels = _generated_count.generated(torch.tensor([[-100, 1, 2, 3]]))
    seen = []
    for sync in [False] * (steps - 1) + [True]:
        accelerator.sync_gradients = sync
        _generated_count.step(
            trainer,
            lambda *given: seen.append(_generated_count.divisor(given[2])) or torch.tensor(1.0),
            torch.nn.Linear(1, 1),
            {"labels": labels},
            items,
        )
    return seen if items is None or items.dim() else [int(each) for each in seen]


def of_trl(function):
    """As if TRL had it: told by where its code runs."""
    return FunctionType(function.__code__, {"__name__": "trl.experimental.gkd.gkd_trainer"})


def test_an_engine_that_keeps_gradients_itself_gets_the_number_of_one_micro_batch():
    for engine in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU"):  # without one
        assert step_of(engine) == [9, 6]
    assert step_of("DEEPSPEED", 1) == step_of("FSDP", 1) == [3]


@pytest.mark.parametrize("engine", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_an_engine_that_keeps_gradients_itself_is_left(engine, monkeypatch, caplog):
    _released.stays.cache_clear()
    monkeypatch.setenv("RANK", "0")
    assert step_of(engine) == [9, 9]
    (said,) = caplog.messages
    assert said.startswith(f"trl-gkd-generated-count: {engine} keeps the gradients of earlier micro-batches itself")


@pytest.mark.parametrize(
    "changes",
    [
        {"items": None},  # nothing is counted
        {"items": torch.tensor([9, 9])},  # for DataParallel
        {"parallelism_config": "sequence parallelism"},
        {"get_tp_size": lambda: 2, "num_processes": 2},
        {"use_liger_gkd_loss": True},
        {"lmbda": 0.0},
        {"generalized_jsd_loss": lambda: None},
        {"training_step": lambda: None},
    ],
)
def test_what_counts_by_other_rules_is_left(changes):
    found = step_of(**changes)
    items = changes.get("items", 9)
    assert all(each is items for each in found) if "items" in changes else found == [9, 9]


GOLD = "tests.patches.trl.gold_generated_count_ranks"
GENERATED = ("GOLD 2 generated", "GOLD 4 mixed")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_gold_counts_the_tokens_of_its_buffer(run_ranks, ranks):
    found = run_ranks(GOLD, *GENERATED, "GOLD 2", "Loads 2 generated", levels=TRL, ranks=ranks)[0]
    assert found["status"] == ["applied", "applied"]
    for case in GENERATED:
        before, after, both = (found[state][case] for state in ("before", "after", "both"))
        steps = int(case.split()[1])
        assert abs(before["factor of tokens"] * steps * ranks - 1) > 0.05
        assert after["factor of tokens"] == pytest.approx(1 / steps / ranks, rel=ROUNDING)
        assert both["error of tokens"] < ROUNDING
        assert both["tokens"] == before["tokens"]
    for case in ("GOLD 2", "Loads 2 generated"):
        assert found["after"][case] == found["before"][case]
    assert (found["reached"]["asked"], found["reached"]["held"]) == (3, 2), "a loader of one's own is not known"


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["1.7.0", "1.9.0"])
def test_other_releases(run_ranks, version):
    level = Level("tests.harness.loading:transformers_alone", unpacked.folders(f"trl=={version}"))
    repaired_in(run_ranks, (*TORCH, level), version)


@pytest.mark.exhaustive
def test_the_newest_release(run_ranks):
    repaired_in(run_ranks, beside("trl-1.16", "trl"), "1.16.0")


def repaired_in(run_ranks, levels, version):
    (found,) = run_ranks(WORKER, *WRONG[:1], *SAME[:1], levels=levels, ranks=1)
    assert found[PATCH.name] == [version, "applied"]
    is_repaired(found, WRONG[0])
    assert found["after"][SAME[0]] == found["before"][SAME[0]]
