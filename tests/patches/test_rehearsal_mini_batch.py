"""Relations of a mini-batch by themselves; the tests of verl, OpenRLHF and SkyRL have real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from rlhf_patches.rehearsal import loop_ranks, megatron_router, mini_batch, openrlhf_trainer, pieces  # noqa: E402
from rlhf_patches.rehearsal.relation import Verdict  # noqa: E402

GRADIENT = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
OTHER = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)


def of_sizes(used, other, rounded=None):
    return mini_batch.of_sizes((used, used, other), 1, lambda: rounded, sharded=False)[0]


def test_a_gradient_of_zero_says_nothing_of_sizes():
    zero = GRADIENT * 0
    found = of_sizes(zero, zero)
    assert (found.verdict, found.text.partition(":")[0]) == (Verdict.NOT_CHECKED, "the gradient is 0")
    assert of_sizes(zero, GRADIENT, zero).verdict is Verdict.DEVIATES


def test_what_rounding_in_the_forward_pass_changes_is_a_note():
    """As where bfloat16's rounding decides which sequences GSPO clips."""
    assert of_sizes(GRADIENT, OTHER, GRADIENT * (1 + 1e-6)).verdict is Verdict.DEVIATES
    found = of_sizes(GRADIENT, OTHER, OTHER)
    assert found.verdict is Verdict.NOTE
    assert "rounding in the forward pass changes 1.1 of it" in found.text
    assert of_sizes(GRADIENT, GRADIENT * 2, OTHER).verdict is Verdict.DEVIATES, "a factor is no rounding"


def test_the_gradient_of_the_divergence():
    zero = GRADIENT * 0
    assert mini_batch.of_divergence(GRADIENT, zero, 0.02).verdict is Verdict.HOLDS
    assert mini_batch.of_divergence(GRADIENT, GRADIENT, 0.02).verdict is Verdict.DEVIATES
    assert mini_batch.of_divergence(zero, zero, 0.02).verdict is Verdict.DEVIATES


def test_a_rank_that_fails_alone_raises(monkeypatch):
    """The others wait for it in a collective of the framework's, which its training would answer."""
    error = MemoryError("of this rank")
    assert loop_ranks.failed(mini_batch.SIZES, error).text == "MemoryError: of this rank"
    monkeypatch.setattr(loop_ranks, "exchanged", lambda mine: ([mine], "rank 1 did not end"))
    with pytest.raises(MemoryError, match="of this rank"):
        loop_ranks.failed(mini_batch.SIZES, error)


def test_openrlhf_may_divide_by_the_tokens_of_a_row_without_any():
    own = SimpleNamespace(all_reduce=dict)
    strategy = openrlhf_trainer._Strategy(own, None, 1, None)
    assert strategy.all_reduce({"_num_action_tokens": 0, "loss": 0.0}) == {"_num_action_tokens": 1, "loss": 0.0}
    assert strategy.all_reduce({"_num_action_tokens": 5}) == {"_num_action_tokens": 5}


def test_the_embeddings_of_a_model_that_does_not_name_them_are_moved():
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 1))
    ids = torch.tensor([0, 1, 2])
    before = model(ids)
    with pieces.embeddings_moved(model):
        assert not torch.equal(model(ids), before)
    assert torch.equal(model(ids), before)


def test_a_frozen_router_has_no_relation(monkeypatch):
    """A gradient cannot be taken of it."""
    router = torch.nn.Linear(2, 2).requires_grad_(False)
    router.layer_number = 1
    monkeypatch.setitem(
        megatron_router.sys.modules, megatron_router._ROUTER, SimpleNamespace(TopKRouter=torch.nn.Linear)
    )
    config = SimpleNamespace(
        num_moe_experts=2, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=None
    )
    found = megatron_router.Router([router], config)
    assert found.present
    assert found.gradient() is None
    assert megatron_router.Router([router.requires_grad_()], config)._last is router
