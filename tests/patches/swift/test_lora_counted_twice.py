"""``swift-lora-counted-twice``: the weights that vLLM samples with, against W + s B A in float64.

What is observed is in lora_counted_twice_ranks.py: as released, patched and reverted, in one process.
"""

from __future__ import annotations

import os

import pytest

from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import PACKAGES, Level, swift

WORKER = "rlhf_patches.patches.swift.proofs.lora_counted_twice_ranks"
RULE_COVERAGE = {
    "minimal scope": ("test_without_it_and_at_level_2_nothing_changes", "test_where_the_adapter_is_new"),
    "no side effects": "test_the_policy_is_what_it_was",
    "backward compatible": ("test_without_it_and_at_level_2_nothing_changes", "test_where_the_adapter_is_new"),
    "no new blocking": (
        "because what it calls is the update that comes next anyway, on the same ranks in the same order"
    ),
    "nothing changes": "test_without_it_and_at_level_2_nothing_changes",
    "is not affected": "test_without_it_and_at_level_2_nothing_changes",
    "its rollouts are unchanged": "test_where_the_adapter_is_new",
}

# Parts of what the adapter adds: float32's rounding of W + s B A, and of merging and taking it out again. Seen: 2e-7.
ROUNDING = 1e-5
exhaustive = pytest.mark.exhaustive
AFFECTED = ["swift-3.12", pytest.param("swift-3.12.0", marks=exhaustive), pytest.param("4.0.1", marks=exhaustive)]
BEFORE_3_12 = [pytest.param(each, marks=exhaustive) for each in ("3.10.0", "3.11.3")]


def levels(release):
    if release is not None and release[0].isdigit():
        folders = unpacked.folders(f"ms-swift=={release}"), str(side_by_side.folder("math-verify-0.7"))
        return (*PACKAGES, Level("tests.harness.loading:swift_engine", os.pathsep.join(folders)))
    return swift(release, "swift_engine")


@pytest.fixture(scope="module")
def observe(run_ranks):
    def run(release):
        (report,) = run_ranks(WORKER, levels=levels(release), ranks=1)
        return report

    return run


def right(found):
    return found["off"] == pytest.approx([0, 0, 0], abs=ROUNDING)


@pytest.mark.parametrize("release", AFFECTED)
@pytest.mark.parametrize("case", ["colocate", "server", "in batches", "an adapter given"])
def test_the_adapter_is_counted_once(observe, release, case):
    report = observe(release)
    assert report["status"] == "applied"
    for state in ("before", "reverted"):
        first, *later = report[state][case]["off"]
        assert first <= ROUNDING
        assert min(later) > 0.3, "what the first update merged, as a part of what the policy adds by now"
        assert [adapters for _, adapters in report[state][case]["sent"]] == [0, 1, 2]
    assert right(report["after"][case])
    after = report["after"][case]["sent"]
    assert [adapters for _, adapters in after] == [1, 2, 3]
    assert [full for full, _ in after] == [full for full, _ in report["before"][case]["sent"]]


@pytest.mark.parametrize("release", BEFORE_3_12)
def test_before_3_12_too_and_the_first_rollouts_have_it(observe, release):
    report = observe(release)
    assert report["status"] == "applied"
    for state in ("before", "reverted"):
        for case in ("colocate", "server", "in batches"):
            assert min(report[state][case]["off"][1:]) > 0.3
        first, *later = report[state]["an adapter given"]["off"]
        assert first == pytest.approx(1, rel=ROUNDING), "the base model"
        assert max(later) <= ROUNDING
    cases = ["colocate", "server", "in batches", "an adapter given", "a new adapter", "without"]
    if release != "3.10.0":
        assert report["before"]["level 2, a new adapter"]["off"][1:] == pytest.approx([1, 1], rel=ROUNDING)
        cases += ["level 2", "level 2, a new adapter"]
    for case in cases:
        assert right(report["after"][case]), case
    assert report["after"]["without"] == report["before"]["without"]


@pytest.mark.parametrize("release", AFFECTED)
def test_without_it_and_at_level_2_nothing_changes(observe, release):
    report = observe(release)
    for case in ("without", "level 2", "level 2, a new adapter"):
        assert right(report["before"][case])
        assert report["after"][case] == report["before"][case]


@pytest.mark.parametrize("release", AFFECTED)
def test_its_condition_holds_after_a_resume(observe, release):
    """Three times; never without the option. Nothing is said where the adapter may be new, and at level 2."""
    report = observe(release)
    without = len(report["after"]["without"]["sent"])
    assert (report["reached"]["held"], report["reached"]["asked"]) == (3, 3 + without)


def test_what_the_condition_says():
    from types import SimpleNamespace as Has

    from rlhf_patches.patches.swift.lora_counted_twice import counts_twice

    adapted = Has(peft_config={})

    def of(lora=True, model=adapted, **args):
        return Has(rollout_enable_lora=lora, model=model, args=Has(**args))

    resumed = {"resume_from_checkpoint": "a checkpoint"}
    assert counts_twice(of(**resumed)) is counts_twice(of(adapters=["one"])) is True
    assert counts_twice(of(lora=False, **resumed)) is False
    for trainer in (
        of(),
        of(sleep_level=2, **resumed),
        of(model=Has(), **resumed),
        Has(),
        Has(rollout_enable_lora=True),
    ):
        assert counts_twice(trainer) is None


@pytest.mark.parametrize("release", AFFECTED)
def test_where_the_adapter_is_new(observe, release):
    report = observe(release)
    for state in ("before", "after"):
        assert right(report[state]["a new adapter"])


@pytest.mark.parametrize("release", AFFECTED)
def test_the_policy_is_what_it_was(observe, release):
    report = observe(release)
    assert all(found["kept"] for found in report["after"].values())


@exhaustive
@pytest.mark.parametrize("release", ["4.0.2", "4.1.3"])
def test_releases_that_have_the_repair_agree_and_are_left_alone(observe, release):
    report = observe(release)
    assert report["status"] == "unaffected"
    for case, found in report["before"].items():
        assert right(found), case
    assert report["after"] == report["before"]
