"""trl-metrics-deadlock: what reward functions log on two ranks of TRL's own GRPO and RLOO trainers (1.5.1).

metrics_deadlock_ranks.py trains a step of each; what is expected is written down here.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": (
        "because only asking the other ranks tells whether they have logged the same; one process asks none"
    ),
    "no side effects": "test_where_all_ranks_log_the_same_names_nothing_changes",
    "backward compatible": "test_what_worked_without_it_has_the_same_mean",
    "no new blocking": ("test_every_rank_has_what_any_has_logged", "test_what_is_no_number_is_an_error_on_every_rank"),
}
WORKER = "rlhf_patches.patches.trl.proofs.metrics_deadlock_ranks"
BOTH = pytest.mark.parametrize("kind", ["GRPO", "RLOO"])

# The mean of all that is logged; in a column the values of rank 0, then those of rank 1: rank and number of the sample.
EXPECTED = {
    "as many, but others": {
        "metrics": {"one": 3.0, "zero": 1.0},
        "columns": {"a": ["00", "01", None, None], "b": [None, None, "10", "11"]},
    },
    "the same": {"metrics": {"both": (1 + 2 + 5 + 7) / 4}, "columns": {"a": ["00", "01", "10", "11"]}},
    "on one rank": {"metrics": {"one": (3 + 5) / 2}, "columns": {"b": [None, None, "10", "11"]}},
    "different numbers": {"metrics": {"both": (1 + 2 + 4.5 + 5) / 4, "one": 2.0}, "columns": {}},
    "vectors": {"metrics": {"both": (0.5 + 3.5) / 2, "one": (1 + 3) / 2}, "columns": {}},
    "arrays of one": {"metrics": {"both": 2.0}, "columns": {}},
    "vectors on one rank": {"metrics": {"one": (2 + 0.5 + 1.5 + 3 + 1) / 5}, "columns": {}},
    "nothing": {"metrics": {}, "columns": {}},
}


@pytest.fixture(scope="module")
def reports(run_ranks):
    return run_ranks(WORKER, levels=(*TORCH, Level("tests.harness.loading:trl", str(folder("trl-1.5")))))


def test_the_release_is_affected(reports):
    assert [(report["version"], report["status"]) for report in reports] == [("1.5.1", "applied")] * 2


@BOTH
def test_unpatched_a_metric_is_mixed_with_another(reports, kind):
    """As many names, but others: each rank has the mean of both under its own name, and all values in its column."""
    for state in ("before", "reverted"):
        for rank, (metric, column) in enumerate((("zero", "a"), ("one", "b"))):
            found = reports[rank][state]["as many, but others"][kind]
            assert found["metrics"] == {metric: (1 + 3) / 2}
            assert found["columns"] == {column: ["00", "01", "10", "11"]}


def test_unpatched_the_rank_that_logs_waits_in_vain(reports):
    """Rank 0, which logs nothing, is done; rank 1 waits until the limit of three seconds."""
    assert reports[0]["stalled"]["failed"] is None
    assert reports[0]["stalled"]["seconds"] < 2.5
    assert "Timed out" in reports[1]["stalled"]["failed"]
    assert reports[1]["stalled"]["seconds"] >= 3


@BOTH
@pytest.mark.parametrize("case", EXPECTED)
def test_every_rank_has_what_any_has_logged(reports, kind, case):
    """Exactly: sums and quotients of these numbers are numbers of float32."""
    for report in reports:
        assert report["after"][case][kind] == EXPECTED[case]


@BOTH
def test_where_all_ranks_log_the_same_names_nothing_changes(reports, kind):
    for report in reports:
        before, after, reverted = (report[state]["the same"][kind] for state in ("before", "after", "reverted"))
        assert before == after == reverted


@BOTH
@pytest.mark.parametrize("case", ["vectors", "arrays of one"])
def test_what_worked_without_it_has_the_same_mean(reports, kind, case):
    """Vectors on every rank, in half precision too."""
    for report in reports:
        before, after, reverted = (report[state][case][kind] for state in ("before", "after", "reverted"))
        assert before == after == reverted == EXPECTED[case]


def test_what_is_no_number_is_an_error_on_every_rank(reports):
    """After the collective: no rank waits for another."""
    for report in reports:
        assert report["no number"].startswith("log_metric('one', ...) on rank 1: expected numbers; TypeError: ")


@pytest.mark.exhaustive
def test_the_same_as_1_14(run_ranks):
    """The release that repairs it."""
    for report in run_ranks(WORKER, "--released", levels=TRL):
        assert report["version"] == "1.14.2"
        assert len(report["released"]) == 5
        for case, found in report["released"].items():
            assert found == {"GRPO": EXPECTED[case], "RLOO": EXPECTED[case]}
