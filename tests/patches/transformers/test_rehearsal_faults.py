"""Relations of the step, of rows and neighbors and of the checkpoint, on real trainers with a fault and without."""

from __future__ import annotations

import pytest
import torch

from rlhf_patches.rehearsal import applied
from rlhf_patches.rehearsal.ranks import Mine
from tests.harness.forkserver import TRL
from tests.patches.transformers import rehearsal_faults_ranks as runs

WORKER = runs.__name__


def rows_of(run_ranks, *cases, ranks=1):
    return run_ranks(WORKER, *cases, levels=TRL, ranks=ranks)


STEPS = {
    "clipped": ("holds", "norm 0.965, max_grad_norm 0.1"),
    "clipped by hand": ("note", "expected 1.000 x (no clipping); Before.on_pre_optimizer_step may do that on purpose"),
    "cleared": ("deviates", "the whole gradient was cleared before the step"),
    "head cleared": ("note", "1 have no gradient at the step: lm_head.weight; Before.on_pre_optimizer_step"),
    **dict.fromkeys(("scaled", "scaled, not fused"), ("holds", "max_grad_norm 0.1")),
    **dict.fromkeys(("infinite", "infinite, not fused"), ("not checked", "the float16 scaler skipped the step")),
    "skipped": ("not checked", "the window was not checked"),
}


def test_the_gradient_at_the_step(run_ranks):
    (found,) = rows_of(run_ranks, *STEPS)
    for case, (verdict, text) in STEPS.items():
        row = found[case][applied.NAME]
        assert row["verdict"] == verdict, case
        assert text in row["text"], case
    assert found["clipped"][applied.NAME]["measured"] == "0.104 x"
    row = found["skipped"]["micro-batch weights"]
    assert (row["verdict"], row["text"]) == ("not checked", "the window's gradient is not finite (float16 scaler)")


def test_a_rank_that_clips_alone(run_ranks):
    for found in rows_of(run_ranks, "on one rank", ranks=2):
        row = found["on one rank"][applied.NAME]
        assert row["verdict"] == "deviates"
        assert row["text"].startswith("rank 1 steps with another gradient than rank 0, and both had the same")
        assert found["on one rank"]["gradient across ranks"]["verdict"] == "holds"


# -- the numbers

SKETCH = torch.tensor([3.0, 4.0, 0.0, 12.0], dtype=torch.float64)
MADE = applied.Made(SKETCH, 13.0, (2, 2), ("a", "b"))


@pytest.mark.parametrize(
    ("now", "most", "by", "verdict", "text"),
    [
        (SKETCH, None, "", "holds", "no clipping"),
        (SKETCH, 26.0, "", "holds", "norm 13, max_grad_norm 26"),
        (SKETCH / 13, 1.0, "", "holds", "norm 13, max_grad_norm 1"),
        (SKETCH / 2, 0.0, "", "deviates", "expected 1.000 x (no clipping)"),
        (SKETCH, 1.0, "", "deviates", "expected 0.077 x (norm 13, max_grad_norm 1)"),
        (SKETCH.flip(0), None, "", "deviates", "of the gradient at the step is not the window's"),
        (SKETCH.flip(0), None, "mine", "note", "mine may do that on purpose"),
        (SKETCH * torch.tensor([1.0, 1.0, 0.0, 0.0]), None, "", "deviates", "1 have no gradient at the step: b"),
        (SKETCH * 0, None, "mine", "deviates", "the whole gradient was cleared"),
    ],
)
def test_one_direction_and_one_factor(now, most, by, verdict, text):
    found = applied.judge(MADE, [Mine(used=now, own=SKETCH)], most, 0.0, by)
    assert (found.verdict.value, text in found.text) == (verdict, True)


def test_ranks_that_already_differed_are_not_told_again():
    other = Mine(used=SKETCH * 2, own=SKETCH * 2)
    assert applied.judge(MADE, [Mine(used=SKETCH, own=SKETCH), other], None, 0.0, "").verdict.value == "holds"
    other = Mine(used=SKETCH * 2, own=SKETCH)
    assert applied.judge(MADE, [Mine(used=SKETCH, own=SKETCH), other], None, 0.0, "mine").verdict.value == "deviates"


def test_rounding_of_a_coarse_gradient():
    rounded = (SKETCH * 1.01, 1.0, 0.0)
    assert applied.judge(MADE, [Mine(used=rounded[0], own=SKETCH)], None, 2**-7, "").verdict.value == "holds"
    assert applied.judge(MADE, [Mine(used=rounded[0], own=SKETCH)], None, 0.0, "").verdict.value == "deviates"
