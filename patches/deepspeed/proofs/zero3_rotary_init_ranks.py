"""Models that are built under ZeRO-3, without training, on one rank: ``--out FOLDER [CASE ...]``."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

NAME = "deepspeed-zero3-rotary-init"
HEAD, THETA, FACTOR, ORIGINAL = 64, 10_000.0, 4.0, 1024
SHORT = [1 + 0.013 * index for index in range(HEAD // 2)]
LONG = [1 + 1.37 * index for index in range(HEAD // 2)]
VISION_HEAD, TOKENS, PATCHES = 80, 2048, 64
CASES: dict[str, dict[str, Any]] = {
    "YaRN": {"rope": "yarn"},
    "LongRoPE": {"rope": "longrope"},
    "vision": {"vision": True},
    "default": {"rope": "default"},
    "YaRN, fp16": {"rope": "yarn", "kind": "fp16"},
    "YaRN, from_pretrained": {"rope": "yarn", "how": "from_pretrained"},
    "LongRoPE, from_pretrained": {"rope": "longrope", "how": "from_pretrained"},
    "vision, from_pretrained": {"vision": True, "how": "from_pretrained"},
    "YaRN, from_config": {"rope": "yarn", "how": "from_config"},
    "float32": {"rope": "yarn", "kind": "float32"},
    "plain": {"rope": "yarn", "how": "plain"},
    "a step": {"rope": "yarn", "step": True},
    "own class": {"rope": "longrope", "own": "class"},
    "own method": {"rope": "longrope", "own": "method"},
    "own function": {"rope": "longrope", "own": "function"},
    "own module": {"rope": "default", "own": "module"},
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def configuration(case: dict[str, Any]) -> Any:
    import transformers

    if case.get("vision"):
        found = transformers.Qwen2_5_VLConfig().vision_config
        sizes = {"depth": 1, "hidden_size": 2 * VISION_HEAD, "num_heads": 2, "intermediate_size": 32}
        for name, value in {**sizes, "out_hidden_size": 32, "fullatt_block_indexes": [0]}.items():
            setattr(found, name, value)
        return found
    rope: dict[str, Any] = {"rope_type": case["rope"], "rope_theta": THETA}
    if case["rope"] != "default":
        rope |= {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL}
    if case["rope"] == "longrope":
        rope |= {"short_factor": SHORT, "long_factor": LONG}
    if transformers.__version__.startswith("4."):
        rope.pop("rope_theta")
        of_rope: dict[str, Any] = {
            "rope_theta": THETA,
            "rope_scaling": None if case["rope"] == "default" else rope,
        }
    else:
        of_rope = {"rope_parameters": rope}
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=2 * HEAD,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4 * ORIGINAL,
        **of_rope,
    )


def exact(case: dict[str, Any]) -> torch.Tensor:
    """The frequencies by their formulas, in float64."""
    size = VISION_HEAD // 2 if case.get("vision") else HEAD
    index = torch.arange(size // 2, dtype=torch.float64)
    plain = torch.tensor(THETA, dtype=torch.float64) ** (-2 * index / size)
    if case.get("rope") == "yarn":

        def turning(turns: float) -> float:
            return size * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(THETA))

        low, high = math.floor(turning(32)), math.ceil(turning(1))
        ramp = ((index - low) / (high - low)).clamp(0, 1)
        return plain / FACTOR * ramp + plain * (1 - ramp)
    if case.get("rope") == "longrope":
        return plain / torch.tensor(SHORT, dtype=torch.float64)
    return plain


def kind_of_model(case: dict[str, Any]) -> Any:
    if case.get("vision"):
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

        return modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM


def zero(case: dict[str, Any]) -> dict[str, Any]:
    kind = case.get("kind", "bf16")
    precision = {} if kind == "float32" else {kind: {"enabled": True}}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **precision}


def typed(case: dict[str, Any]) -> dict[str, Any]:
    import transformers

    new = not transformers.__version__.startswith("4.") or int(transformers.__version__.split(".")[1]) >= 56
    return {"dtype" if new else "torch_dtype": TYPES[case.get("kind", "bf16")]}


def builder(case: dict[str, Any], folder: str) -> Callable[[], Any]:
    """Builds the model, where it is not within ``zero.Init`` as where it is."""
    config, kind = configuration(case), kind_of_model(case)
    if case.get("how") == "from_pretrained":
        kind(config).to(TYPES[case.get("kind", "bf16")]).save_pretrained(folder)
        return lambda: kind.from_pretrained(folder, **typed(case))
    if case.get("how") == "from_config":
        return lambda: kind._from_config(config, **typed(case))
    return lambda: kind(config)


@contextlib.contextmanager
def within(case: dict[str, Any]) -> Iterator[None]:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    if case.get("how") == "plain":
        yield
    elif "how" in case:
        kept = HfDeepSpeedConfig(zero(case))  # transformers keeps a weak reference
        yield
        del kept
    else:
        with deepspeed.zero.Init(config_dict_or_path=zero(case)):
            yield


@contextlib.contextmanager
def users_code(own: str | None) -> Iterator[None]:
    """Code of a user's in place of the release's."""
    from transformers import modeling_rope_utils
    from transformers.models.llama import modeling_llama

    released = modeling_llama.LlamaRotaryEmbedding
    function = modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    if own == "class":
        with mock.patch.object(modeling_llama, "LlamaRotaryEmbedding", type("Own", (released,), {})):
            yield
    elif own == "method":
        forward = released.forward
        with mock.patch.object(released, "forward", lambda *arguments, **keywords: forward(*arguments, **keywords)):
            yield
    elif own == "function":

        def mine(*arguments: Any, **keywords: Any) -> Any:
            return function(*arguments, **keywords)

        with mock.patch.dict(modeling_rope_utils.ROPE_INIT_FUNCTIONS, {"longrope": mine}):
            yield
    else:
        yield


class Own(torch.nn.Module):
    """A user's module with a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / torch.arange(1, 9, dtype=torch.float32), persistent=False)


def tables(model: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if "inv_freq" in name}


class _Angles(torch.nn.Module):
    """Cosines and sines of exact angles, scaled as YaRN scales them."""

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies, scale = exact(CASES["a step"]), 0.1 * math.log(FACTOR) + 1
        angles = position_ids.double()[..., None] * torch.cat([frequencies, frequencies])
        return angles.cos() * scale, angles.sin() * scale


def step(case: dict[str, Any]) -> dict[str, Any]:
    """The loss and its gradient of an engine and of the same model in float64: the last tokens of a sequence."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config, kind = configuration(case), kind_of_model(case)
    torch.manual_seed(0)
    whole = kind(config)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
            parameter.copy_(parameter.bfloat16())
    with within(case):
        model = kind(config)
    for partitioned, parameter in zip(model.parameters(), whole.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([partitioned], modifier_rank=0), torch.no_grad():
            partitioned.copy_(parameter)
    engine = on_cpu.engine(model, {"stage": 3}, bf16={"enabled": True})
    whole = whole.double()
    whole.model.rotary_emb = _Angles()
    ids = torch.randint(0, 32, (1, TOKENS), generator=torch.Generator().manual_seed(1))

    def loss(call: Callable[..., Any]) -> torch.Tensor:
        logits = call(input_ids=ids, use_cache=False).logits[:, TOKENS // 2 : -1]
        found: torch.Tensor = logits.log_softmax(-1).gather(2, ids[:, TOKENS // 2 + 1 :, None])
        return found

    right, found = loss(whole), loss(engine)
    right.mean().backward()
    engine.backward(found.float().mean())
    gradient = safe_get_full_grad(model.model.embed_tokens.weight).double()
    wanted = whole.model.embed_tokens.weight.grad
    return {
        "far": float((found - right).abs().mean()),
        "gradient": float((gradient - wanted).norm() / wanted.norm()),
        "messages": [],
    }


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    if case.get("step"):
        return step(case)
    with tempfile.TemporaryDirectory() as folder:
        build = builder(case, folder)
        torch.manual_seed(0)
        plain = tables(build())
        with users_code(case.get("own")), states.heard() as messages:
            torch.manual_seed(0)
            with within(case):
                model = build()
                if case.get("own") == "module":
                    model.own = Own()
            state = torch.get_rng_state()
    made = tables(model)
    angle = PATCHES if case.get("vision") else TOKENS
    (frequencies,) = [table for name, table in made.items() if name.endswith(".inv_freq") and "own" not in name]
    rotary = next(module for module in model.modules() if "inv_freq" in module._buffers)
    alias = getattr(rotary, "original_inv_freq", None)
    return {
        "error": float((frequencies.double() - exact(case)).abs().max()) * angle,
        "same": all(torch.equal(plain[name], made[name]) and plain[name].dtype == made[name].dtype for name in plain),
        "original": None if alias is None else torch.equal(alias, rotary.inv_freq),
        "alias": alias is rotary.inv_freq,
        "bits": {name: [float(value).hex() for value in table] for name, table in made.items()},
        "types": {name: str(table.dtype) for name, table in made.items()},
        "parameters": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "partitioned": all(hasattr(parameter, "ds_id") for parameter in model.parameters()),
        "random": state.sum().item(),
        "messages": [message for message in messages if NAME in message],
    }


def main() -> None:
    import deepspeed

    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    on_cpu.start()
    # DeepSpeed refuses fp16 on CPUs, where torch computes it.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    states.report_cases(
        NAME,
        lambda cases: {case: outcome(CASES[case]) for case in cases},
        options.cases,
        options.out,
        reverted=options.cases,
    )
