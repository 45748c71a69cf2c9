"""trl-logit-scaling: losses and gradients of TRL's trainers on models whose forward scales or caps their logits.

SFT against the model's own forward in float64; each trainer against a model that is the same without a factor, which is
right as released.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.trl import _model_logits
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, TRL, Level, beside
from tests.patches.trl.logit_scaling_ranks import TRAINERS, USERS

RULE_COVERAGE = {
    "minimal scope": "test_what_a_user_has_changed_is_as_released",
    "no side effects": "because it reads a config, and hands numbers to TRL's own function",
    "backward compatible": ("test_what_a_user_has_changed_is_as_released", "test_other_models_are_the_same"),
    "no new blocking": "because it reads attributes of a rank's model; no lock, no collective",
    "known": "test_what_a_user_has_changed_is_as_released",
    "does not change": "test_what_a_user_has_changed_is_as_released",
    "stays as released": "test_what_a_user_has_changed_is_as_released",
}
WORKER = "rlhf_patches.patches.trl.proofs.logit_scaling_ranks"
TRAINING = "tests.patches.trl.logit_scaling_ranks"
# float32 sums of a tiny model, of gradients as well: 1e-6 was seen.
ROUNDING = 1e-5
exhaustive = pytest.mark.exhaustive


def levels(release):
    return beside(release, "trl") if release else TRL


@pytest.fixture(scope="module", params=[pytest.param(None, id="1.14"), "trl-1.16"])
def report(request, run_ranks):
    (found,) = run_ranks(WORKER, levels=levels(request.param), ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


def test_the_loss_and_gradient_are_those_of_the_models_own_forward(report):
    wrong = {"RecurrentGemma", *(["Granite"] if report["version"] < "1.15" else [])}
    for model, found in report["after"].items():
        assert found["gradient"] < ROUNDING, model
        assert found["loss"] == pytest.approx(found["own loss"], rel=ROUNDING), model
        assert (report["before"][model]["gradient"] > 0.5) == (model in wrong), model
    assert report["reverted"]["Granite"] == report["before"]["Granite"]
    reached = report["reached"]
    assert (reached.get("held", 0), reached["asked"], reached["calls"]) == (len(wrong), *[len(report["after"])] * 2)


def test_other_models_are_the_same(report):
    assert report["after"]["Qwen2"] == report["before"]["Qwen2"]


@pytest.fixture(scope="module")
def trained(run_ranks):
    def run(release, *cases):
        (found,) = run_ranks(TRAINING, *cases, levels=levels(release), ranks=1, ACCELERATE_USE_CPU="true")
        assert found["status"] == "applied"
        return found

    return run


def is_right(found, case):
    left, right = found[case], found[f"{case}, right"]
    return left["log"] == pytest.approx(right["log"], rel=ROUNDING) and left["gradients"] == pytest.approx(
        right["gradients"], rel=ROUNDING
    )


@pytest.mark.parametrize(
    ("release", "cases"),
    [
        pytest.param(None, ("SFT, LoRA", "DPO", "DPO, compiled", "KTO", "GRPO"), id="1.14"),
        *(
            pytest.param(release, ("SFT",), id=release, marks=exhaustive)
            for release in ("trl-1.5", "transformers-4.57")
        ),
        pytest.param("trl-1.16", tuple(TRAINERS), id="1.16", marks=exhaustive),
    ],
)
def test_each_trainer_is_right(trained, release, cases):
    report = trained(release, *cases)
    for case in cases:
        assert is_right(report["after"], case), case
        assert is_right(report["before"], case) == (release == "trl-1.16"), case
        assert report["after"][f"{case}, right"] == report["before"][f"{case}, right"]


def test_what_a_user_has_changed_is_as_released(trained):
    """A user's forward, the obvious repair by hand, and no factor; a subclass with Granite's forward is repaired."""
    report = trained(None, *USERS)
    for case in set(USERS) - {"own subclass"}:
        assert report["after"][case] == report["before"][case], case
    right = report["after"]["without a factor"]["gradients"]
    assert report["after"]["own subclass"]["gradients"] == pytest.approx(right, rel=ROUNDING)
    assert report["after"]["own logit_scale"]["gradients"] == pytest.approx(right, rel=ROUNDING)


DISTILLED = ("distilled Granite", "distilled RecurrentGemma", "distilled Granite, LoRA")
ASYNCHRONOUS = ("asynchronous Granite", "asynchronous RecurrentGemma")
AS_BEFORE = ("distilled Qwen2", "distilled, own forward")


def release_of(version):
    return (*TORCH, Level("tests.harness.loading:transformers_alone", unpacked.folders(f"trl=={version}")))


@pytest.mark.parametrize(
    ("levels", "wrong", "same"),
    [
        pytest.param(
            lambda: TRL,
            (*DISTILLED, *ASYNCHRONOUS),
            (*AS_BEFORE, "asynchronous Qwen2", "asynchronous, own forward"),
            id="1.14",
        ),
        *(
            pytest.param(
                lambda version=version: release_of(version), wrong, AS_BEFORE[:1], id=version, marks=exhaustive
            )
            for version, wrong in {
                "1.7.0": ASYNCHRONOUS,
                **dict.fromkeys(("1.10.0", "1.12.0", "1.13.0"), (*DISTILLED, *ASYNCHRONOUS)),
            }.items()
        ),
        pytest.param(
            lambda: beside("trl-1.16", "trl"), DISTILLED[1:2], (*AS_BEFORE, DISTILLED[0]), id="1.16", marks=exhaustive
        ),
    ],
)
def test_distillation_and_asynchronous_grpo_have_the_logits_of_the_models_own_forward(run_ranks, levels, wrong, same):
    same = [case for case in same if case.partition(" ")[0] == "asynchronous" or wrong != ASYNCHRONOUS]
    (report,) = run_ranks(
        "tests.patches.trl.logit_scaling_distilled_ranks",
        *wrong,
        *same,
        levels=levels(),
        ranks=1,
        ACCELERATE_USE_CPU="true",
    )
    assert report["status"] == "applied"
    for case in wrong:
        assert report["before"][case]["gradient"] > 0.1, case
        assert max(report["after"][case]["gradient"], report["after"][case]["loss"]) < 1e-4, case
    for case in same:
        assert report["after"][case] == report["before"][case], case
        assert report["after"][case]["gradient"] < 1e-4 or "own" in case, case
    assert report["reached"]["held"] == len(wrong)
    assert report["reached"]["asked"] == len(wrong) + len(same)


@pytest.mark.parametrize("setting", [None, 0])
def test_a_setting_with_which_the_models_own_forward_raises_is_left_to_it(monkeypatch, setting):
    monkeypatch.setattr(_model_logits, "_author", lambda model: "GraniteForCausalLM")
    assert _model_logits._factor(None, SimpleNamespace(logits_scaling=setting)) is None


@pytest.mark.parametrize(("given", "expected"), [({"logit_scale": None}, None), ({"logit_scale": 0.5}, 0.5), ({}, 1.0)])
def test_before_1_11_a_config_without_the_setting_has_1(given, expected):
    model = type("Model", (), {"forward": lambda self: None})()
    assert _model_logits.scale_or_one(model, SimpleNamespace(**given)) == expected
