"""slime-context-parallel-whitening: advantages on data- and context-parallel ranks, against float64 on whole responses.

With a clone slime's own files of a tag, without one the stand-in for them; context_parallel_whitening_ranks.py has the
batches. slime adds up float32, and subtracts a mean from numbers up to 1.5: some 1e-6 absolute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import slime_clone
from tests.harness.forkserver import MEGATRON, Level
from tests.harness.slime_clone import with_clone

WORKER = "tests.patches.slime.context_parallel_whitening_ranks"
FILES = (
    *(f"slime/utils/{name}.py" for name in ("ppo_utils", "distributed_utils")),
    *(f"slime/backends/megatron_utils/{name}.py" for name in ("loss", "cp_utils")),
)
STANDIN = Path(__file__).parents[2] / "harness" / "standins" / "slime_loss"
RUNS = {"v0.3.1": "0.3.1"}
MORE = {"v0.2.0": "0.2.0", "v0.2.2": "0.2.2", "v0.2.4": "0.2.3", "v0.3.0": "0.3.0"}
ROUNDING = 1e-5
RULE_COVERAGE = {
    "minimal scope": "test_without_context_parallelism_nothing_changes",
    "no side effects": "because it chooses a group, and calls slime's own function on slime's tensors",
    "backward compatible": ("test_where_no_rank_has_a_token_advantages_stay", "test_errors_are_slimes"),
    "no new blocking": "test_no_rank_waits",
    "advantages are not changed, as released": "test_where_no_rank_has_a_token_advantages_stay",
    "the group is unchanged": "test_without_context_parallelism_nothing_changes",
}


@pytest.fixture(scope="module")
def start(run_ranks, tmp_path_factory):
    def run(tag, ranks=4, context=2):
        folder = STANDIN
        if tag is not None:
            version = {**RUNS, **MORE, "HEAD": "0.3.1"}[tag]
            folder = slime_clone.write(tmp_path_factory.mktemp("slime"), tag, version, FILES)
        levels = (*MEGATRON, Level("tests.harness.loading:torch", str(folder)))
        return run_ranks(WORKER, str(context), levels=levels, ranks=ranks, TORCHDYNAMO_DISABLE="1")

    return run


EACH = [
    None,
    *(pytest.param(tag, marks=with_clone) for tag in RUNS),
    *(pytest.param(tag, marks=[with_clone, pytest.mark.exhaustive]) for tag in MORE),
]


@pytest.fixture(scope="module", params=EACH, ids=lambda tag: tag or "stand-in")
def reports(request, start):
    found = start(request.param)
    assert all(report["status"] == "applied" for report in found)
    assert all(0 < report["reached"]["held"] < report["reached"]["asked"] for report in found)  # not without the option
    return found


def test_all_tokens_have_one_mean_and_one_variance(reports):
    for state in ("before", "reverted"):
        found = [report[state]["long"] for report in reports]
        assert max(each["off"] for each in found) > 0.3
        assert sum(each["signs"] for each in found) > 0
    for report in reports:
        assert report["after"]["long"]["off"] <= ROUNDING
        assert report["after"]["long"]["signs"] == 0
        assert report["before"]["without"] == report["after"]["without"] == report["reverted"]["without"]


def test_no_rank_waits(reports):
    """Before, the rank that has tokens waits in its group for one that has none."""
    for report in reports:
        for state in ("before", "reverted"):
            assert report[state]["short"]["waiting"]
            assert not report[state]["long"]["waiting"]
        assert not any(report["after"][case]["waiting"] for case in ("long", "short", "nothing"))
        assert report["after"]["short"]["off"] <= ROUNDING
    assert 0 in [report["after"]["short"]["tokens"] for report in reports]


def test_where_no_rank_has_a_token_advantages_stay(reports):
    for report in reports:
        assert report["before"]["nothing"] == report["after"]["nothing"]
        assert report["after"]["nothing"]["advantages"] == []


@pytest.mark.parametrize("tag", [None, pytest.param("v0.3.1", marks=with_clone)], ids=["stand-in", "v0.3.1"])
def test_without_context_parallelism_nothing_changes(start, tag):
    """Bit for bit, and it was right."""
    for report in start(tag, ranks=2, context=1):
        assert report["status"] == "applied"
        for case in ("long", "without", "nothing"):
            assert report["before"][case] == report["after"][case] == report["reverted"][case]
        assert report["after"]["long"]["off"] <= ROUNDING


@with_clone
def test_main_has_been_repaired_and_is_left_alone(start):
    for report in start("HEAD"):
        assert report["status"] == "refused"  # it calls itself 0.3.1
        assert all(report["before"][case]["off"] <= ROUNDING for case in ("long", "short"))
        assert report["after"]["long"] == report["before"]["long"]


def test_errors_are_slimes():
    """Where tokens are there and none counts, a rank that has some raises, as released."""
    torch = pytest.importorskip("torch")

    from rlhf_patches.patches.slime.context_parallel_whitening import whiten

    def refuses(advantages, masks, shift_mean):
        raise ValueError("The global mask sum is zero.")

    empty, some = torch.zeros(0), torch.ones(2)
    assert whiten(refuses, empty, empty, shift_mean=True) is empty
    with pytest.raises(ValueError, match="mask sum"):
        whiten(refuses, some, torch.zeros(2), shift_mean=True)
