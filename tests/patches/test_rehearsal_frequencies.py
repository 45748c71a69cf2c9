"""`rehearse` on rotary frequencies of real models: those that a cast has rounded deviate, and no others."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rlhf_patches.rehearsal import frequencies  # noqa: E402
from rlhf_patches.rehearsal.relation import Verdict  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1 + 0.01 * each for each in range(16)],
    "long_factor": [2 + 0.1 * each for each in range(16)],
}
NEEDS_5 = pytest.mark.skipif(transformers.__version__ < "5", reason="rope_parameters since transformers 5")


def llama(**rope: Any) -> Any:
    given = {"rope_parameters": rope} if rope else {}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **given))


def gemma(**rope: Any) -> Any:
    layers = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    config = transformers.Gemma3TextConfig(**SIZES, layer_types=[*reversed(layers)], rope_parameters=layers)
    return transformers.Gemma3ForCausalLM(config)


def verdict(model: Any) -> Verdict | None:
    found = frequencies.relation(model)
    return found and found.verdict


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_ones_deviate(dtype):
    """In float32 again, too."""
    model = llama()
    assert verdict(model) is Verdict.HOLDS
    assert verdict(model.to(dtype)) is Verdict.DEVIATES
    assert verdict(model.float()) is Verdict.DEVIATES


@NEEDS_5
@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("model", [llama, gemma])
def test_ones_that_a_long_sequence_changed_do_not(model, rope):
    """Gemma 3 has a table for each type of layer."""
    made = model(**rope)
    made(torch.ones(1, 100, dtype=torch.long))
    assert verdict(made) is Verdict.HOLDS
    rounded = frequencies.relation(made.bfloat16())
    assert rounded is not None
    assert rounded.verdict is Verdict.DEVIATES
    assert float(rounded.measured) < 2**-7, "of those that a forward pass leaves alone"


def test_ones_that_a_user_changed_do_not():
    """Positions that are interpolated."""
    model = llama()
    for name, buffer in model.model.rotary_emb.named_buffers():
        model.model.rotary_emb._buffers[name] = buffer / 3
    assert verdict(model) is None


def test_a_module_that_cannot_be_made_again_is_left_out(monkeypatch):
    model = llama()
    before = torch.get_rng_state()

    def more(self: Any, config: Any, needed: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(type(model.model.rotary_emb), "__init__", more)
    assert verdict(model) is None
    assert torch.equal(torch.get_rng_state(), before)
