"""The mean difference of log-probabilities, of tensors on the host."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from rlhf_patches.patches._rollouts import differences  # noqa: E402


def test_it_is_the_mean_over_the_sampled_tokens_of_all_parts():
    """Of 4 and of 1, not of two means."""
    first = (torch.tensor([[-1.0, -2.0, -3.0, -9.0]] * 2), torch.tensor([[-1.5, -2.0, -3.0, 0.0]] * 2))
    mask = torch.tensor([[1, 1, 0, 0]] * 2)
    second = (torch.tensor([[-4.0]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    assert differences.mean_of([(*first, mask)]) == 0.25
    assert differences.mean_of([(*first, mask), second]) == (4 * 0.25 + 3.0) / 5


def test_a_token_that_cannot_be_does_not_count_and_nan_does():
    engine, mask = torch.zeros(1, 2), torch.ones(1, 2)
    assert differences.mean_of([(torch.tensor([[-math.inf, -0.5]]), engine, mask)]) == 0.5
    assert math.isnan(differences.mean_of([(torch.tensor([[math.nan, -0.5]]), engine, mask)]))


@pytest.mark.parametrize("elsewhere", range(3))
def test_nothing_is_asked_of_a_tensor_elsewhere(elsewhere):
    """On meta, which has no values to ask for."""
    parts = [torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)]
    parts[elsewhere] = parts[elsewhere].to("meta")
    assert differences.mean_of([tuple(parts)]) is None
    parts[elsewhere] = None
    assert differences.mean_of([tuple(parts)]) is None


def test_other_shapes_and_nothing_at_all():
    assert differences.mean_of([(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))]) is None
    assert differences.mean_of([(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))]) is None
    assert differences.mean_of([]) is None
