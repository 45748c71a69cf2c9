"""``megatron-core-resume-groups`` on megatron-core's own optimizers, two ranks (resume_groups_ranks.py)."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_patches.patches.megatron_core._conditions import of_one_key, of_one_key_in_shards
from rlhf_patches.patches.megatron_core.resume_groups import saved_group
from tests.harness.forkserver import MEGATRON, megatron

RULE_COVERAGE = {
    "minimal scope": "test_where_each_group_has_its_own_key_all_is_the_same",
    "no side effects": "because it chooses among the groups that were loaded, and writes to none",
    "backward compatible": (
        "test_rates_that_were_changed_for_the_resume",
        "test_what_else_may_have_been_saved",
    ),
    "no new blocking": "because a rank compares its own dictionaries; no lock, no collective",
    "as before": ("test_where_each_group_has_its_own_key_all_is_the_same", "test_what_else_may_have_been_saved"),
    "The patch reads checkpoints that were saved without it": "test_a_checkpoint_is_what_it_was",
}
WORKER = "tests.patches.megatron_core.resume_groups_ranks"
RATES = [[1e-4, 1e-5], [1e-2, 1e-3], [1e-4, 1e-5]]
"""``max_lr`` and ``min_lr`` of all else, embedding and output layer, and what does not decay."""


@pytest.fixture(scope="module")
def reports(run_ranks):
    """Each case without the patch and with it, and one after it was reverted."""
    reports = run_ranks(WORKER, levels=MEGATRON)
    assert [(one["version"], one["status"]) for one in reports] == [("0.16.1", "applied")] * 2
    return reports


def rates(groups):
    return [group[:2] for group in groups]


def test_without_it_all_else_is_trained_at_the_rate_of_the_embedding(reports):
    """A hundred times the rate; what has one of its own is right."""
    for report in reports:
        found = report["before"]["distributed"]
        assert rates(found["saved"]) == RATES
        assert rates(found["loaded"]) == [RATES[1], RATES[1], RATES[2]]
        assert found["wrong"]


@pytest.mark.parametrize("case", ["bf16", "fp32"])
def test_without_it_the_other_optimizers_load_nothing(reports, case):
    for report in reports:
        assert "doesn't match the size of optimizer's group" in report["before"][case]["raised"]


@pytest.mark.parametrize("case", ["distributed", "bf16", "fp32"])
def test_with_it_a_resumed_run_is_the_one_that_was_not_interrupted(reports, case):
    """Bit for bit, after a step."""
    for report in reports:
        found = report["after"][case]
        assert rates(found["loaded"]) == RATES
        assert found["loaded"] == found["saved"]
        assert found["wrong"] == []


@pytest.mark.parametrize("case", ["distributed, one rate", "bf16, one rate"])
def test_where_each_group_has_its_own_key_all_is_the_same(reports, case):
    for report in reports:
        assert report["before"][case] == report["after"][case]
        assert report["after"][case]["wrong"] == []


@pytest.mark.parametrize(
    "case", ["distributed, both changed", "distributed, one changed", "bf16, raised", "distributed, raised"]
)
def test_rates_that_were_changed_for_the_resume(reports, case):
    """The saved ones count, as they do for a single rate."""
    for report in reports:
        assert rates(report["after"][case]["loaded"]) == RATES


def test_a_checkpoint_is_what_it_was(reports):
    """It is written as before: what either state has saved is the same, and each is read above."""
    for report in reports:
        for case, found in report["after"].items():
            assert found["file"] == report["before"][case]["file"]


def test_reverted_it_is_megatron_s_own_again(reports):
    for report in reports:
        assert report["reverted"] == {"distributed": report["before"]["distributed"]}


def test_a_run_is_told_whether_it_was_affected(reports):
    """In each resume of groups that have one key, and in no other."""
    for report in reports:
        reached = report["reached"]
        affected = [case for case in report["after"] if not case.endswith("one rate")]
        assert reached["held"] == len(affected) < reached["asked"] == reached["calls"] == len(report["after"])


@pytest.mark.exhaustive
def test_the_repaired_release_is_right_by_itself(run_ranks):
    """0.19 looks groups up by their rates; it refuses those that were changed for the resume."""
    reports = run_ranks(WORKER, levels=megatron("megatron-0.19"))
    for report in reports:
        assert report["status"] == "unaffected"
        for case in ("distributed", "bf16", "fp32", "distributed, one rate", "bf16, one rate"):
            assert report["before"][case] == report["after"][case]
            assert report["before"][case]["wrong"] == []
        for case in ("distributed, both changed", "distributed, one changed"):
            assert report["before"][case]["raised"] == report["after"][case]["raised"]


# ------------------------------------------------------------------------------------- what a checkpoint may hold


def group(name, key="a", **rates):
    return {"name": name, "key": key, **rates}


def chosen(current, saved):
    """The names of what each current group gets."""
    saved = [dict(one) for one in saved]  # other objects, as a checkpoint's are
    by_key = {one["key"]: one for one in saved}
    return [saved_group(one, current, saved, by_key[one["key"]], ("key",))["name"] for one in current]


def test_what_else_may_have_been_saved():
    three = [group(name, max_lr=rate, min_lr=0.0) for name, rate in (("x", 1.0), ("y", 2.0), ("z", 3.0))]
    assert chosen(three, three) == ["x", "y", "z"]
    assert chosen(three, three[::-1]) == ["x", "y", "z"], "whatever the order"
    assert chosen(three, three[:1]) == ["x", "x", "x"], "of one key there is one: Megatron's own answer"
    assert chosen(three, three[:2]) == ["x", "y", "y"], "what was not saved: Megatron's own answer"
    assert chosen(three[1:], three) == ["y", "z"]
    assert chosen([group("", max_lr=5.0), *three[1:]], three) == ["x", "y", "z"], "in order"
    same = [group(name, max_lr=1.0) for name in "xyz"]
    assert chosen(same, same) == ["x", "y", "z"], "with the same rates, too: in order"
    other = [group("x", "b", max_lr=1.0), *three]
    assert chosen(other, other) == ["x", "x", "y", "z"], "another key is another group"
    assert chosen([group("x"), group("y")], [group("v"), group("w")]) == ["v", "w"], "without rates"
    decays = [group("x", start_wd=0.1), group("y", start_wd=0.2), group("z", end_wd=0.2)]
    assert chosen(decays, decays[::-1]) == ["x", "y", "z"]


RATE = st.floats(1e-8, 1.0)


@given(st.lists(RATE, min_size=2, max_size=4, unique=True), st.data())
def test_rates_that_were_rescaled(of_groups, data):
    """All by their own ratio, say, so that one has what the next one had: groups stay themselves."""
    saved = [group(str(at), max_lr=rate) for at, rate in enumerate(sorted(of_groups))]
    ratio = data.draw(st.sampled_from([a / b for a in of_groups for b in of_groups]))
    resumed = [{**one, "max_lr": one["max_lr"] * ratio} for one in saved]
    assert chosen(resumed, saved) == [one["name"] for one in saved]


@given(st.tuples(RATE, RATE), st.tuples(RATE, RATE), st.booleans(), st.booleans())
def test_the_default_s_own(before, after, reversed_before, reversed_after):
    """Whatever the rates are, reversed ones too, and in whatever order."""

    def groups(rates, is_reversed):
        found = [
            group("default", max_lr=rates[0], default_config=True),
            group("other", max_lr=rates[1], default_config=False),
        ]
        return found[::-1] if is_reversed else found

    for resumed in (after, before, before[::-1]):
        current = groups(resumed, reversed_after)
        assert chosen(current, groups(before, reversed_before)) == [one["name"] for one in current]


def test_names_that_nemo_gives():
    saved = [{"pre_key": "a", "name": "x", "max_lr": 1.0}, {"pre_key": "a", "name": "y", "max_lr": 2.0}]
    current = [group("", max_lr=1.0), group("", max_lr=2.0)]
    assert [saved_group(one, current, saved, saved[-1], ("key",))["name"] for one in current] == ["x", "y"]


def test_what_is_told_of_a_resume(monkeypatch):
    def told(current, saved, fsdp=False):
        """Of a distributed optimizer, and of another one."""
        saved = [dict(one) for one in saved]
        found = {"optimizer": {"param_groups": saved}}
        of = {"ddp_config": SimpleNamespace(use_megatron_fsdp=fsdp), "optimizer": SimpleNamespace(param_groups=current)}
        return of_one_key_in_shards(SimpleNamespace(**of), found), of_one_key(current, saved)

    module = "megatron.core.optimizer.optimizer"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(param_group_identifier_keys=("key",)))
    two = [group("x", max_lr=1.0), group("y", max_lr=2.0)]
    same = [group("x", max_lr=1.0), group("y", max_lr=1.0)]
    other = [group("x", "b", max_lr=1.0), group("y", max_lr=2.0)]
    assert told(two, two) == (True, True)
    assert told(two, two, fsdp=True)[0] is False
    assert told(other, other) == (False, False)
    assert told(same, same) == (None, True), "the rates are right, and the parameters are not"
    assert told(two[1:], two) == (None, None)
    assert told(other, two) == (None, None), "Megatron raises"
    assert told([{}], [{}, {}]) == told(None, two) == (None, None)
    assert of_one_key(None, None) is of_one_key_in_shards(SimpleNamespace(), {}) is None
    monkeypatch.delitem(sys.modules, module)
    assert told(two, two) == (None, None)
