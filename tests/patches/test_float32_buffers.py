"""Which buffers of transformers' models `_float32_buffers` knows, of real models of the installed release."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rlhf_patches.patches import _float32_buffers  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# One table of frequencies, one for each kind of layer, and a router's bias; all models are exhaustive.
FEW = ("llama", "gemma3_text", "glm4_moe", "gpt2")
WITHOUT_FREQUENCIES = {"gpt2"}


@pytest.fixture
def made(monkeypatch):
    """A tiny model of a type, as `from_pretrained` makes it in a type of numbers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tiny = importlib.import_module("tiny.configurations").tiny
    configurations = transformers.models.auto.configuration_auto.CONFIG_MAPPING

    def make(kind: str, dtype: Any = torch.float32) -> Any:
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        model = getattr(transformers, names if isinstance(names, str) else names[0])
        return model._from_config(tiny(configurations[kind]), dtype=dtype)

    return make


def buffers(model: Any) -> dict[str, Any]:
    return dict(model.named_buffers())


@pytest.mark.parametrize("kind", FEW)
def test_all_models_keep_them(made, kind):
    """What is known is float32 in a bfloat16 model, and after a cast of a float32 one."""
    native, cast = made(kind, torch.bfloat16), made(kind)
    known = {id(owner): name for owner, name, _ in _float32_buffers.known(native)}
    assert bool(known) == (kind not in WITHOUT_FREQUENCIES)
    assert not _float32_buffers.unknown(native)
    before = buffers(cast)
    assert _float32_buffers.keeping("any-patch", cast, cast.to, torch.bfloat16) is cast
    assert all(parameter.dtype == torch.bfloat16 for parameter in cast.parameters())
    for name, buffer in buffers(cast).items():
        # Releases before 5 do not list a router's bias, and from_pretrained casts it.
        if name.endswith("inv_freq") or (kind == "glm4_moe" and transformers.__version__ >= "5"):
            assert buffers(native)[name].dtype == torch.float32
            assert buffer is before[name], "the tensor that it was"


@pytest.mark.exhaustive
def test_all_models_have_their_frequencies_in_float32(made):
    """In each causal model that can be made tiny: in bfloat16, and each is known."""
    tried = 0
    for kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = made(kind, torch.bfloat16)
        except Exception:
            continue
        names = [name for name in buffers(model) if name.endswith("inv_freq")]
        assert all(buffers(model)[name].dtype == torch.float32 for name in names), kind
        assert not _float32_buffers.unknown(model), kind
        tried += bool(names)
    assert tried > 60


def test_other_buffers_are_cast(made):
    """Of the same modules too, and persistent ones of the same name."""
    model = made("llama")
    rotary = model.model.rotary_emb
    rotary.register_buffer("other", torch.ones(1), persistent=False)
    rotary.register_buffer("old_inv_freq", torch.ones(1))
    _float32_buffers.keeping("any-patch", model, model.half)
    assert rotary.other.dtype == rotary.old_inv_freq.dtype == torch.float16
    assert rotary.inv_freq.dtype == torch.float32
    assert _float32_buffers.others(made("llama"), torch.float16) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_buffers_that_a_cast_would_change_are_named(made, dtype):
    """Those of the type of the cast are not."""
    model = made("llama")
    model.register_buffer("own", torch.ones(1, dtype=dtype))
    assert _float32_buffers.others(model, torch.float16) == ["LlamaForCausalLM.own"]
    assert _float32_buffers.others(model, dtype) == []


def test_other_code_is_not_known(made):
    """A subclass, and a forward that was replaced."""
    model = made("llama")
    rotary = model.model.rotary_emb
    assert _float32_buffers.is_lossy(model) is True
    rotary.forward = lambda *_: None
    assert _float32_buffers.known(model) == []
    assert _float32_buffers.is_lossy(model) is None
    del rotary.forward
    rotary.__class__ = type("Own", (type(rotary),), {})
    assert _float32_buffers.known(model) == []
    assert "inv_freq" in {name for _, name in _float32_buffers.unknown(model)}
    assert _float32_buffers.is_lossy(made("gpt2")) is False


def test_gemma_s_scale_is_the_same_in_both_types(made):
    """Its embedding casts it to the type of its weight."""
    model = made("gemma3_text")
    assert _float32_buffers.others(model, torch.bfloat16) == []
    embedding, ids = model.get_input_embeddings(), torch.arange(5)
    embedding.weight.data = embedding.weight.data.bfloat16()
    assert embedding.embed_scale.dtype == torch.float32
    kept = embedding(ids)
    embedding.embed_scale = embedding.embed_scale.bfloat16()
    assert torch.equal(embedding(ids), kept)
    embedding.__class__ = type("OwnScaledWordEmbedding", (type(embedding),), {})
    model.double()
    assert _float32_buffers.others(model, torch.bfloat16)[0] == "OwnScaledWordEmbedding.embed_scale"
