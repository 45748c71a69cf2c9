"""``trl-distillation-scale``: gradients of TRL's own GKD and GOLD trainers against their definitions.

distillation_scale_ranks.py trains a step of each, on one rank and on two.
"""

from __future__ import annotations

import os
from types import FunctionType, SimpleNamespace

import pytest

from rlhf_patches.patches import _released
from rlhf_patches.patches.trl import _conditions, _window
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": (
        "test_what_was_right_is_the_same_bit_for_bit",
        "test_where_nothing_is_to_do_it_is_trl_s_function",
    ),
    "no side effects": "because it multiplies or divides a number of upstream's, by numbers read from the trainer",
    "backward compatible": (
        "test_a_loss_outside_train_is_trl_s_own",
        "test_what_is_one_s_own_is_left_alone",
        "test_what_the_student_generates_has_the_same_factors",
    ),
    "no new blocking": "because it computes on one rank's numbers; no lock, no collective",
    "bit for bit": (
        "test_what_was_right_is_the_same_bit_for_bit",
        "test_evaluation_is_the_same",
        "test_where_nothing_is_to_do_it_is_trl_s_function",
    ),
    "The patch does not change a loss": (
        "test_what_is_one_s_own_is_left_alone",
        "test_one_line_on_rank_0_says_what_is_left",
        "test_how_often_a_loader_of_one_s_own_gives_a_batch_is_not_known",
    ),
}
WORKER = "rlhf_patches.patches.trl.proofs.distillation_scale_ranks"
ALONE = ("GOLD 4", "ULD 4", "GKD 4", "GOLD 1", "ULD 1", "GOLD 2 generated")
TOGETHER = ("GOLD 2", "GKD 2", "ULD 2", "GKD 2 alone", "GKD 1 generated")
OWN, MORE_OF_ONE_S_OWN = ("Own 2",), ("Decorated 2", "Multiplies 2", "Averages 1")
FACTORS = {1: {"GOLD 4": 1 / 4}, 2: {"GOLD 2": 1 / 4, "GKD 2": 1 / 2}}
"""By the ranks: how much too large the gradient is."""
ULD = {1: ("ULD 4", 4.0), 2: ("ULD 2", 2.0)}
SAME = {1: ("GKD 4", "GOLD 1", "ULD 1"), 2: ("GKD 2 alone",)}
ROUNDING = 1e-5
"""Forward and backward in float32, of a model of one layer: 2**-24 for each of some hundred operations at most."""


@pytest.fixture(scope="module")
def reports(run_ranks):
    found = {1: run_ranks(WORKER, *ALONE, levels=TRL, ranks=1)[0], 2: run_ranks(WORKER, *TOGETHER, *OWN, levels=TRL)[0]}
    assert {each["status"] for each in found.values()} == {"applied"}
    return found


def test_reports_have_the_factor(reports):
    """GOLD's of tokens is the least one, ULD's the largest; GKD's on one rank is none."""
    for ranks, report in reports.items():
        reached = report["reached"]
        assert (reached["least"], reached["most"]) == (FACTORS[ranks][f"GOLD {4 // ranks}"], ULD[ranks][1])
        assert 0 < reached["held"] < reached["asked"] <= reached["calls"]


def each(cases):
    return pytest.mark.parametrize(
        ("ranks", "case"), [(ranks, case) for ranks, names in cases.items() for case in names]
    )


@each(FACTORS)
def test_without_it_the_gradient_has_another_size(reports, ranks, case):
    found, factor = reports[ranks]["before"][case], FACTORS[ranks][case]
    assert found["factor of tokens"] == pytest.approx(factor, rel=ROUNDING)
    assert found["error of tokens"] == pytest.approx(abs(factor - 1), rel=1e-3)


@each(FACTORS)
def test_with_it_it_is_that_of_the_mean_over_all_tokens(reports, ranks, case):
    assert reports[ranks]["after"][case]["error of tokens"] < ROUNDING
    assert len(set(reports[ranks]["after"][case]["tokens"])) > 1, "micro-batches of one length would show less"


@each(FACTORS)
def test_with_it_the_logged_loss_is_the_mean_over_all_tokens(reports, ranks, case):
    before, after = (reports[ranks][state][case]["logged"] for state in ("before", "after"))
    assert after == pytest.approx(before / FACTORS[ranks][case], rel=1e-3)
    assert after == pytest.approx(reports[1]["before"]["GOLD 1"]["logged"], rel=0.1), "GOLD's rows are one token longer"


@pytest.mark.parametrize("ranks", ULD)
def test_the_loss_across_tokenizers_is_that_of_one_micro_batch(reports, ranks):
    """A mean over samples: TRL's own gradient of one micro-batch on one rank has the right size."""
    case, factor = ULD[ranks]
    right = reports[1]["before"]["ULD 1"]["norm"]
    assert reports[ranks]["before"][case]["norm"] == pytest.approx(right * factor, rel=ROUNDING)
    assert reports[ranks]["after"][case]["norm"] == pytest.approx(right, rel=ROUNDING)


@each(SAME)
def test_what_was_right_is_the_same_bit_for_bit(reports, ranks, case):
    assert reports[ranks]["after"][case] == reports[ranks]["before"][case]


def test_without_accumulation_and_on_one_rank_it_was_right(reports):
    for case in ("GKD 4", "GOLD 1"):
        assert reports[1]["before"][case]["error of tokens"] < ROUNDING


@each({1: ALONE, 2: TOGETHER})
def test_evaluation_is_the_same(reports, ranks, case):
    assert reports[ranks]["after"][case]["evaluated"] == reports[ranks]["before"][case]["evaluated"] != 0


@each({1: ALONE, 2: TOGETHER})
def test_a_loss_outside_train_is_trl_s_own(reports, ranks, case):
    """Where nothing has counted the tokens."""
    assert reports[ranks]["after"][case]["outside train()"] == reports[ranks]["before"][case]["outside train()"] != 0


@pytest.mark.parametrize("case", exhaustive_but((*OWN, *MORE_OF_ONE_S_OWN), *OWN))
def test_what_is_one_s_own_is_left_alone(run_ranks, reports, case):
    """A count, a loss, and a step, which may be right already, and are here."""
    report = reports[2] if case in OWN else run_ranks(WORKER, *MORE_OF_ONE_S_OWN, levels=TRL)[0]
    found = report["after"][case]
    assert found == report["before"][case]
    if case != "Averages 1":
        assert found["error of tokens"] < ROUNDING


def test_one_line_on_rank_0_says_what_is_left(monkeypatch, caplog):
    """Once in a process, of the same class; nothing keeps the class."""
    for rank in ("1", "0", "0"):
        if rank != os.environ.get("RANK"):
            _released.stays.cache_clear()  # another process
        monkeypatch.setenv("RANK", rank)
        one = trainer()
        own = lambda: 24.0  # noqa: E731  (not of_trl)
        assert _window.summed(one, own, 9) is own
    (said,) = caplog.messages
    assert said.startswith("trl-distillation-scale: ")
    assert said.endswith("<lambda> is not the release's own: the gradient stays as released")


@pytest.mark.parametrize(("ranks", "case", "factor"), [(1, "GOLD 2 generated", 2), (2, "GKD 1 generated", 2)])
def test_what_the_student_generates_has_the_same_factors(reports, ranks, case, factor):
    """All of them powers of two: the same words, and their gradient to the last bit."""
    before, after = (reports[ranks][state][case] for state in ("before", "after"))
    assert after["tokens"] == before["tokens"]
    assert after["norm"] == factor * before["norm"] != 0
    for mine, other in zip(after["gradient"], before["gradient"], strict=True):
        assert float.fromhex(mine) == factor * float.fromhex(other)


@each({1: ALONE[:1], 2: TOGETHER[:1]})
def test_beside_the_patch_for_transformers_it_is_the_same(reports, ranks, case):
    assert reports[ranks]["beside"][case] == reports[ranks]["after"][case]


@pytest.mark.parametrize(("ranks", "case"), [(1, ALONE[0]), (2, TOGETHER[0])])
def test_reverted_it_is_trl_s_own_again(reports, ranks, case):
    assert reports[ranks]["reverted"][case] == reports[ranks]["before"][case]


def trainer(**settings):
    """What the functions ask of one: four ranks, windows of eight micro-batches, of which the last has three."""
    settings = {"training": True, "average": True, "accelerator_steps": 1, "engine": "MULTI_GPU", **settings}
    others = {name: settings[name] for name in ("loss_is_scaled_for_ga", "get_tp_size") if name in settings}
    return SimpleNamespace(
        model=SimpleNamespace(training=settings["training"]),
        args=SimpleNamespace(average_tokens_across_devices=settings["average"], gradient_accumulation_steps=8),
        accelerator=SimpleNamespace(
            num_processes=4,
            gradient_accumulation_steps=settings["accelerator_steps"],
            distributed_type=settings["engine"],
        ),
        current_gradient_accumulation_steps=3,
        **others,
    )


def of_trl(function):
    """As if TRL had it: told by where its code runs."""
    return FunctionType(function.__code__, {"__name__": "trl.experimental.gkd.gkd_trainer"})


loss = of_trl(lambda: 24.0)


@pytest.mark.parametrize(
    ("function", "items", "settings"),
    [
        *((function, None, {}) for function in (_window.summed, _window.averaged)),  # of images, nothing is counted
        *((function, 9, {"training": False}) for function in (_window.summed, _window.averaged)),
        (_window.summed, 9, {"average": False}),
        (_window.summed, 9, {"get_tp_size": lambda: 4}),
        (_window.averaged, 9, {"loss_is_scaled_for_ga": False}),  # so that Trainer divides
        (_window.averaged, 9, {"accelerator_steps": 8}),  # as in transformers 5.2.0 to 5.5.3
    ],
)
def test_where_nothing_is_to_do_it_is_trl_s_function(function, items, settings):
    assert function(trainer(**settings), loss, items) is loss


@pytest.mark.parametrize("name", ["get_train_dataloader", "_get_train_sampler"])
def test_how_often_a_loader_of_one_s_own_gives_a_batch_is_not_known(name, monkeypatch, caplog):
    """GOLD's gives each batch of a step once for every micro-batch; one that does not has a right number of tokens."""
    _released.stays.cache_clear()
    monkeypatch.setenv("RANK", "0")
    own = trainer()
    setattr(own, name, lambda: None)
    assert _window.summed(own, loss, 9, 8) is loss
    assert [record.message for record in caplog.records] == [
        f"trl-distillation-scale: SimpleNamespace.{name} is not the release's own: the gradient stays as released"
    ]
    assert _window.summed(own, loss, 9)() == 24 * 4, "GKD's is right with any loader"


def test_without_accumulation_any_loader_is_known_to_the_condition():
    """It gives a batch once, as GOLD's own does, and the patch repairs the loss."""
    own = trainer()
    own._get_train_sampler = lambda: None
    own.use_uld_loss, own.generalized_jsd_loss = False, of_trl(lambda num_items_in_batch: 24.0)
    assert _conditions.part_of_micro_batches(own, 9) is None
    own.args.gradient_accumulation_steps = 1
    assert _conditions.part_of_micro_batches(own, 9) == 1 / 4
    assert _window.summed(own, own.generalized_jsd_loss, 9, 1)(9) == 24 * 4


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (lambda: _window.summed(trainer(), loss, 9), 24 * 4),
        (lambda: _window.summed(trainer(), loss, 9, 8), 24 * 4 * 8),
        (lambda: _window.summed(trainer(average=False), loss, 9, 8), 24 * 8),
        (lambda: _window.summed(trainer(get_tp_size=lambda: 2), loss, 9), 24 * 2),
        (lambda: _window.averaged(trainer(), loss, 9), 24 / 3),
        (lambda: _window.averaged(trainer(accelerator_steps=8, engine="DEEPSPEED"), loss, 9), 24 / 3),
    ],
)
def test_factors(found, wanted):
    assert found()() == wanted


# -- other releases


def beside(run_ranks, release, *cases):
    levels = (*TORCH, Level("tests.harness.loading:trl", str(folder(release))))
    (report,) = run_ranks(WORKER, *cases, levels=levels, ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.exhaustive
def test_before_1_7_it_was_multiplied(run_ranks):
    """Micro-batches of one sample, so that the mean of the means is that of the samples."""
    report = beside(run_ranks, "trl-1.5", "GOLD 8", "ULD 8", "ULD 1")
    before, after = report["before"], report["after"]
    assert report["version"] == "1.5.1"
    assert report["reached"]["least"] == report["reached"]["most"] == 8
    assert before["GOLD 8"]["factor of means"] == pytest.approx(8, rel=ROUNDING)
    assert after["GOLD 8"]["error of means"] < ROUNDING
    right = before["ULD 1"]["norm"]
    assert (before["ULD 8"]["norm"], after["ULD 8"]["norm"]) == pytest.approx((8 * right, right), rel=ROUNDING)
    for case in ("GOLD 8", "ULD 8", "ULD 1"):
        assert after[case]["evaluated"] == before[case]["evaluated"]
    assert report["beside"]["GOLD 8"] == after["GOLD 8"]
    assert after["ULD 1"] == before["ULD 1"]


@pytest.mark.exhaustive
def test_the_newest_release_has_it_still(run_ranks):
    report = beside(run_ranks, "trl-1.16", "GOLD 4", "GKD 4", "ULD 4", "ULD 1")
    assert report["version"] == "1.16.0"
    assert report["before"]["GOLD 4"]["factor of tokens"] == pytest.approx(1 / 4, rel=ROUNDING)
    assert report["after"]["GOLD 4"]["error of tokens"] < ROUNDING
    assert report["after"]["GKD 4"] == report["before"]["GKD 4"]
    right = report["before"]["ULD 1"]["norm"]
    assert report["before"]["ULD 4"]["norm"] == pytest.approx(4 * right, rel=ROUNDING)
    assert report["after"]["ULD 4"]["norm"] == pytest.approx(right, rel=ROUNDING)
