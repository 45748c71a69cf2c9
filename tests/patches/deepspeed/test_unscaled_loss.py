"""``deepspeed-unscaled-loss`` on real engines, against SGD in float64 (half_precision_ranks.py).

Weights are rounded to float16: 1e-3 of their way.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.deepspeed import _of_half_precision
from rlhf_patches.patches.deepspeed._half_precision_conditions import divides_unscaled, keeps_gradients
from rlhf_patches.patches.deepspeed.proofs import half_precision_ranks
from tests.harness.forkserver import beside

RULE_COVERAGE = {
    "minimal scope": "test_what_is_not_affected_is_as_released",
    "no side effects": "because a loss is multiplied, and nothing is written",
    "backward compatible": ("test_what_is_not_affected_is_as_released", "test_users_code_is_as_released"),
    "no new blocking": "because it is arithmetic on one rank: no lock, no collective",
    "known": "test_users_code_is_as_released",
    "With a scale of 1 nothing changes": "test_users_code_is_as_released",
    "Checkpoints hold the optimizer's scale with and without": "test_checkpoints_load_with_and_without_it",
    "of unscaled gradients, with every optimizer": "test_norms_are_of_unscaled_gradients",
    "`grad` is that of the scaled loss": "test_a_parameter_s_gradient_is_that_of_the_scaled_loss",
    "The value that `backward` returns is the loss": "test_losses_are_returned_as_released",
}
WORKER, PATCH = half_precision_ranks.__name__, "deepspeed-unscaled-loss"
WRONG, SAME = ("fp16", "fp16, accumulated"), ("fp16, own", "fp16, stage 1", "float32")
FUSED = "deepspeed.runtime.fp16.fused_optimizer"
NORMS = (*WRONG, "fp16, growing")


@pytest.fixture(
    scope="module",
    params=[
        None,
        *(pytest.param(f"deepspeed-{each}", marks=pytest.mark.exhaustive) for each in ("0.18.5", "0.18.9", "0.19.7")),
    ],
)
def report(request, run_ranks):
    levels = beside(request.param, "deepspeed")
    (found,) = run_ranks(WORKER, "--more", PATCH, *NORMS, "fp16, skipped", *SAME, levels=levels, ranks=1)
    assert found["status"] == "applied"
    assert found["reached"]["held"] > 0
    return found


@pytest.mark.parametrize("case", WRONG)
def test_steps_are_the_gradient_s(report, case):
    assert min(report[state][case]["error"] for state in ("before", "reverted")) > 0.9
    assert report["after"][case]["error"] < 0.02


@pytest.mark.parametrize("case", NORMS)
def test_norms_are_of_unscaled_gradients(report, case):
    """As released, since no scale was in them; a larger scale after the step is not in them either."""
    for state in ("before", "after"):
        assert [norm for norm, _ in report[state][case]["norms"]] == pytest.approx([1.0] * 4, rel=1e-2)


@pytest.mark.parametrize("case", WRONG)
def test_a_parameter_s_gradient_is_that_of_the_scaled_loss(report, case):
    for state, times in (("before", 1.0), ("after", 1024.0)):
        assert [kept for _, kept in report[state][case]["norms"]] == pytest.approx([times] * 4, rel=1e-2)


def test_a_skipped_step_has_no_norm_of_its_own(report):
    """Infinite, or as in the step before in releases before 0.19."""
    first, *_, last = (norm for norm, _ in report["after"]["fp16, skipped"]["norms"])
    assert first in (0.0, float("inf"))
    assert last == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("case", SAME)
def test_what_is_not_affected_is_as_released(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]
    if "own" not in case:
        assert report["after"][case]["error"] < 0.02


@pytest.mark.parametrize("case", WRONG)
def test_losses_are_returned_as_released(report, case):
    """Of the first step, since later ones have other weights."""
    assert report["after"][case]["loss"][0] == report["before"][case]["loss"][0]


def test_checkpoints_load_with_and_without_it(report):
    """Each state loads those of the states before: as released, patched, reverted."""
    before, after, reverted = (report[state]["resumed"] for state in ("before", "after", "reverted"))
    assert after["1"][0] < 0.02
    assert before["0"][0] > 0.9
    assert reverted["0"] == before["0"]
    assert {scale for each in (before, after, reverted) for _, scale in each.values()} == {1024.0}


def test_two_ranks_train_alike(run_ranks):
    case = "fp16, accumulated"
    found = run_ranks(WORKER, PATCH, case, levels=beside(None, "deepspeed"))
    assert all(each["before"][case]["error"] > 0.9 for each in found)
    assert all(each["after"][case]["error"] < 0.02 for each in found)
    assert found[0]["after"][case]["bits"] == found[1]["after"][case]["bits"]


def test_earlier_releases_scale_it_and_are_left_alone(run_ranks):
    (found,) = run_ranks(WORKER, PATCH, "fp16", levels=beside("deepspeed-0.18.2", "deepspeed"), ranks=1)
    assert found["status"] == "unaffected"
    assert found["before"] == found["after"]
    assert found["before"]["fp16"]["error"] < 0.02


def made(module="deepspeed.runtime.fp16.unfused_optimizer", **more):
    """An engine and its optimizer, as far as they are asked."""
    written = {"__name__": module}
    methods = "\n".join(f"    def {name}(self): ..." for name in ("step", "unscale_and_clip_grads", "zero_grad"))
    exec(f"class FP16_UnfusedOptimizer:\n{methods}\n", written)
    optimizer = written["FP16_UnfusedOptimizer"]()
    vars(optimizer).update(custom_loss_scaler=False, cur_scale=8.0, **more)
    written = {"__name__": "deepspeed.runtime.engine"}
    exec("class DeepSpeedEngine: ...", written)
    engine = written["DeepSpeedEngine"]()
    vars(engine).update(optimizer=optimizer, zero_optimization=lambda: False, bfloat16_enabled=lambda: True)
    return engine


def test_users_code_is_as_released():
    loss = torch.ones((), dtype=torch.float16)
    engine = made()
    assert _of_half_precision.scaled(engine, loss) == 8.0
    assert (divides_unscaled(engine), keeps_gradients(engine)) == (1 / 8, True)
    assert _of_half_precision.cleared(engine)
    newer = made(loss_scale_config=SimpleNamespace(cur_scale=4.0))
    assert (_of_half_precision.scaled(newer, loss), divides_unscaled(newer)) == (4.0, 1 / 4)
    one = made(loss_scale_config=SimpleNamespace(cur_scale=1.0))
    assert _of_half_precision.scaled(one, loss) is loss
    assert divides_unscaled(one) is False
    other = made("torch.optim.sgd")
    assert _of_half_precision.scaled(other, loss) is loss
    assert (divides_unscaled(other), keeps_gradients(other), _of_half_precision.cleared(other)) == (False,) * 3
    fused, legacy = (made(FUSED, fused_adam_legacy=legacy) for legacy in (False, True))
    assert (keeps_gradients(fused), keeps_gradients(legacy)) == (False, True)
    for own in (made(step=lambda: None), made("mine.deepspeed", step=lambda: None)):
        assert _of_half_precision.scaled(own, loss) is loss
        assert not _of_half_precision.cleared(own)
    scaler = made()
    scaler.optimizer.custom_loss_scaler = True
    subclass = made()
    subclass.__class__ = type("Own", (type(subclass),), {"__module__": "mine"})
    for own in (scaler, subclass):
        assert _of_half_precision.scaled(own, loss) is loss
        assert divides_unscaled(own) is None
    engine.zero_optimization = lambda: True
    assert (_of_half_precision.cleared(engine), keeps_gradients(engine)) == (True, False)
