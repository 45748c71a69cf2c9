"""``deepspeed-empty-groups`` on real DeepSpeed with real schedulers (empty_groups_ranks.py)."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler as schedulers

from rlhf_patches.patches.deepspeed import empty_groups
from rlhf_patches.testing import untouched
from tests.harness.forkserver import beside
from tests.harness.logs import diagnosed

RULE_COVERAGE = {
    "minimal scope": ("test_other_schedulers_are_left_alone", "test_what_was_right_is_the_same"),
    "no side effects": (
        "test_a_scheduler_s_optimizer_is_all_that_changes",
        "test_what_schedulers_see_is_the_optimizer_in_everything_but_its_groups",
    ),
    "backward compatible": (
        "test_what_was_right_is_the_same",
        "test_one_that_does_not_take_it_is_left_alone",
        "test_what_a_scheduler_sees_can_be_copied",
    ),
    "no new blocking": "because a scheduler that cannot be asked or assigned is passed over; no lock, no collective",
    "known": (
        "test_rates_of_those_that_are_left_are_paired_with_them",
        "test_one_that_a_user_has_repaired_sees_what_is_there",
        "test_one_that_was_right_is_the_same",
    ),
    "to those of the remaining groups works as before": "test_one_that_a_user_has_repaired_sees_what_is_there",
    "All other code sees the optimizer's own groups": (
        "test_all_other_code_sees_the_optimizer_s_own_groups",
        "test_one_that_was_right_is_the_same",
    ),
    "identical to it in everything but `param_groups`": (
        "test_what_schedulers_see_is_the_optimizer_in_everything_but_its_groups"
    ),
    "DeepSpeed works without the empty groups, as before": "test_with_it_each_group_has_its_own_rate",
    "checkpoints fit with and without the patch": "test_with_it_each_group_has_its_own_rate",
    "sees the remaining groups, as before": "test_what_was_right_is_the_same",
    "If no group is empty, the patch does nothing": (
        "test_other_schedulers_are_left_alone",
        "test_where_no_group_is_empty_no_object_is_looked_at",
    ),
}
WORKER = "rlhf_patches.patches.deepspeed.proofs.empty_groups_ranks"
RAISES = ("last", "in between", "first", "partitioned", "passed", "sequence", "resumed")
SILENT = "DeepSpeed's own, passed"
JOINED = tuple(f"joined: {how}" for how in ("chained", "chained for", "in sequence", "another for theirs"))
RIGHT = ("one cycle", "called", "none empty", "added later", *JOINED)
FACTORS, START, STEPS = (1.0, 2.0, 3.0), 2.0, 4


def assert_right(found):
    """The rates are those without DeepSpeed, exactly, and the weights have moved by them."""
    assert found["error"] is None
    assert found["rates"] == found["expected"]
    assert found.get("same state", True), "a checkpoint fits with and without the patch"
    for (index, weight), rates in zip(
        found["weights"].items(), zip(*found["expected"][:STEPS], strict=True), strict=True
    ):
        # Plain SGD, whose gradient is the factor; the weights are float32.
        assert weight == pytest.approx([START - FACTORS[int(index)] * sum(rates)] * 4, rel=1e-6)


@pytest.fixture(scope="module")
def report(run_ranks):
    """Each case without the patch, with it, and after it was reverted."""
    (report,) = run_ranks(WORKER, levels=beside(None, "deepspeed"), ranks=1)
    assert (report["version"], report["status"]) == ("0.19.8", "applied")
    return report


@pytest.mark.parametrize("case", RAISES)
def test_without_it_the_scheduler_refuses(report, case):
    assert report["before"][case]["error"] == "zip() argument 2 is longer than argument 1"
    assert diagnosed(report["before"][case]["log"]) == [(empty_groups.PATCH.name, True)]


def test_without_it_deepspeed_s_own_gives_a_group_another_one_s_rate(report):
    found = report["before"][SILENT]
    assert found["error"] is None
    first, second = zip(*found["rates"], strict=True)
    right_first, right_second = zip(*found["expected"], strict=True)
    assert first == right_first
    # From 0.001 up to the removed group's 0.004, of which the third quarter is reached, instead of 0.03.
    assert (second[-1], right_second[-1]) == pytest.approx((0.00325, 0.02275))


@pytest.mark.parametrize("case", [*RAISES, SILENT, *RIGHT])
def test_with_it_each_group_has_its_own_rate(report, case):
    assert_right(report["after"][case])


@pytest.mark.parametrize("case", RIGHT)
def test_what_was_right_is_the_same(report, case):
    for of in ("rates", "weights", "error"):
        assert report["after"][case][of] == report["before"][case][of]


def test_reverted_it_is_deepspeed_s_own_again(report):
    for case, found in report["before"].items():
        for of in ("rates", "weights", "error"):
            assert report["reverted"][case][of] == found[of]


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["0.15.2", "0.18.9"])
def test_an_older_release(run_ranks, release):
    """Without ZeRO-3: on CPUs 0.15.2 asks the program numactl about them."""
    cases = [case for case in (*RAISES, SILENT, *RIGHT) if case != "partitioned"]
    (report,) = run_ranks(WORKER, *cases, levels=beside(f"deepspeed-{release}", "deepspeed"), ranks=1)
    assert (report["version"], report["status"]) == (release, "applied")
    for case in {*cases} & {*RAISES}:
        assert report["before"][case]["error"] == "zip() argument 2 is longer than argument 1"
    for found in report["after"].values():
        assert_right(found)


@pytest.mark.exhaustive
def test_transformers_trainer(run_ranks):
    """With LoRA, and with LoRA+, whose third group of four has the rate of the B matrices."""
    (report,) = run_ranks(
        "tests.patches.deepspeed.empty_groups_trainer_ranks",
        levels=beside("transformers-4.57", "transformers_trainer"),
        ranks=1,
    )
    assert report["status"] == "applied"
    linear = [1.0, 2 / 3, 1 / 3]  # during the three steps
    for case, rates in {"LoRA": [0.01], "LoRA+": [0.01, 0.16]}.items():
        assert report["before"][case]["error"] == "zip() argument 2 is longer than argument 1"
        assert diagnosed(report["before"][case]["log"]) == [(empty_groups.PATCH.name, True)]
        found = report["after"][case]
        assert found["error"] is None
        for at_step, share in zip(found["rates"], linear, strict=True):
            assert at_step == pytest.approx([rate * share for rate in rates])
        assert report["reverted"][case]["error"] == report["before"][case]["error"]


class Scheduler(torch.optim.lr_scheduler.LRScheduler):
    """No more than its class and the optimizer, which is no real one here: torch's takes seconds to be made first."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class Optimizer:
    def __init__(self, sizes):
        self.param_groups = [{"params": [1.0] * size} for size in sizes]
        self.defaults = {"lr": 0.1}


def optimizer(*sizes):
    return Optimizer(sizes)


def test_other_schedulers_are_left_alone():
    """Those of another optimizer, and of one that has no empty group; and what has an optimizer but is no scheduler."""
    mine, another, whole = optimizer(1, 0), optimizer(1, 0), optimizer(1, 1)
    first, passed, *others = (
        Scheduler(mine),
        types.SimpleNamespace(optimizer=mine),
        Scheduler(another),
        Scheduler(whole),
    )
    trainer = types.SimpleNamespace(optimizer=mine)
    empty_groups.keep_for_schedulers(mine, passed)
    empty_groups.keep_for_schedulers(whole, others[1])
    assert [type(one.optimizer) for one in (first, passed)] == [empty_groups.AllGroups] * 2
    assert [one.optimizer for one in (*others, trainer)] == [another, whole, mine]


def test_where_no_group_is_empty_no_object_is_looked_at(monkeypatch):
    monkeypatch.setattr(empty_groups.gc, "get_objects", lambda: pytest.fail("all live objects are looked through"))
    empty_groups.keep_for_schedulers(optimizer(1, 1), None)


def test_a_scheduler_s_optimizer_is_all_that_changes():
    mine = optimizer(1, 0)
    scheduler = torch.optim.lr_scheduler.LRScheduler.__new__(Scheduler)
    scheduler.__dict__.update(optimizer=mine, base_lrs=[0.1, 0.1], last_epoch=3)
    trainer = types.SimpleNamespace(optimizer=mine, scheduler=scheduler, groups=mine.param_groups)
    before = dict(vars(scheduler))
    with pytest.raises(AssertionError, match=r"scheduler\.optimizer") as said, untouched(trainer, contents=True):
        empty_groups.keep_for_schedulers(mine, None)
    assert len([line for line in str(said.value).splitlines() if "." in line]) == 1, said.value
    assert {**vars(scheduler), "optimizer": mine} == before
    assert type(scheduler) is Scheduler


def test_one_that_does_not_take_it_is_left_alone():
    """A scheduler of anybody's class, whose optimizer cannot be assigned, or asked for."""

    class Fixed(Scheduler):
        optimizer = property(lambda self: mine, lambda self, value: None if value is mine else 1 / 0)

    class Broken(Scheduler):
        optimizer = property(lambda self: 1 / 0, lambda self, _: None)

    mine = optimizer(1, 0)
    fixed, _, first = Fixed(mine), Broken(mine), Scheduler(mine)
    empty_groups.keep_for_schedulers(mine, Broken(mine))
    assert fixed.optimizer is mine
    assert type(first.optimizer) is empty_groups.AllGroups


def test_what_schedulers_see_is_the_optimizer_in_everything_but_its_groups():
    """Equal to it from either side, of its class, and what is assigned is the optimizer's."""
    mine, another = optimizer(1, 0), optimizer(1, 0)
    first, second = Scheduler(mine), Scheduler(mine)
    empty_groups.keep_for_schedulers(mine, None)
    seen = first.optimizer
    assert seen == second.optimizer
    assert seen == mine
    assert mine == seen
    assert not mine != seen  # noqa: SIM202  as torch asks
    assert seen != another
    assert seen == copy.copy(seen)
    assert {seen: 1}[mine] == 1
    assert isinstance(seen, Optimizer)
    assert repr(seen) == repr(mine)
    seen.step = 3
    assert mine.step == 3
    del seen.step
    assert not hasattr(mine, "step")


class Repaired(torch.optim.lr_scheduler.LambdaLR):
    """Of somebody who has met the bug."""

    def step(self, epoch=None):
        self.base_lrs = self.base_lrs[: len(self.optimizer.param_groups)]
        super().step(epoch)


class Filtering(torch.optim.lr_scheduler.LambdaLR):
    """Of somebody who has met the bug: no rate for a group that was empty."""

    def __init__(self, optimizer, factor):
        self.full = None
        full = [bool(group["params"]) for group in optimizer.param_groups]
        super().__init__(optimizer, factor)
        self.full = full

    def get_lr(self):
        rates = super().get_lr()
        return rates if self.full is None else [rate for rate, full in zip(rates, self.full, strict=True) if full]


def assigned(optimizer, factor):
    """The same, of one scheduler."""
    made = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    found = made.get_lr
    made.get_lr = lambda: found()[::2]
    return made


class Uncounted(Filtering):
    """The same, by a generator."""

    def get_lr(self):
        return (rate for rate in super().get_lr())


class InATensor(Filtering):
    def get_lr(self):
        return torch.tensor(super().get_lr(), dtype=torch.float64)


class Restarting(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts):
    """The same, of a class whose step() asks for the groups before it asks for the rates."""

    started = False

    def __init__(self, optimizer, factor):
        super().__init__(optimizer, 3)
        self.started = True

    def get_lr(self):
        rates = [rate / (self.last_epoch + 1) for rate in self.base_lrs]
        return rates[:: 2 if self.started else 1]


class Pairing(torch.optim.lr_scheduler.LambdaLR):
    """The same, which sets them itself."""

    started = False

    def __init__(self, optimizer, factor):
        super().__init__(optimizer, factor)
        self.started = True

    def _update_lr(self, epoch=None):
        self.last_epoch += 1
        rates = self.get_lr()[:: 2 if self.started else 1]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def step(self, epoch=None):
        self._update_lr()


@pytest.mark.parametrize(
    "kind", [torch.optim.lr_scheduler.LambdaLR, Filtering, assigned, Uncounted, InATensor, Restarting, Pairing]
)
def test_rates_of_those_that_are_left_are_paired_with_them(kind, monkeypatch):
    """A user's get_lr() or step() that has met the bug, and torch's own; it is not said that they meet it."""
    said = []
    monkeypatch.setattr(empty_groups.rlhf_patches, "decided", lambda name, found: said.append(found))
    sizes = (0.1, 1), (0.05, 0), (0.02, 1)
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))] * size, "lr": rate} for rate, size in sizes]
    mine = torch.optim.SGD(groups, lr=1.0)
    scheduler = kind(mine, lambda step: 1 / (step + 1))
    empty_groups.keep_for_schedulers(mine, None)
    del mine.param_groups[1]
    for _ in range(2):
        mine.step()
        scheduler.step()
    assert [group["lr"] for group in mine.param_groups] == pytest.approx([0.1 / 3, 0.02 / 3])
    assert said == ([True] if kind is torch.optim.lr_scheduler.LambdaLR else [])


def trained(make, passed=False, then=lambda scheduler: None, steps=2):
    """The rates of the two groups that are left of three, a scheduler, and what has been said of the run."""
    said = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(empty_groups.rlhf_patches, "decided", lambda name, found: said.append(found))
        sizes = (0.1, 1), (0.05, 0), (0.02, 1)
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))] * size, "lr": rate} for rate, size in sizes]
        mine = torch.optim.SGD(groups, lr=1.0)
        scheduler = make(mine)
        empty_groups.keep_for_schedulers(mine, scheduler if passed else None)
        del mine.param_groups[1]
        scheduler = then(scheduler) or scheduler
        for _ in range(steps):
            mine.step()
            scheduler.step(*[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
    return [group["lr"] for group in mine.param_groups], scheduler, said


def cut(*names):
    """Somebody who has met the bug leaves out what was for the empty group."""

    def by(scheduler):
        for name in names:
            setattr(scheduler, name, getattr(scheduler, name)[::2])

    return by


def own_rates(scheduler):
    """As many as are left, by another function of the scheduler."""
    found = scheduler.get_lr
    scheduler.get_lr = lambda: found()[::2]


def copied_and_cut(scheduler):
    made = copy.deepcopy(scheduler)
    made.optimizer = scheduler.optimizer
    cut("base_lrs", "lr_lambdas")(made)
    return made


class OfWhatIsLeft(torch.optim.lr_scheduler.LRScheduler):
    """It pairs factors of its own with the groups, and loads its rates into them."""

    factors = (1.0, 1.0, 1.0)

    def get_lr(self):
        return [
            group["initial_lr"] * factor
            for group, factor in zip(self.optimizer.param_groups, self.factors, strict=True)
        ]


def two_factors(scheduler):
    scheduler.factors = (0.5, 0.25)


LISTED = {
    "LambdaLR": (lambda mine: schedulers.LambdaLR(mine, lambda step: 1 / (step + 1)), ("base_lrs", "lr_lambdas")),
    "MultiplicativeLR": (
        lambda mine: schedulers.MultiplicativeLR(mine, [lambda _: 0.5, lambda _: 0.9, lambda _: 0.25]),
        ("lr_lambdas",),
    ),
    "CosineAnnealingLR": (lambda mine: schedulers.CosineAnnealingLR(mine, 1), ("base_lrs",)),
    "CosineAnnealingWarmRestarts": (lambda mine: schedulers.CosineAnnealingWarmRestarts(mine, 9), ("base_lrs",)),
    "CyclicLR": (
        lambda mine: schedulers.CyclicLR(mine, [0.01, 0.02, 0.03], [0.1, 0.2, 0.3], 4),
        ("base_lrs", "max_lrs", "base_momentums", "max_momentums"),
    ),
    "ReduceLROnPlateau": (
        lambda mine: schedulers.ReduceLROnPlateau(mine, patience=0, factor=0.5, min_lr=[0.06, 0.04, 0.01]),
        ("min_lrs",),
    ),
    "WarmupLR": (
        lambda mine: lr_schedules.WarmupLR(mine, 0.001, [0.1, 0.05, 0.02], 4, "linear"),
        ("min_lrs", "max_lrs", "delta_lrs"),
    ),
    "WarmupCosineLR": (lambda mine: lr_schedules.WarmupCosineLR(mine, 20, warmup_num_steps=4), ("org_lrs",)),
}
"""Schedulers that pair lists with the groups, and the names of the lists."""


@pytest.mark.parametrize("name", LISTED)
def test_one_that_a_user_has_repaired_sees_what_is_there(name):
    """Its lists are cut to the groups that are left, and the rates are those of the whole lists with the patch."""
    make, lists = LISTED[name]
    rates, _, said = trained(make, passed=True)
    assert trained(make, passed=True, then=cut(*lists))[::2] == (rates, [])
    assert said == [True]


@pytest.mark.parametrize(
    ("make", "then", "rates"),
    [
        (LISTED["WarmupLR"][0], own_rates, [0.02575, 0.00575]),
        (LISTED["LambdaLR"][0], own_rates, [0.1 / 3, 0.02 / 3]),
        (LISTED["LambdaLR"][0], copied_and_cut, [0.1 / 3, 0.02 / 3]),
        (OfWhatIsLeft, two_factors, [0.05, 0.005]),
        (lambda mine: schedulers.ExponentialLR(mine, 0.5), lambda _: None, [0.025, 0.005]),
        (lambda mine: schedulers.ReduceLROnPlateau(mine, patience=0, factor=0.5), lambda _: None, [0.05, 0.01]),
        (lambda mine: lr_schedules.WarmupLR(mine, 0.0, 0.4, 4, "linear"), lambda _: None, [0.1, 0.1]),
    ],
)
def test_one_that_was_right_is_the_same(make, then, rates):
    found, scheduler, said = trained(make, passed=True, then=then)
    assert found == pytest.approx(rates)
    assert scheduler.get_last_lr() == found
    assert said == []


def test_all_other_code_sees_the_optimizer_s_own_groups():
    """It may read them, pair them and change the list; the empty group put back is there once."""
    mine = optimizer(0, 1)
    scheduler = Scheduler(mine)
    removed = mine.param_groups[0]
    empty_groups.keep_for_schedulers(mine, None)
    del mine.param_groups[0]
    assert scheduler.optimizer.param_groups is mine.param_groups
    _, _, said = trained(
        LISTED["LambdaLR"][0], then=lambda one: one.optimizer.param_groups.insert(*one.optimizer._all_groups_removed[0])
    )
    assert removed not in mine.param_groups
    assert said == []


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (LISTED["LambdaLR"][0], [True]),
        (lambda mine: Repaired(mine, lambda step: 1.0), []),
        (lambda mine: schedulers.ExponentialLR(mine, 0.5), []),
    ],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_what_is_said_of_a_run(make, told, steps):
    """Once, when a step has been repaired."""
    try:
        said = trained(make, steps=steps)[2]
    except ValueError:  # a user's own step() goes on as it was
        said = []
    assert said == (told if steps else [])


def test_of_a_run_without_an_empty_group_it_is_said_that_it_is_right(monkeypatch):
    said = []
    monkeypatch.setattr(empty_groups.rlhf_patches, "decided", lambda name, found: said.append(found))
    empty_groups.keep_for_schedulers(optimizer(1, 1), None)
    assert said == [False]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_what_a_scheduler_sees_can_be_copied(copied):
    """And is the optimizer in everything else."""
    mine = optimizer(0, 1, 0)
    removed = [(0, mine.param_groups[0]), (2, mine.param_groups[2])]
    del mine.param_groups[2], mine.param_groups[0]
    seen = copied(empty_groups.AllGroups(mine, removed))
    assert [(index, len(group["params"])) for index, group in seen._all_groups_removed] == [(0, 0), (2, 0)]
    assert [len(group["params"]) for group in seen.param_groups] == [1]
    assert seen.defaults == mine.defaults
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = seen.nothing_like_it
