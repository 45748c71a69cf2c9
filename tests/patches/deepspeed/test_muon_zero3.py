"""``deepspeed-muon-zero3``: steps of real ZeRO-3, against Muon's definition in float64 (muon_zero3_ranks.py).

Newton-Schulz runs in bfloat16 until 0.18.9, which is up to 9e-2 of the weights' way, and in float32 on a CPU since.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.deepspeed import _muon_of_a_step
from rlhf_patches.patches.deepspeed._muon_conditions import orthogonalizes_parts
from rlhf_patches.patches.deepspeed.proofs import muon_zero3_ranks
from tests.harness.forkserver import beside

WORKER = muon_zero3_ranks.__name__
RULE_COVERAGE = {
    "minimal scope": "test_where_there_is_no_bug_every_number_is_upstream_s",
    "no side effects": "test_it_keeps_nothing",
    "backward compatible": (
        "test_where_there_is_no_bug_every_number_is_upstream_s",
        "test_functions_of_a_user_s_are_called_as_released",
        "test_checkpoints_load_with_and_without_it",
    ),
    "no new blocking": (
        "test_two_ranks_train_alike",
        "test_where_there_is_no_bug_every_number_is_upstream_s",
    ),
    "known": ("test_functions_of_a_user_s_are_called_as_released", "test_which_optimizers_are_deepspeed_s"),
    "all other parameters get their update where they got it, and the same numbers": (
        "test_where_there_is_no_bug_every_number_is_upstream_s"
    ),
    "`safe_get_full_grad` then returns the gradient": "test_what_is_read_between_backward_and_step",
    "The patch does not repair an optimizer on the CPU": (
        "test_where_there_is_no_bug_every_number_is_upstream_s",
        "test_which_optimizers_are_deepspeed_s",
    ),
}
WRONG = ("accumulated", "large", "large, accumulated", "rare", "sub-groups", "bfloat16", "in memory", "not contiguous")
SAME = ("one micro-batch", "offload", "stage 2")
ROUNDING = 0.12


@pytest.fixture(scope="module", params=["deepspeed-0.19.7", "deepspeed-0.18.9"])
def report(request, run_ranks):
    (found,) = run_ranks(WORKER, *WRONG, *SAME, levels=beside(request.param, "deepspeed"), ranks=1)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", WRONG)
def test_a_step_is_one_update_of_the_whole_gradient(report, case):
    assert min(report[state][case]["error"] for state in ("before", "reverted")) > 0.3
    assert report["after"][case]["error"] < (ROUNDING if report["version"] == "0.18.9" or case == "bfloat16" else 1e-3)


@pytest.mark.parametrize("case", SAME)
def test_where_there_is_no_bug_every_number_is_upstream_s(report, case, more):
    assert report["after"][case] == report["before"][case] == report["reverted"][case]
    assert more["after"]["operations"] == more["before"]["operations"]
    assert any("c10d" in each for each in more["before"]["operations"])


def test_two_ranks_train_alike(run_ranks):
    """With buckets of one matrix each: gloo refuses upstream's exchange of matrices of several shapes."""
    cases = ("large", "large, accumulated", "not contiguous")
    found = run_ranks(WORKER, *cases, levels=beside("deepspeed-0.19.7", "deepspeed"))
    for case in cases:
        assert min(each["before"][case]["error"] for each in found) > 0.3
        assert max(each["after"][case]["error"] for each in found) < 1e-3
    assert found[0]["after"] == found[1]["after"]


@pytest.fixture(scope="module")
def more(run_ranks):
    (found,) = run_ranks(WORKER, "--more", levels=beside("deepspeed-0.19.7", "deepspeed"), ranks=1)
    return found


def test_functions_of_a_user_s_are_called_as_released(more):
    assert more["after"]["own"] == more["before"]["own"]
    assert all(found["error"] > 0.5 for found in more["before"]["own"].values())


def test_what_is_read_between_backward_and_step(more):
    """Muon's update without the patch, which is far from the gradient; with one micro-batch in both states."""
    assert min(more["before"]["read"]) > 0.5
    one, two = more["after"]["read"]
    assert one == more["before"]["read"][0]
    assert two < 1e-5


def test_checkpoints_load_with_and_without_it(more):
    """Each state loads those of the states before: as released, patched, reverted."""
    before, after, reverted = (more[state]["resumed"] for state in ("before", "after", "reverted"))
    assert after["1"]["error"] < 1e-3
    assert after["0"]["error"] > 0.1  # of the first step
    assert reverted["0"] == reverted["2"] == before["0"]
    assert reverted["1"]["error"] > 0.5


def test_the_newest_release_is_left_alone(run_ranks):
    (found,) = run_ranks(WORKER, "accumulated", "large", levels=beside(None, "deepspeed"), ranks=1)
    assert found["status"] == "unaffected"
    assert found["after"] == found["before"]
    assert max(each["error"] for each in found["before"].values()) < 1e-3


def optimizer(boundary, **more):
    """DeepSpeed's, as far as it is asked."""
    written = {"__name__": "deepspeed.runtime.zero.stage3"}
    names = "\n".join(f"    def {name}(self): ..." for name in _muon_of_a_step._FUNCTIONS)
    exec(f"class DeepSpeedZeroOptimizer_Stage3:\n{names}\n", written)
    made = written["DeepSpeedZeroOptimizer_Stage3"]()
    vars(made).update(
        use_muon=True,
        offload_optimizer=False,
        micro_step_id=0,
        is_gradient_accumulation_boundary=boundary,
        sub_groups_using_muon=[True, False],
        grad_position={0: (0, 0, 4), 1: (1, 0, 4)},
        get_param_id=lambda param: param.ds_id,
        reduce_bucket_size=10,
        contiguous_gradients=True,
    )
    vars(made).update(more)
    return made


def bucket(made):
    params = [SimpleNamespace(ds_id=number, ds_numel=4) for number in range(2)]
    made.ipg_buckets = {torch.float32: SimpleNamespace(params=params)}
    return params


def test_it_keeps_nothing():
    """Of an optimizer whose step has not ended, or whose step has."""
    made = optimizer(False)
    params = bucket(made)
    before = {**vars(made)}
    assert _muon_of_a_step.of_a_bucket(made, params) == ()
    _muon_of_a_step.reduced(made, params)
    assert _muon_of_a_step._steps[made].params == {torch.float32: {0}}  # numbers alone, and no parameter of Adam's
    _muon_of_a_step.ended(made)
    assert made not in _muon_of_a_step._steps
    assert vars(made) == before
    _muon_of_a_step._ended.pop(made)


def test_a_step_that_an_overflow_ends_leaves_nothing_for_the_next():
    made = optimizer(False)
    _muon_of_a_step.reduced(made, bucket(made))
    _muon_of_a_step.ended(made)
    assert made in _muon_of_a_step._ended
    made.is_gradient_accumulation_boundary = True
    params = bucket(made)
    assert _muon_of_a_step.of_a_bucket(made, params) is params
    _muon_of_a_step.reduced(made, params)
    _muon_of_a_step.ended(made)
    assert made not in _muon_of_a_step._ended


@pytest.mark.parametrize("boundary", [True, lambda: True])
def test_gradients_that_are_dropped_begin_another_step(boundary):
    made = optimizer(False)
    _muon_of_a_step.reduced(made, bucket(made))
    made.is_gradient_accumulation_boundary = boundary  # micro_step_id is 0 again after zero_grad()
    params = bucket(made)
    assert _muon_of_a_step.of_a_bucket(made, params) is params
    made.micro_step_id = 1
    made.is_gradient_accumulation_boundary = True
    assert _muon_of_a_step.of_a_bucket(made, params) is params  # a second backward() at the boundary: as released


def test_which_optimizers_are_deepspeed_s():
    made = optimizer(False)
    assert _muon_of_a_step.is_released(made)
    assert not _muon_of_a_step.is_released(optimizer(False, offload_optimizer=True))
    assert not _muon_of_a_step.is_released(optimizer(False, zenflow=True))
    assert not _muon_of_a_step.is_released(optimizer(False, step=lambda: None))
    own = type("Own", (type(made),), {"__module__": "mine"})
    subclass = own.__new__(own)
    vars(subclass).update(vars(made))
    assert not _muon_of_a_step.is_released(subclass)
    assert _muon_of_a_step.of_a_bucket(subclass, "all") == "all"
    params = bucket(made)
    assert orthogonalizes_parts(made, params) is False
    for number, size, contiguous in ((1, 10, True), (0, 7, True), (0, 10, False)):
        vars(made).update(micro_step_id=number, reduce_bucket_size=size, contiguous_gradients=contiguous)
        vars(subclass).update(vars(made))
        assert orthogonalizes_parts(made, params) is True
        assert orthogonalizes_parts(made, params[1:]) is False
        assert orthogonalizes_parts(subclass, params) is None
    made.use_muon = False
    assert orthogonalizes_parts(made, params) is False
