"""verl-dr-grpo-length-bias on verl's real worker and engine, on one and two ranks (dr_grpo_length_bias_ranks.py).

Everything is in multiples of what float64 has for the mini-batch of eight sequences.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhf_patches.patches.verl._response_length import with_divisor
from rlhf_patches.patches.verl.proofs import dr_grpo_length_bias_ranks
from tests.harness.forkserver import verl_workers

WORKER = dr_grpo_length_bias_ranks.__name__
LENGTH = dr_grpo_length_bias_ranks.LENGTH
MODE = dr_grpo_length_bias_ranks.MODE
LONGEST = max(dr_grpo_length_bias_ranks.policy_on_fsdp.RESPONSES)
RULE_COVERAGE = {
    "minimal scope": "test_what_does_not_have_the_bug_keeps_every_bit",
    "no side effects": ("test_the_users_configuration_is_untouched", "test_the_actors_configuration_is_copied"),
    "backward compatible": "test_a_configuration_that_says_nothing_of_it_is_left_alone",
    "no new blocking": "test_a_configuration_that_says_nothing_of_it_is_left_alone",
    "Results of the older trainer": "test_what_does_not_have_the_bug_keeps_every_bit",
    "The patch does not change": "test_what_does_not_have_the_bug_keeps_every_bit",
}
# float32 against float64: seen up to 1e-6.
TOLERANCE = 1e-5


@dataclass
class Actor:
    """As much of verl's ActorConfig as matters here."""

    loss_agg_mode: str = MODE
    loss_scale_factor: int | None = None


class Unresolved:
    """A rollout whose settings lead nowhere."""

    def get(self, key: str) -> Any:
        raise KeyError(key)


@dataclass
class Config:
    """A worker's."""

    rollout: Any = field(default_factory=lambda: {"response_length": LENGTH})


@pytest.fixture(scope="module", params=["0.9", pytest.param("0.8", marks=pytest.mark.exhaustive)])
def release(request):
    return request.param


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)], ids=["one rank", "two ranks"]
)
def reports(run_ranks, release, request):
    levels = verl_workers(None if release == "0.9" else release)
    reports = run_ranks(WORKER, levels=levels, ranks=request.param, TORCHDYNAMO_DISABLE="1")
    assert len(reports) == request.param
    for report in reports:
        assert (report["status"], report["version"][: len(release)]) == ("applied", release)
    return reports


def test_without_it_the_gradient_depends_on_the_micro_batches(reports):
    """Of a whole mini-batch it is right but for one factor; the less there is in a micro-batch the more it is wrong."""
    for report in reports:
        found = report["before"]["micro-batches"]
        assert len(found) == 3
        distances = [found[times]["distance"] for times in sorted(found, key=int)]
        assert distances == sorted(distances)
        assert distances[-1] > 1
        if len(reports) == 1:
            assert distances[0] == pytest.approx(LENGTH / LONGEST - 1, rel=TOLERANCE)


def test_with_it_the_gradient_is_that_of_the_mini_batch(reports):
    for report in reports:
        for found in report["after"]["micro-batches"].values():
            assert found["distance"] < TOLERANCE


def test_what_does_not_have_the_bug_keeps_every_bit(reports):
    for report in reports:
        assert report["after"]["as before"] == report["before"]["as before"]


def test_the_older_trainer_and_a_factor_of_ones_own_are_right_without_it(reports):
    for report in reports:
        for name in ("the older trainer", "a factor", "one micro-batch, full length"):
            found = report["before"]["as before"][name]
            assert found is None or found["distance"] < TOLERANCE


def test_the_users_configuration_is_untouched(reports):
    for report in reports:
        for found in report["after"]["micro-batches"].values():
            assert found["the user's"] == [MODE, None, LENGTH]


def test_it_reports_the_settings_of_a_worker(reports, release):
    """In 0.8, whose worker cannot tell which trainer it belongs to, it is unknown."""
    for report in reports:
        as_before = [found for found in report["after"]["as before"].values() if found]
        held = len(report["after"]["micro-batches"]) + (len(reports) == 1)  # its longest response is of full length
        of_others = 5 if release == "0.9" else 4
        calls = len(report["after"]["micro-batches"]) + len(as_before)
        known = {"asked": held + of_others, "held": held} if release == "0.9" else {"asked": of_others, "held": 0}
        assert report["reached"] == {"calls": calls, **known}


def test_reverted_it_is_verls_again(reports):
    for report in reports:
        ((times, found),) = report["reverted"]["micro-batches"].items()
        assert found == report["before"]["micro-batches"][times]


def test_the_actors_configuration_is_copied():
    actor = Actor()
    assert with_divisor(actor, Config()) == Actor(MODE, LENGTH)
    assert actor == Actor()


@pytest.mark.parametrize(
    ("actor", "config"),
    [
        (Actor("token-mean"), Config()),
        (Actor(loss_scale_factor=7), Config()),
        (object(), Config()),
        (Actor(), object()),
        (Actor(), Config({})),
        (Actor(), Config({"response_length": "much"})),
        (Actor(), Config({"response_length": 0})),
        (Actor(), Config(Unresolved())),
        (Actor(), Config(None)),
    ],
)
def test_a_configuration_that_says_nothing_of_it_is_left_alone(actor, config):
    before = copy.deepcopy(vars(actor)) if isinstance(actor, Actor) else None
    assert with_divisor(actor, config) is actor
    assert before is None or vars(actor) == before
