"""``deepspeed-group-learning-rates`` on the real schedulers (group_learning_rates_ranks.py)."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.deepspeed._conditions import rates_of_groups
from rlhf_patches.patches.deepspeed.group_learning_rates import of_groups
from tests.harness.forkserver import beside

RULE_COVERAGE = {
    "minimal scope": "test_what_was_asked_for_is_the_same",
    "no side effects": (
        "because one expression of the scheduler's own constructor is another one, which reads the optimizer"
    ),
    "backward compatible": "test_what_was_asked_for_is_the_same",
    "known": (
        "test_a_subclass_that_makes_the_list_itself_gets_the_number",
        "test_rates_of_somebody_else_s_are_released",
    ),
    "does not change a subclass of your own": (
        "test_a_subclass_that_makes_the_list_itself_gets_the_number",
        "test_rates_of_somebody_else_s_are_released",
    ),
    "no new blocking": "because a list is taken as a whole, in place of its first item; no lock, no collective",
    "An explicit `warmup_max_lr` works as before": "test_what_was_asked_for_is_the_same",
}
WORKER = "rlhf_patches.patches.deepspeed.proofs.group_learning_rates_ranks"
RATES, WARMUP, STEPS = (0.1, 0.004, 0.03), 4, 7
WRONG = {"linear": (0.0, False), "logarithmic": (0.0, True), "from a minimum": (0.001, False)}
"""Of each schedule its minimum, and whether it is logarithmic."""


def right(minimum, logarithmic):
    """By the formula of DeepSpeed's documentation, for each group from its own learning rate."""

    def share(step):
        return min(1.0, math.log(step + 1) / math.log(WARMUP) if logarithmic else step / WARMUP)

    return [[minimum + (rate - minimum) * share(step) for rate in RATES] for step in range(STEPS)]


@pytest.fixture(scope="module")
def report(run_ranks):
    """Each schedule without the patch, with it, and after it was reverted."""
    (report,) = run_ranks(WORKER, levels=beside("deepspeed-0.18.9", "deepspeed"), ranks=1)
    assert (report["version"], report["status"]) == ("0.18.9", "applied")
    assert 0 < report["reached"]["held"] < report["reached"]["asked"]  # not where `warmup_max_lr` is given
    return report


@pytest.mark.parametrize("schedule", WRONG)
def test_without_it_all_groups_have_the_first_one_s(report, schedule):
    assert all(len(set(rates)) == 1 for rates in report["before"][schedule])
    assert report["before"][schedule][-1] == [RATES[0]] * len(RATES)


@pytest.mark.parametrize("schedule", WRONG)
def test_with_it_each_group_has_its_own(report, schedule):
    expected = right(*WRONG[schedule])
    assert len(report["after"][schedule]) == STEPS
    for found, wanted in zip(report["after"][schedule], expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-12), "the same formula in another order: a few units in the last"


@pytest.mark.parametrize("schedule", ["one for all", "a list", "decay"])
def test_what_was_asked_for_is_the_same(report, schedule):
    assert report["after"][schedule] == report["before"][schedule]


def test_reverted_it_is_deepspeed_s_own_again(report):
    assert report["reverted"] == report["before"]


def test_a_release_that_is_repaired_is_left_alone(run_ranks):
    """The installed one."""
    (report,) = run_ranks(WORKER, levels=beside(None, "deepspeed"), ranks=1)
    assert report["status"] == "unaffected"
    assert report["after"] == report["before"]
    for schedule, how in WRONG.items():
        for found, wanted in zip(report["after"][schedule], right(*how), strict=True):
            assert found == pytest.approx(wanted, rel=1e-12)


def test_a_subclass_that_makes_the_list_itself_gets_the_number():
    """And it is not said that its run meets the bug."""
    written = {"__name__": "deepspeed.runtime.lr_schedules"}
    exec("class WarmupLR:\n    def __init__(self): ...\n    _format_param = get_lr = step = __init__", written)
    released = written["WarmupLR"]

    class Own(released):
        def _format_param(self, optimizer, value, name):
            return [value * factor for factor in (1.0, 0.1)]

    class Looked(released):
        def __getattribute__(self, name):
            return super().__getattribute__(name)

    rates = [1e-3, 1e-4]
    assert [of_groups(made(), rates) for made in (released, Looked, Own)] == [rates, 1e-3, 1e-3]
    optimizer = SimpleNamespace(param_groups=[{"lr": rate} for rate in rates])
    assert [rates_of_groups(made(), optimizer, None) for made in (released, Looked, Own)] == [True, None, None]


@pytest.mark.parametrize("name", ["__init__", "_format_param", "get_lr", "step"])
def test_rates_of_somebody_else_s_are_released(name):
    """Of a subclass, of the object, or in place of DeepSpeed's: who has met the bug may multiply by each group's ratio,
    and would do so twice."""
    written = {"__name__": "deepspeed.runtime.lr_schedules"}
    exec("class WarmupLR:\n    def __init__(self): ...\n    _format_param = get_lr = step = __init__", written)
    released, rates = written["WarmupLR"], [1e-3, 1e-4]
    optimizer = SimpleNamespace(param_groups=[{"lr": rate} for rate in rates])

    def own(self):
        return [1e-3, 1e-4]

    of_a_subclass, of_the_object, of_another = type("Own", (released,), {}), released(), released()
    setattr(of_a_subclass, name, own)
    setattr(of_the_object, name, own)
    assert of_groups(of_another, rates) == rates
    assert rates_of_groups(of_another, optimizer, None)
    setattr(released, name, own)
    for scheduler in (of_a_subclass.__new__(of_a_subclass), of_the_object, of_another):
        assert of_groups(scheduler, rates) == 1e-3
        assert rates_of_groups(scheduler, optimizer, None) is None


def test_numbers_that_a_subclass_s_own_attributes_change_are_released(monkeypatch):
    """As above, by what is assigned, and by the function that sets a step's rates."""
    written = {"__name__": "deepspeed.runtime.lr_schedules"}
    exec("class WarmupLR:\n    def __init__(self): ...\n    _format_param = get_lr = step = __init__", written)
    exec("def update_lr(groups, lrs): ...", written)
    released, rates = written["WarmupLR"], [1e-3, 1e-4]

    class Multiplied(released):
        max_lrs = property(lambda self: [1e-3, 1e-4], lambda self, value: None)

    class Assigned(released):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)

    monkeypatch.setitem(sys.modules, "deepspeed.runtime.lr_schedules", SimpleNamespace(**written))
    assert [of_groups(made(), rates) for made in (released, Multiplied, Assigned)] == [rates, 1e-3, 1e-3]
    sys.modules["deepspeed.runtime.lr_schedules"].update_lr = lambda groups, lrs: None
    assert of_groups(released(), rates) == 1e-3
