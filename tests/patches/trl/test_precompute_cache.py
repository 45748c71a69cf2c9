"""``trl-precompute-cache``: the reference's log-probabilities that a second run of DPO or KTO takes, in float64."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.trl.precompute_cache import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, TRL, Level, beside

RULE_COVERAGE = {
    "minimal scope": ("test_what_was_right_keeps_its_key", "test_what_a_user_has_changed_is_as_released"),
    "no side effects": "because it hands over a text; the files that the release writes have other names",
    "backward compatible": "test_what_a_user_has_changed_is_as_released",
    "no new blocking": "test_two_ranks",
    "Old files stay on disk": "test_a_file_of_the_release_is_not_taken",
    "there nothing changes": ("test_what_was_right_keeps_its_key", "test_what_a_user_has_changed_is_as_released"),
    "The patch does not change": "test_what_a_user_has_changed_is_as_released",
}
WORKER = "rlhf_patches.patches.trl.proofs.precompute_cache_ranks"
USERS = "tests.patches.trl.precompute_cache_own_ranks"
EXACT = 1e-3
"""Sums of some log-probabilities of size 10 in float32; seen are 2e-5. Without the patch 4 and more."""
ALL = ("DPO, max_length", "DPO, truncation_mode", "DPO, ld_alpha", "DPO, default mode", "DPO, equal", "KTO, max_length")
SINCE_1_9 = ("DPO, max_length", "DPO, ld_alpha")
UNTIL_1_8 = ("DPO, max_length", "DPO, truncation_mode", "DPO, default mode")
exhaustive = pytest.mark.exhaustive


class TestContract(PatchContract):
    patch = PATCH
    releases = tuple(
        f"trl=={name}" for name in ("0.28.0", "0.29.0", "1.3.0", "1.4.0", "1.7.0", "1.8.0", "1.9.0", "1.16.0")
    )
    held = RULE_COVERAGE


@pytest.fixture(
    scope="module", params=[pytest.param(None, id="1.14"), "trl-1.5", pytest.param("trl-1.16", marks=exhaustive)]
)
def report(request, run_ranks):
    levels = beside(request.param, "trl") if request.param else TRL
    (found,) = run_ranks(WORKER, levels=levels, ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


def wrong_in(version):
    if version >= "1.9" or version.startswith("1.1"):
        return SINCE_1_9
    return (
        *UNTIL_1_8,
        *(["KTO, max_length"] if version >= "1.4" else []),
        *(["DPO, ld_alpha"] if version >= "1.8" else []),
    )


def is_repaired(report, cases):
    for case in ALL:
        before, after = (report[state][case] for state in ("before", "after"))
        assert (before["error"] > 1) == (case in cases), case
        assert after["error"] < EXACT, case
    assert report["reached"]["held"] == len(cases)


def test_a_run_takes_what_has_its_own_settings(report):
    is_repaired(report, wrong_in(report["version"]))


def test_equal_settings_share_a_file(report):
    for state in ("before", "after"):
        assert report[state]["DPO, equal"]["files"] == 1


def test_what_was_right_keeps_its_key(report):
    for case in set(ALL) - set(wrong_in(report["version"])):
        assert report["after"][case] == report["before"][case], case


def test_reverted_it_is_as_released(report):
    assert report["reverted"] == {case: report["before"][case] for case in report["reverted"]}


@pytest.fixture(scope="module")
def users(run_ranks):
    (found,) = run_ranks(USERS, levels=TRL, ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", ["own collator", "own log-probabilities"])
def test_what_a_user_has_changed_is_as_released(users, case):
    assert users["after"][case] == users["before"][case]
    assert users["before"][case]["error"] > 1


def test_data_in_memory_have_no_cache(users):
    for state in ("before", "after"):
        assert users[state]["in memory"]["error"] < EXACT
        assert users[state]["in memory"]["files"] == 0


@pytest.mark.parametrize("case", ["own loss", "own instance", "own preparation"])
def test_other_code_of_a_user_is_no_reason(users, case):
    """Nor that the release's own collator truncates otherwise than the arguments say, or that nothing is filtered."""
    assert users["before"][case]["error"] > 1
    assert users["after"][case]["error"] < EXACT


def test_a_file_of_the_release_is_not_taken(users):
    """Nobody knows its settings; it stays where it is."""
    found = users["before"]["old file"]
    assert all(each["error"] < EXACT for each in found.values())
    assert [found[name]["files"] for name in ("another", "the same", "again")] == [2, 3, 3]


def test_two_ranks(run_ranks):
    reports = run_ranks(WORKER, "DPO, max_length", levels=TRL, ranks=2, ACCELERATE_USE_CPU="true")
    for found in reports:
        assert found["before"]["DPO, max_length"]["error"] > 1
        assert found["after"]["DPO, max_length"]["error"] < EXACT
        assert found["after"]["DPO, max_length"]["files"] == 2


@exhaustive
@pytest.mark.parametrize("version", ["0.29.0", "1.3.0", "1.4.0", "1.7.0", "1.8.0", "1.9.0"])
def test_other_releases(run_ranks, version):
    level = Level("tests.harness.loading:transformers_alone", unpacked.folders(f"trl=={version}"))
    (found,) = run_ranks(WORKER, levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == (version, "applied")
    is_repaired(found, wrong_in(version))
