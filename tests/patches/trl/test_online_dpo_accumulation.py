"""``trl-online-dpo-accumulation``: gradients of TRL's trainers against Online DPO's definition, and one large batch.

online_dpo_accumulation_ranks.py trains a step of each, on one rank, on two, and in DeepSpeed's engine.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.trl import _window
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": (
        "test_what_was_right_is_the_same_bit_for_bit",
        "test_where_nothing_is_to_do_it_is_the_loss_itself",
    ),
    "no side effects": "because it divides a number of upstream's, by numbers read from the trainer",
    "backward compatible": ("test_outside_train_the_setting_counts", "test_in_deepspeed_s_engine_it_is_the_same"),
    "no new blocking": "because it computes on one rank's numbers; no lock, no collective",
    "The patch does not change": "test_what_was_right_is_the_same_bit_for_bit",
    "bit for bit": (
        "test_what_was_right_is_the_same_bit_for_bit",
        "test_the_logged_loss_is_as_it_was",
        "test_in_deepspeed_s_engine_it_is_the_same",
    ),
}
WORKER = "rlhf_patches.patches.trl.proofs.online_dpo_accumulation_ranks"
ALONE = ("OnlineDPO 8", "OnlineDPO 3 short", "OnlineDPO 1", "OnlineDPO 4 accelerate")
OWN = ("OnlineDPO 4 divides", "OnlineDPO 4 backward")
TOGETHER = ("OnlineDPO 4", "OnlineDPO 1")
FACTORS = {1: {"OnlineDPO 8": 8, "OnlineDPO 3 short": 2}, 2: {"OnlineDPO 4": 4}}
"""By the ranks: how much too large the gradient is. A short epoch's last step has two micro-batches."""
SAME = {1: ("OnlineDPO 1", "OnlineDPO 4 accelerate", *OWN), 2: ("OnlineDPO 1",)}
ROUNDING = 1e-5
"""Forward and backward in float32, of a model of one layer: 2**-24 for each of some hundred operations at most."""


@pytest.fixture(scope="module")
def reports(run_ranks):
    found = {1: run_ranks(WORKER, *ALONE, *OWN, levels=TRL, ranks=1)[0], 2: run_ranks(WORKER, *TOGETHER, levels=TRL)[0]}
    assert {each["status"] for each in found.values()} == {"applied"}
    return found


def each(cases):
    return pytest.mark.parametrize(
        ("ranks", "case"), [(ranks, case) for ranks, names in cases.items() for case in names]
    )


@each(FACTORS)
def test_it_was_multiplied_and_is_that_of_the_mean_over_all_prompts(reports, ranks, case):
    before, after = (reports[ranks][state][case] for state in ("before", "after"))
    assert before["factor"] == pytest.approx(FACTORS[ranks][case], rel=ROUNDING)
    assert before["error"] == pytest.approx(FACTORS[ranks][case] - 1, rel=1e-3)
    assert after["error"] < ROUNDING


@each(FACTORS)
def test_the_logged_loss_is_as_it_was(reports, ranks, case):
    before, after = (reports[ranks][state][case] for state in ("before", "after"))
    assert after["logged"] == before["logged"]
    if "short" not in case:
        assert after["logged"] == [pytest.approx(after["loss"], abs=1e-4)]


@each(SAME)
def test_what_was_right_is_the_same_bit_for_bit(reports, ranks, case):
    assert reports[ranks]["before"][case]["error"] < ROUNDING
    assert reports[ranks]["after"][case] == reports[ranks]["before"][case]


@each({1: ALONE[:1], 2: TOGETHER[:1]})
def test_reverted_it_is_trl_s_own_again(reports, ranks, case):
    assert reports[ranks]["reverted"][case] == reports[ranks]["before"][case]


def test_in_deepspeed_s_engine_it_is_the_same(run_ranks):
    report = run_ranks(WORKER, "OnlineDPO 2 deepspeed", levels=TRL)[0]
    before, after = (report[state]["OnlineDPO 2 deepspeed"] for state in ("before", "after"))
    assert report["status"] == "applied"
    assert before["error"] < 1e-4, "from weights, of which a step changes the last digits"
    assert after == before


def trainer(**settings):
    """What the function asks of one: windows of eight micro-batches, of which the last has three."""
    settings = {"steps": 1, "engine": "MULTI_GPU", "window": {"current_gradient_accumulation_steps": 3}, **settings}
    return SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=8),
        accelerator=SimpleNamespace(gradient_accumulation_steps=settings["steps"], distributed_type=settings["engine"]),
        **settings["window"],
    )


@pytest.mark.parametrize(
    "settings",
    [{"engine": "DEEPSPEED"}, {"steps": 8}, {"window": {"current_gradient_accumulation_steps": 1}}],
)
def test_where_nothing_is_to_do_it_is_the_loss_itself(settings):
    loss = object()
    assert _window.divided(trainer(**settings), loss) is loss


def hooked():
    model = torch.nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient / 3)
    return model


@pytest.mark.parametrize(
    "own", [{"model": hooked()}, {"_clip_grad_norm": lambda model: None}], ids=["a hook", "clipping"]
)
def test_gradients_that_a_user_may_divide_later_are_left_alone(own):
    loss, users = object(), trainer()
    vars(users).update(own)
    assert _window.divided(users, loss) is loss


def test_outside_train_the_setting_counts():
    """And in older releases of transformers, which have no number for a window."""
    assert _window.divided(trainer(), 24.0) == 24 / 3
    assert _window.divided(trainer(window={}), 24.0) == 24 / 8


# -- other releases


def beside(run_ranks, release, *cases):
    levels = (*TORCH, Level("tests.harness.loading:trl", str(folder(release))))
    (report,) = run_ranks(WORKER, *cases, levels=levels, ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("kind", exhaustive_but(["NashMD", "XPO"], "NashMD"))
def test_nash_md_and_xpo_are_as_in_one_large_batch(run_ranks, kind):
    """Until TRL 1.13.0. Both are means over prompts, so TRL's own gradient of one micro-batch is the right one."""
    report = beside(run_ranks, "trl-1.5", f"{kind} 8", f"{kind} 1")
    before, after = report["before"], report["after"]
    assert report["version"] == "1.5.1"
    right = before[f"{kind} 1"]["norm"]
    assert before[f"{kind} 8"]["norm"] == pytest.approx(8 * right, rel=ROUNDING)
    assert after[f"{kind} 8"]["norm"] == pytest.approx(right, rel=ROUNDING)
    assert after[f"{kind} 8"]["logged"] == before[f"{kind} 8"]["logged"]
    assert after[f"{kind} 1"] == before[f"{kind} 1"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["trl-1.5", "trl-1.16"])
def test_other_releases(run_ranks, release):
    report = beside(run_ranks, release, "OnlineDPO 8", "OnlineDPO 1")
    assert report["before"]["OnlineDPO 8"]["factor"] == pytest.approx(8, rel=ROUNDING)
    assert report["after"]["OnlineDPO 8"]["error"] < ROUNDING
    assert report["after"]["OnlineDPO 1"] == report["before"]["OnlineDPO 1"]
