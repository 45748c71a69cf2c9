"""Relations of rollouts by themselves; the tests of verl, OpenRLHF and SkyRL have real mini-batches."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from rlhf_patches.patches._rollouts import figures  # noqa: E402
from rlhf_patches.rehearsal import rollouts  # noqa: E402
from rlhf_patches.rehearsal.relation import Verdict  # noqa: E402

MASK = torch.ones(4, 50)


def sampled(apart):
    made = rollouts.Sampled()
    made.add(torch.zeros(4, 50) + apart, torch.zeros(4, 50), MASK)
    return made


def noise(size):
    return size * torch.randn(4, 50, generator=torch.Generator().manual_seed(1))


def of_engine(apart, temperature=1.0, at_one=None):
    return rollouts.of_engine(sampled(apart), temperature, lambda: sampled(at_one))


def test_the_limits_are_those_of_the_watches():
    of_log_probabilities = figures.log_probabilities("a", ())
    assert (
        of_log_probabilities.limit,
        of_log_probabilities._floor,
        of_log_probabilities._times,
    ) == (rollouts.LARGEST, rollouts.FLOOR, rollouts.TIMES)
    assert figures.equal_completions("a", ()).limit == rollouts.LEAST_CHANCE


def test_rounding_holds_and_another_policy_deviates():
    assert of_engine(noise(0.05)).verdict is Verdict.HOLDS
    found = of_engine(noise(0.5))
    assert found.verdict is Verdict.DEVIATES
    assert "another policy" in found.text
    assert of_engine(noise(float("nan"))).verdict is Verdict.DEVIATES


def test_a_truncated_distribution_gets_a_note():
    assert of_engine(-noise(0.5).abs()).verdict is Verdict.NOTE


def test_tokens_outside_of_a_truncated_distribution_do_not_count():
    apart = noise(0.01)
    apart[0, 0] = float("-inf")
    assert of_engine(apart).verdict is Verdict.HOLDS


def test_the_temperature_is_named_only_if_the_log_probabilities_agree_at_1():
    assert "temperature 1" in of_engine(noise(0.09), 0.7, noise(0.01)).text
    assert of_engine(noise(0.09), 0.7, noise(0.05)).verdict is Verdict.HOLDS
    assert "another policy" in of_engine(noise(0.5), 0.7, noise(0.4)).text


def test_nothing_is_said_without_a_token():
    assert rollouts.of_engine(rollouts.Sampled(), 1.0, rollouts.Sampled) is None
    other = rollouts.Sampled()
    other.add(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))
    assert rollouts.of_engine(other, 1.0, rollouts.Sampled) is None


def test_equal_samples_deviate_if_this_is_unlikely():
    answer, likely = (7, 8, 9), math.log(0.5)
    assert rollouts.of_samples([((1,), answer, -40.0)] * 2).verdict is Verdict.DEVIATES
    assert rollouts.of_samples([((1,), answer, -40.0), ((1,), (7, 8, 8), -40.0)]).verdict is Verdict.HOLDS
    assert rollouts.of_samples([((1,), answer, -40.0), ((2,), answer, -40.0)]) is None  # two prompts
    # Half of these groups of two are equal where the answer is "yes" or "no"; here all are.
    many = [((prompt,), answer, likely) for prompt in range(500) for _ in range(2)]
    found = rollouts.of_samples(many)
    assert (found.verdict, found.measured) == (Verdict.HOLDS, "500 of 500 prompts")


def test_rows_without_an_answer_do_not_count():
    assert rollouts.of_samples([((1,), (), -40.0)] * 4) is None
