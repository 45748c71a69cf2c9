"""What completions say by themselves: chances are computed here from the probabilities of each token."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from rlhf_patches.patches._rollouts import figures, samples

HALF, NEVER = math.log(0.5), -1000.0
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("groups", "completions", "of_tokens", "chance"),
    [
        ("aaa", [[1, 2]] * 3, [[HALF, HALF]] * 3, 0.25**2),  # two further ones, each by 1/4
        ("aa", [[1, 2], [1, 3]], [[NEVER] * 2] * 2, 1.0),  # not equal
        ("aabb", [[1], [1], [2], [2]], [[HALF]] * 4, 0.5**2),  # one in each of two groups
        ("abab", [[1], [2], [1], [3]], [[HALF]] * 4, 0.5),  # groups need not stand together
        ("abc", [[1]] * 3, [[NEVER]] * 3, 1.0),  # groups of one
        ("aa", [[7, 7]] * 2, [[0.0, 0.0]] * 2, 1.0),  # a policy that has become certain
        ("aa", [[1, 2]] * 2, [[HALF, None]] * 2, 0.5),  # of a token without one nothing is known
        ("aa", [[1, 2]] * 2, [[HALF, -math.inf]] * 2, 0.5),
        ("aa", [[], []], [[], []], 1.0),
    ],
)
def test_how_likely_equal_completions_are(groups, completions, of_tokens, chance):
    found = samples.surprise_of_equals(list(groups), completions, of_tokens)
    several = sum(groups.count(each) > 1 for each in set(groups))
    assert found == pytest.approx(max(0, -math.log(chance) - several * math.log(2)))


def test_of_many_groups_some_are_equal_by_chance():
    groups = [each for each in range(500) for _ in range(2)]
    assert samples.surprise_of_equals(groups, [[1]] * 1000, [[HALF]] * 1000) == pytest.approx(0)
    assert samples.surprise_of_equals(groups, [[1]] * 1000, [[4 * HALF]] * 1000) > 30


@pytest.mark.parametrize(
    ("prompts", "completions", "share"),
    [
        ("a bc def g", [[5], [6], [7], [8]], 1.0),
        ("a bc def g", [[5], [6], [7], [1]], 1.0),  # an end among lists that were taken apart
        ("a bc def g", [[1], [1], [1], [1]], 0.0),  # a policy that ends at once
        ("a bc def g", [[5], [1], [1], [1]], 1.0),
        ("a bc def g", [[1], [1], [5], [1]], 0.0),  # the context may be full with it
        ("ab ab ab ab", [[5], [6], [7], [8]], 0.0),  # with all of them
        ("a bc d ef", [[5], [6, 7], [8, 1], [9]], 0.5),
        ("a bc def", [[5], [6], [7]], 0.0),  # so few can be alike by chance
        ("a bc def g", [[], [], [], []], 0.0),
        ("", [], 0.0),
    ],
)
def test_completions_of_one_token(prompts, completions, share):
    rows = [list(map(ord, prompt)) for prompt in prompts.split()]
    assert samples.share_of_single_tokens(rows, completions, {1, None}, samples.reach(rows, completions)) == share


def test_a_context_that_an_earlier_batch_has_reached():
    rows, completions = [[1, 2]] * 4, [[5]] * 4
    assert [samples.share_of_single_tokens(rows, completions, {1}, context) for context in (3, 4)] == [0.0, 1.0]


def test_prompts_without_their_padding():
    assert samples.without_padding([[0, 0, 5, 0], [5, 6, 7, 8], [0, 0]], 0) == [[5, 0], [5, 6, 7, 8], []]


@pytest.mark.parametrize(
    ("configurations", "ends"),
    [
        ({"generation_config": 7, "config": None}, {1, 7, None}),
        ({"generation_config": [7, 8], "config": 9}, {1, 7, 8, 9}),
        ({}, {1, None}),
    ],
)
def test_ends_that_only_a_configuration_names(configurations, ends):
    model = SimpleNamespace(**{name: SimpleNamespace(eos_token_id=value) for name, value in configurations.items()})
    assert samples.ends_of(model, 1) == ends


@pytest.mark.parametrize(("limit", "beyond"), [(4, 0), (3, 0), (2, 1), (0, 3)])
def test_tokens_beyond_the_limit(limit, beyond):
    assert samples.beyond([[1], [1, 2, 3], []], limit) == beyond
    assert samples.beyond([], limit) == 0


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({}, True),
        ({"top_k": -1, "top_p": None}, True),
        ({"temperature": 0.9}, False),
        ({"temperature": None}, False),
        ({"top_p": 0.95}, False),
        ({"top_k": 50}, False),
        ({"min_p": 0.05}, False),
        ({"repetition_penalty": 1.1}, False),
    ],
)
def test_what_is_sampled_from_the_model_s_own_distribution(change, plain):
    assert samples.is_plain({**PLAIN, **change}) is plain


@pytest.mark.parametrize(
    ("value", "kind", "are"),
    [
        ([[1], [2]], int, True),
        ([[], [2]], int, True),
        ([[0.5], []], float, True),
        ([[None, 1]], int, False),
        ([[], []], int, False),
        ([1, 2], int, False),
        ("text", int, False),
        (None, int, False),
    ],
)
def test_lists_of_rows(value, kind, are):
    assert samples.of_rows(value, kind) is are


def test_the_limits_are_those_that_the_pages_say():
    for make in (figures.log_probabilities, figures.equal_completions, figures.short_completions):
        figure = make("a-watch", ())
        assert f"`{figure.what}`" in figures.LOG_PROBABILITIES + figures.SAMPLES
        assert f"above {figure.limit:g}" in " ".join((figures.LOG_PROBABILITIES + figures.SAMPLES).split()) or (
            f"above\n{figure.limit:g}" in figures.LOG_PROBABILITIES
        )
