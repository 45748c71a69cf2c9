"""``deepspeed-muon-split-matrices``: steps of real ZeRO-1 and 2 on two ranks, against Muon's definition in float64.

Newton-Schulz runs in bfloat16 until 0.18.9, which is up to 9e-2 of the weights' way, and in float32 on a CPU since.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.deepspeed import muon_split_matrices
from rlhf_patches.patches.deepspeed._muon_conditions import averages_a_split_matrix
from rlhf_patches.patches.deepspeed.proofs import muon_split_matrices_ranks
from tests.harness.forkserver import beside

WORKER = muon_split_matrices_ranks.__name__
WRONG = ("stage 1", "stage 2", "reduced", "large", "round robin", "overlapping", "bfloat16")
SAME = ("whole", "not contiguous", "offload", "another optimizer", "another optimizer, reduced")
ROUNDING = 0.12
RULE_COVERAGE = {
    "minimal scope": "test_where_no_matrix_is_split_every_number_is_upstream_s",
    "no side effects": "because a rank copies what it has received into a buffer that upstream itself writes to",
    "backward compatible": (
        "test_where_no_matrix_is_split_every_number_is_upstream_s",
        "test_a_user_s_classes_and_functions_are_as_released",
    ),
    "no new blocking": "test_the_collectives_are_upstream_s",
    "known": ("test_a_user_s_classes_and_functions_are_as_released", "test_which_optimizers_are_deepspeed_s"),
    "The collectives, their order and their sizes stay": "test_the_collectives_are_upstream_s",
    "get the same gradient as before": "test_one_rank_is_as_released",
    "a rank receives its own part only": "test_a_step_is_muon_s",
    "ZeRO-2 with accumulation also needs": "test_other_affected_releases",
    "One rank, `": ("test_one_rank_is_as_released", "test_where_no_matrix_is_split_every_number_is_upstream_s"),
    "The patch does not change an optimizer on the CPU": (
        "test_where_no_matrix_is_split_every_number_is_upstream_s",
        "test_a_user_s_classes_and_functions_are_as_released",
        "test_which_optimizers_are_deepspeed_s",
    ),
}


@pytest.fixture(scope="module")
def reports(run_ranks):
    found = run_ranks(WORKER, "--more", *WRONG, *SAME, levels=beside("deepspeed-0.18.9", "deepspeed"))
    assert {each["status"] for each in found} == {"applied"}
    return found


@pytest.mark.parametrize("case", WRONG)
def test_a_step_is_muon_s(reports, case):
    for report in reports:
        assert min(report[state][case]["error"] for state in ("before", "reverted")) > 0.2
        assert report["after"][case]["error"] < ROUNDING
    assert reports[0]["after"] == reports[1]["after"]


@pytest.mark.parametrize("case", SAME)
def test_where_no_matrix_is_split_every_number_is_upstream_s(reports, case):
    for report in reports:
        assert report["after"][case] == report["before"][case]


def test_the_collectives_are_upstream_s(reports):
    for report in reports:
        assert report["after"]["collectives"] == report["before"]["collectives"]
        assert all(report["before"]["collectives"].values())


def test_a_user_s_classes_and_functions_are_as_released(reports):
    for report in reports:
        assert report["after"]["own"] == report["before"]["own"]
        assert all(found["error"] > 0.2 for found in report["before"]["own"].values())


def test_one_rank_is_as_released(run_ranks):
    (found,) = run_ranks(WORKER, "stage 1", "reduced", levels=beside("deepspeed-0.18.9", "deepspeed"), ranks=1)
    assert found["status"] == "applied"
    assert found["after"] == found["before"]
    assert found["before"]["stage 1"]["error"] < ROUNDING


@pytest.mark.parametrize("release", ["0.18.2", pytest.param("0.18.5", marks=pytest.mark.exhaustive)])
def test_other_affected_releases(run_ranks, release):
    cases = ("stage 1", "reduced", "together" if release == "0.18.2" else "stage 2")
    for report in run_ranks(WORKER, *cases, levels=beside(f"deepspeed-{release}", "deepspeed")):
        assert report["status"] == "applied"
        for case in cases:
            assert report["before"][case]["error"] > 0.2
            assert report["after"][case]["error"] < ROUNDING


@pytest.mark.parametrize("release", ["deepspeed-0.19.7", None])
def test_repaired_releases_are_left_alone(run_ranks, release):
    found = run_ranks(WORKER, "stage 1", levels=beside(release, "deepspeed"))
    for report in found:
        assert report["status"] == "unaffected"
        assert report["after"] == report["before"]
    if release is None:  # 0.19.7 loses momenta
        assert max(report["before"]["stage 1"]["error"] for report in found) < 1e-3


def optimizer(**more):
    """DeepSpeed's, as far as it is asked."""
    written = {"__name__": "deepspeed.runtime.zero.stage_1_and_2"}
    names = "\n".join(f"    def {name}(self): ..." for name in muon_split_matrices._FUNCTIONS)
    exec(f"class DeepSpeedZeroOptimizer:\n{names}\n", written)
    made = written["DeepSpeedZeroOptimizer"]()
    muon = type("MuonWithAuxAdam", (), {"__module__": "deepspeed.runtime.zero.muon.muon_optimizer"})
    vars(made).update(
        optimizer=muon(),
        reduce_scatter=True,
        cpu_offload=False,
        bit16_groups=[[SimpleNamespace(use_muon=True), SimpleNamespace(use_muon=True)], [SimpleNamespace()]],
        param_to_partition_ids=[{7: [0, 1], 8: [1]}, {9: [0, 1]}],
        ipg_buckets={"float32": SimpleNamespace(params=[(0, 0, 7), (0, 1, 8), (1, 0, 9)])},
    )
    vars(made).update(more)
    return made


def test_which_optimizers_are_deepspeed_s():
    assert muon_split_matrices.needs_whole(optimizer())
    assert not muon_split_matrices.needs_whole(optimizer(cpu_offload=True))
    assert not muon_split_matrices.needs_whole(optimizer(average_tensor=lambda: None))
    own = type("OwnMuon", (type(optimizer().optimizer),), {"__module__": "mine"})
    assert not muon_split_matrices.needs_whole(optimizer(optimizer=own()))
    made = optimizer()
    made.__class__ = type("Own", (type(made),), {"__module__": "mine"})
    assert not muon_split_matrices.needs_whole(made)


def test_which_buckets_meet_it():
    made = optimizer()
    assert averages_a_split_matrix(made, "float32") is True
    assert averages_a_split_matrix(optimizer(reduce_scatter=False), "float32") is False
    assert averages_a_split_matrix(optimizer(cpu_offload=True), "float32") is False
    assert averages_a_split_matrix(optimizer(optimizer=object()), "float32") is False
    assert averages_a_split_matrix(optimizer(average_tensor=lambda: None), "float32") is None
    made.ipg_buckets["float32"].params.pop(0)
    assert averages_a_split_matrix(made, "float32") is False
