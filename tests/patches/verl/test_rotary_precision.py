"""``verl-rotary-precision`` on models that verl's own functions build (proofs/rotary_precision_ranks.py)."""

from __future__ import annotations

import pytest

from tests.harness import side_by_side
from tests.harness.forkserver import Level, verl
from tests.patches import rotary

RULE_COVERAGE = {
    "minimal scope": "test_what_is_right_is_the_same_bit_for_bit",
    "no side effects": "test_what_is_right_is_the_same_bit_for_bit",
    "backward compatible": "test_what_is_right_is_the_same_bit_for_bit",
    "known": "test_own_code_is_left_as_released",
    "no new blocking": "because the cast is the release's own: no lock, no collective",
    "not transformers' own code": "test_own_code_is_left_as_released",
    "a model in float32": "test_what_is_right_is_the_same_bit_for_bit",
}
WORKER = "rlhf_patches.patches.verl.proofs.rotary_precision_ranks"
# Before 0.8, verl imports what TRL has moved since.
OLD = (Level("tests.harness.loading:trl_dpo", str(side_by_side.folder("trl-0.27"))),)
WRONG = ("reference", "actor")


@pytest.fixture(
    scope="module",
    params=["0.9", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("0.8", "0.7", "0.6"))],
)
def report(request, reported):
    return reported(WORKER, request.param, *(OLD if request.param in ("0.7", "0.6") else ()))


@pytest.mark.parametrize("case", WRONG)
def test_without_it_distant_tokens_are_wrong(report, case):
    """Those that are near are as wrong as bfloat16 is: 0.01."""
    found = report["before"][case]
    assert found["buffers"]["model.rotary_emb.inv_freq"] == "bfloat16"
    rotary.assert_rounded(found)


@pytest.mark.parametrize("case", WRONG)
def test_with_it_they_are_as_exact_as_near_ones(report, case):
    found = report["after"][case]
    assert set(found["buffers"].values()) == {"float32"}
    rotary.assert_repaired(found, report["before"][case])


def test_a_critic_s_are_kept(report):
    assert set(report["before"]["critic"]["buffers"].values()) == {"bfloat16"}
    assert set(report["after"]["critic"]["buffers"].values()) == {"float32"}


def test_what_is_right_is_the_same_bit_for_bit(report):
    assert report["after"]["by default"] == report["before"]["by default"]
    assert report["after"]["by default"]["far"] < 1e-4


def test_own_code_is_left_as_released(report):
    """And rank 0 says so."""
    found = dict(report["after"]["own code"])
    (message,) = found.pop("messages")
    assert "Own is not transformers' own" in message
    assert {**found, "messages": []} == report["before"]["own code"]


def test_reverted_it_is_verl_s_own_again(report):
    for case, found in report["reverted"].items():
        assert {**found, "messages": []} == report["before"][case]


def test_a_run_is_told_whether_it_was_affected(report):
    reached = report["reached"]
    assert (reached["held"], reached["asked"], reached["calls"]) == (3, 4, 5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["0.7", "0.4"])
def test_workers_keep_them(run_ranks, release):
    """Of the releases whose default trainers have them."""
    imported = Level("tests.harness.loading:verl_worker", str(side_by_side.folder("verl-worker")))
    levels = (*verl(release), imported, *OLD)
    (report,) = run_ranks("tests.patches.verl.rotary_precision_workers_ranks", levels=levels, ranks=1)
    assert report["status"] == "applied"
    before, after = report["before"], report["after"]
    for case in ("reference", "actor"):
        rotary.assert_rounded(before[case])
        rotary.assert_exact(after[case])
    assert set(before["critic"]["buffers"].values()) == {"bfloat16"}
    assert set(after["critic"]["buffers"].values()) == {"float32"}
    assert after["by default"] == before["by default"]
    assert report["reverted"] == before
