"""``accelerate-fsdp1-rotary-precision`` on real FSDP and a real Llama (proofs/fsdp1_rotary_precision_ranks.py)."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
import transformers
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from rlhf_patches.patches import _float32_buffers, _rotary_model
from rlhf_patches.patches.accelerate import _buffer_policies
from rlhf_patches.patches.accelerate.proofs import fsdp1_rotary_precision_ranks
from tests.harness.forkserver import beside
from tests.patches import rotary

RULE_COVERAGE = {
    "minimal scope": ("test_what_users_choose_is_as_released", "test_what_is_right_is_the_same_bit_for_bit"),
    "no side effects": "test_only_such_policies_change",
    "backward compatible": "test_what_is_right_is_the_same_bit_for_bit",
    "known": "test_other_code_and_buffers_are_left_as_released",
    "no new blocking": "because it sets a type before the model is wrapped: no lock, no collective",
    "each float32 buffer": "test_other_code_and_buffers_are_left_as_released",
    "any other buffer of another type": "test_other_code_and_buffers_are_left_as_released",
    "policy that you pass": "test_what_users_choose_is_as_released",
    "reference model": "test_a_reference_of_trl_is_treated_the_same_way",
}
WORKER = fsdp1_rotary_precision_ranks.__name__
WRONG = ("bf16", "policy by name", "reference", "after own buffer", "copied plugin")
CHOSEN = ("own policy", "own dictionary")
OTHER = (
    "own code",
    "own buffer",
    "own float64 buffer",
    "own float16 buffer",
    "reference with own buffer",
    "copied plugin, own buffer",
)
RIGHT = ("no mixed precision", "FSDP2")


@pytest.fixture(
    scope="module",
    params=["newest", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("1.13", "1.8"))],
)
def report(request, run_ranks):
    """Each case without the patch, with it, and after it was reverted."""
    release = None if request.param == "newest" else f"accelerate-{request.param}"
    (report,) = run_ranks(WORKER, levels=beside(release, "accelerate"), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("case", WRONG)
def test_without_it_distant_tokens_are_wrong(report, case):
    """Those that are near are as wrong as bfloat16 is: 0.01."""
    found = report["before"][case]
    assert found["buffers"]["model.rotary_emb.inv_freq"] == "bfloat16"
    rotary.assert_rounded(found)


@pytest.mark.parametrize("case", WRONG)
def test_with_it_they_are_as_exact_as_near_ones(report, case):
    found = report["after"][case]
    assert set(found["buffers"].values()) == {"float32"}
    rotary.assert_repaired(found, report["before"][case])


def test_with_it_fsdp1_is_as_exact_as_fsdp2(report):
    assert report["after"]["bf16"]["far"] == pytest.approx(report["after"]["FSDP2"]["far"], rel=0.3)


@pytest.mark.parametrize("case", CHOSEN)
def test_what_users_choose_is_as_released(report, case):
    assert report["after"][case] == report["before"][case]


@pytest.mark.parametrize("case", OTHER)
def test_other_code_and_buffers_are_left_as_released(report, case):
    """And rank 0 says so, where a model has rotary frequencies."""
    found = dict(report["after"][case])
    for message in found.pop("messages"):  # once per process and buffer
        assert "may have to be cast" in message
    assert {**found, "messages": []} == report["before"][case]


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_the_same_bit_for_bit(report, case):
    assert report["after"][case] == report["before"][case]


def test_a_reference_of_trl_is_treated_the_same_way(report):
    """`prepare_fsdp` wraps it, and it computes before the model is prepared: both differ by bfloat16's rounding."""
    for state in ("before", "after"):
        found = report[state]["reference"]
        assert found["reference"] < 1.5 * found["near"], (state, found)
    rotary.assert_exact(report["after"]["reference"])


def test_gemma_is_repaired_too():
    """Its `embed_scale` gets the type of the weight in its forward, so both ways give the same bits."""
    config = transformers.Gemma3TextConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = transformers.Gemma3ForCausalLM(config)
    half = torch.bfloat16
    policy = _buffer_policies.made(MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half))
    plugin = types.SimpleNamespace(mixed_precision_policy=policy)
    _buffer_policies.for_model(lambda model: None, plugin, (model,), {})
    assert plugin.mixed_precision_policy.buffer_dtype is None
    assert _float32_buffers.others(model, half) == []


def test_rank_0_says_that_a_model_is_left_as_released(report):
    """Once for each class of buffer."""
    messages = [message for case in report["after"].values() for message in case["messages"]]
    assert sum("may have to be cast" in message for message in messages) == 2, messages


def test_reverted_it_is_accelerate_s_own_again(report):
    for case, found in report["reverted"].items():
        assert {**found, "messages": []} == report["before"][case]


def test_a_run_is_told_whether_it_was_affected(report):
    """Whether users' policies and code are wrong is not known."""
    reached = report["reached"]
    assert reached["held"] == len(WRONG) + len(["the reference"])
    others = ["the reference with own buffer", "the model before 'after own buffer'"]
    assert reached["calls"] - reached["asked"] == len(CHOSEN) + len(OTHER) + len(others)


def test_only_such_policies_change():
    """Of FSDP1, in half precision, with one type, of which no field was changed since; as released, all are equal."""
    half, full = torch.bfloat16, torch.float32
    for policy in (
        MixedPrecision(param_dtype=full, reduce_dtype=full, buffer_dtype=full),
        MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=full),
        MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=half),
        MixedPrecision(param_dtype=half, reduce_dtype=half),
    ):
        before = copy.copy(policy)
        assert _buffer_policies.made(policy) is policy
        assert policy == before
        assert _buffer_policies.as_released(policy) is None
    own = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    made = _buffer_policies.made(copy.copy(own))
    assert made == own
    assert _buffer_policies.as_released(made) is made
    assert _buffer_policies.as_released(own) is None, "equal is not the same"
    made.buffer_dtype = None
    assert _buffer_policies.as_released(made) is None, "a user's own choice"


def test_the_policy_is_that_of_the_model():
    """And again accelerate's own for the next one, in a copy, too; a field that a user changed in ours stays."""
    half = torch.bfloat16
    made = _buffer_policies.made(MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half))
    plugin = types.SimpleNamespace(mixed_precision_policy=made)
    llama, other = _rotary_model.model(), fsdp1_rotary_precision_ranks.made({"buffer": torch.float64})
    seen = []

    def chosen(model):
        _buffer_policies.for_model(seen.append, plugin, (model,), {})
        return plugin.mixed_precision_policy

    ours = chosen(llama)
    assert ours == MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=None)
    assert chosen(llama) is ours
    assert chosen(other) is made
    assert chosen(torch.nn.Linear(1, 1)) is made
    chosen(llama)
    plugin = pickle.loads(pickle.dumps(plugin))
    assert chosen(other) == made
    chosen(llama).reduce_dtype = torch.float32
    assert chosen(other) == MixedPrecision(param_dtype=half, reduce_dtype=torch.float32, buffer_dtype=None)
    assert seen == [llama, llama, other, seen[3], llama, other, llama, other]
