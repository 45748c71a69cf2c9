"""``trl-resume-order``: the prompts, steps and weights of resumed runs are those of a run without a stop.

resume_order_ranks.py trains GRPO and RLOO, whole and resumed; what a sampler is told here is told to TRL's own there.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SkipBatchSampler

from rlhf_patches.patches.trl import _epochs_over
from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": (
        "test_a_run_from_the_start_is_the_same_bit_for_bit",
        "test_a_sampler_that_is_not_for_training_is_not_noted",
    ),
    "no side effects": ("test_what_it_reads_is_as_it_was", "test_a_run_from_the_start_is_the_same_bit_for_bit"),
    "backward compatible": "test_a_subclass_that_says_the_epoch_itself_or_is_like_no_other_is_left_alone",
    "known": "test_a_sampler_that_is_not_for_training_is_not_noted",
    "no new blocking": "because it draws from one rank's generator; no lock, no collective",
    "bit for bit": (
        "test_a_run_from_the_start_is_the_same_bit_for_bit",
        "test_what_was_right_or_is_asked_for_is_the_same",
    ),
}
WORKER = "rlhf_patches.patches.trl.proofs.resume_order_ranks"
RESUMED = {"GRPO": (8, 14), "RLOO": (6,)}
"""By the case, the steps after which it is resumed: within its second and third epoch, and between two."""
MORE = {"GRPO reusing": (16,), "GRPO accumulating": (4,), "GRPO workers": (8,)}
SAME = {"GRPO in order": (8,), "GRPO in the first epoch": (3,), "GRPO from an epoch's start": (8,)}


def follows(whole, resumed, step):
    """Whether a resumed run has seen what the whole one has from there on."""
    return resumed["trained"] == [seen for seen in whole["trained"] if seen[0] >= step]


def is_right(found, steps):
    whole = found["whole"]
    assert all(follows(whole, found[str(step)], step) for step in steps)
    assert {found[str(step)]["weights"] for step in steps} == {whole["weights"]}


def is_wrong(found, steps):
    """The first prompts of the first epoch are left out, in whichever epoch."""
    for step in steps:
        of_this_epoch = [prompt for at, prompt in found["whole"]["trained"] if step - step % 6 <= at < step]
        rest = [prompt for at, prompt in found[str(step)]["trained"] if at < step - step % 6 + 6]
        first = [prompt for at, prompt in found["whole"]["trained"] if step % 6 <= at < 6]
        assert rest == first
        assert step % 6 == 0 or len({*of_this_epoch, *rest}) < 6, "some twice, others never"
        assert found[str(step)]["weights"] != found["whole"]["weights"]


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, "RLOO", "GRPO", levels=TRL, ranks=1)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", RESUMED)
def test_it_went_on_in_the_first_epochs_order_and_goes_on_in_its_own(report, case):
    is_wrong(report["before"][case], RESUMED[case])
    is_right(report["after"][case], RESUMED[case])


def test_the_condition(report):
    """Once in each resumed run, of its first order; never in evaluation."""
    reached = report["reached"]
    assert reached["held"] == sum(map(len, RESUMED.values()))
    assert reached["asked"] == reached["calls"]


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_from_the_start_is_the_same_bit_for_bit(report, case):
    before, after = (report[state][case]["whole"] for state in ("before", "after"))
    assert after == before
    assert [prompt for _, prompt in after["trained"][:6]] != [prompt for _, prompt in after["trained"][6:12]]


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"]["RLOO"] == report["before"]["RLOO"]


def test_evaluation_has_the_order_that_it_had(report):
    """After the ninth step, of a run that was resumed after the eighth too."""
    for state in ("before", "after"):
        found = report[state]["GRPO"]
        assert len(found["whole"]["evaluated"]) == 6
        assert found["8"]["evaluated"] == found["whole"]["evaluated"]


@pytest.mark.exhaustive
def test_other_settings(run_ranks):
    (found,) = run_ranks(WORKER, "GRPO twice", *MORE, *SAME, levels=TRL, ranks=1)
    for case, steps in MORE.items():
        assert not any(follows(found["before"][case]["whole"], found["before"][case][str(at)], at) for at in steps)
        is_right(found["after"][case], steps)
    for case in SAME:
        assert found["after"][case] == found["before"][case]
    is_right(found["after"]["GRPO in order"], (8,))
    is_right(found["after"]["GRPO in the first epoch"], (3,))
    twice = found["after"]["GRPO twice"]
    assert twice["again"]["trained"] == twice["whole"]["trained"], "the same trainer, from the start"
    assert twice["looked at"] == [prompt for _, prompt in twice["whole"]["trained"][:6]]


@pytest.mark.exhaustive
def test_on_two_ranks(run_ranks):
    for found in run_ranks(WORKER, "GRPO on ranks", levels=TRL):
        before, after = (found[state]["GRPO on ranks"] for state in ("before", "after"))
        assert after["whole"] == before["whole"]
        assert not follows(before["whole"], before["4"], 4)
        is_right(after, (4,))


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["trl-1.5", "trl-1.16", "transformers-4.57"])
def test_other_releases(run_ranks, release):
    levels = (*TORCH, Level("tests.harness.loading:trl", str(folder(release))))
    (found,) = run_ranks(WORKER, "RLOO", "GRPO", levels=levels, ranks=1)
    assert found["status"] == "applied"
    for case, steps in RESUMED.items():
        is_wrong(found["before"][case], steps)
        is_right(found["after"][case], steps)


# -- what a sampler is told


class Sampler(torch.utils.data.Sampler):
    """With what the functions ask of TRL's own."""

    def __init__(self, samples=7):
        self.num_samples = samples
        self.generator = _epochs_over.noted(self, torch.Generator().manual_seed(5))

    def __iter__(self):
        yield from torch.randperm(self.num_samples, generator=_epochs_over.advanced(self)).tolist()

    def __len__(self):
        return self.num_samples


class WithEpochs(Sampler):
    def set_epoch(self, epoch):
        pass


class LikeAny(Sampler):
    __hash__ = None

    def __eq__(self, other):
        return True


class Trainer:
    """With what the functions ask of transformers' own: resumed after ``step`` steps of two batches of two."""

    def __init__(self, step=9, sampler=Sampler, ignores=False, trains=True):
        self.args = SimpleNamespace(ignore_data_skip=ignores, gradient_accumulation_steps=2)
        self.state = SimpleNamespace(global_step=0)
        self.callback_handler = SimpleNamespace()
        self.is_in_train = trains
        self.kind = sampler
        self.loader = self.get_train_dataloader()
        self.callback_handler.train_dataloader = self.loader
        self.state.global_step = step

    def get_train_dataloader(self):
        batches = torch.utils.data.BatchSampler(self._get_train_sampler(), 2, drop_last=False)
        return DataLoaderShard(range(7), batch_sampler=batches)

    def _get_train_sampler(self):
        return self.kind()

    def _get_eval_sampler(self):
        return self.kind()


GENERATOR = torch.Generator().manual_seed(5)
ORDERS = [torch.randperm(7, generator=GENERATOR).tolist() for _ in range(7)]


def order(loader):
    return torch.cat([*loader]).tolist()


@pytest.mark.parametrize("step", range(8))
def test_a_last_step_of_fewer_micro_batches_counts(step):
    """Four batches are two steps, as transformers counts; of five the third step has one."""
    trainer = Trainer(step)
    assert [order(trainer.loader) for _ in range(2)] == ORDERS[step // 2 : step // 2 + 2]
    trainer = Trainer(step)
    trainer.loader = trainer.callback_handler.train_dataloader = DataLoaderShard(
        range(7), batch_sampler=torch.utils.data.BatchSampler(trainer.loader.batch_sampler.sampler, 3, drop_last=False)
    )
    assert len(trainer.loader) == 3
    assert order(trainer.loader) == ORDERS[step // 2]


def test_on_several_ranks_and_with_skipped_batches_it_is_found():
    trainer = Trainer(step=3)
    batches = BatchSamplerShard(trainer.loader.batch_sampler, 2, 1)
    trainer.callback_handler.train_dataloader = DataLoaderShard(range(7), batch_sampler=batches)
    skipping = DataLoaderShard(range(7), batch_sampler=SkipBatchSampler(batches, 1))
    assert order(skipping) == [*ORDERS[3][6:], *ORDERS[3][:1]], "one step is an epoch: each rank has two batches"


def test_a_loader_around_accelerate_s_is_looked_through():
    """As IW-OPD's, which repeats each batch: eight batches, four steps."""

    class Repeating:
        def __init__(self, loader):
            self.dataloader = loader

        def __len__(self):
            return 2 * len(self.dataloader)

        def __getattr__(self, name):
            return getattr(self.dataloader, name)

    trainer = Trainer()
    trainer.callback_handler.train_dataloader = Repeating(trainer.loader)
    assert order(trainer.loader) == ORDERS[2]


@pytest.mark.parametrize("settings", [{"step": 0}, {"ignores": True}, {"trains": False}, {"sampler": WithEpochs}])
def test_what_was_right_or_is_asked_for_is_the_same(settings):
    assert order(Trainer(**settings).loader) == ORDERS[0]


def test_a_loader_that_somebody_else_has_asked_for_begins_with_the_first_epoch():
    trainer = Trainer()
    assert order(trainer.get_train_dataloader()) == ORDERS[0]
    assert order(trainer.loader) == ORDERS[4]


def test_a_sampler_that_is_not_for_training_is_not_noted():
    trainer = Trainer()
    assert _epochs_over._trainers[trainer._get_eval_sampler()] is None
    assert Sampler() not in _epochs_over._trainers


def test_a_subclass_that_says_the_epoch_itself_or_is_like_no_other_is_left_alone():
    for kind in (WithEpochs, LikeAny):
        assert list(Trainer(sampler=kind).loader.batch_sampler.sampler) == ORDERS[0]


def test_a_trainer_that_is_gone_is_not_kept():
    sampler = Trainer().loader.batch_sampler.sampler
    gc.collect()
    assert list(sampler) == ORDERS[0]
    assert _epochs_over._trainers[sampler] is None


def test_what_it_reads_is_as_it_was():
    trainer = Trainer()
    before = [dict(vars(each)) for each in (trainer, trainer.args, trainer.state, trainer.callback_handler)]
    sampler = trainer.loader.batch_sampler.sampler
    attributes = dict(vars(sampler))
    list(sampler)
    assert [dict(vars(each)) for each in (trainer, trainer.args, trainer.state, trainer.callback_handler)] == before
    assert vars(sampler) == attributes
