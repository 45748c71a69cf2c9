"""Shared keys and values with PEFT, Trainer, torch.compile and code of one's own: ``--out FOLDER [CASE ...]``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.models.gemma4 import modeling_gemma4

from rlhf_patches.patches.transformers.proofs import first_token_count_ranks, shared_kv_gradient_ranks
from rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks import (
    REENTRANT,
    VOCABULARY,
    bits,
    gradients,
    loss_of,
    made,
    off,
    tokens,
    trained,
)
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched


class Own(modeling_gemma4.Gemma4TextAttention):
    """Attention of one's own."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return super().forward(*arguments, **named)


def own_class(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.__class__ = Own
    return model


def own_forward(model: Any) -> Any:
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.forward = types.MethodType(lambda self, *a, **k: type(self).forward(self, *a, **k), attention)
    return model


def checkpointed(family: str = "Gemma4", **more: Any) -> Any:
    model = made(family, **more)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    return model


def digest(model: Any, **given: Any) -> dict[str, Any]:
    """Of a loss and its gradients, and what a forward changes in the model, and what is logged."""
    touched = ""
    with states.heard() as heard:
        try:
            with untouched(model):
                loss_of(model, **given)
        except AssertionError as error:
            touched = str(error)
        loss = loss_of(model, **given)
        loss.backward()
    return {"bits": bits(model, loss), "touched": touched, "heard": [each for each in heard if "stays" in each]}


def in_evaluation() -> dict[str, Any]:
    return digest(checkpointed().eval())


def without_gradients() -> dict[str, Any]:
    """A reference's pass: training mode, no gradients."""
    model = checkpointed()
    with torch.no_grad():
        return {"bits": bits(model, loss_of(model))}


def generated() -> dict[str, Any]:
    ids = checkpointed().eval().generate(tokens(), max_new_tokens=5, do_sample=False, use_cache=True)
    return {"bits": ids.tolist()}


def returned() -> dict[str, Any]:
    """A caller gets the states."""
    model = checkpointed()
    output = model.model(input_ids=tokens(), return_shared_kv_states=True)
    output.last_hidden_state.square().sum().backward()
    kinds = sorted(
        f"{key}: {type(each).__name__} {each[0].requires_grad}" for key, each in output.shared_kv_states.items()
    )
    return {"bits": bits(model, output.last_hidden_state), "kinds": kinds}


def qwen3() -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = transformers.Qwen3ForCausalLM(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    return digest(model)


def two_losses(model: Any) -> torch.Tensor:
    """Both forwards come before the backward pass, as in DPO."""
    return (loss_of(model) + loss_of(model)) / 2


def in_place(model: Any) -> torch.Tensor:
    """Hooks change the attention's output in place."""
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, given: (given[0].mul_(1.0),))
    return loss_of(model)


def two_passes() -> dict[str, Any]:
    """One graph, twice; half of the gradient each time. As released, the second pass raises."""

    def first(model: Any) -> torch.Tensor:
        loss = loss_of(model) / 2
        loss.backward(retain_graph=True)
        return loss

    try:
        return trained("Gemma4", call=first)
    except RuntimeError as error:
        return {"gradient": 1.0, "raised": str(error)[:40]}


def steps(model: Any) -> torch.Tensor:
    """The third step: compiled code is used again, on other values."""
    for scale in (3, 2):
        (loss_of(model) * scale).backward()
        model.zero_grad()
    return loss_of(model)


def with_lora(checkpointing: dict[str, Any] | None, wide: bool = False) -> Any:
    model = made("Gemma4")
    torch.manual_seed(2)
    config = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model.double() if wide else model, config)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        model.enable_input_require_grads()
    return adapted.double().train() if wide else adapted.train()


def lora() -> dict[str, Any]:
    model, wanted = with_lora(REENTRANT), with_lora(None, wide=True)
    (loss := loss_of(model)).backward()
    loss_of(wanted).backward()
    found, wished = gradients(model), gradients(wanted)
    return {"gradient": off(found, wished), "parameters": len(wished), "bits": bits(model, loss), "loss": loss.item()}


def compiled(kind: str) -> dict[str, Any]:
    torch._dynamo.reset()
    return trained("Gemma4", call=lambda model: steps(torch.compile(model, backend=kind)))


def by_trainer() -> dict[str, Any]:
    found = first_token_count_ranks.step(
        lambda: made("Gemma4"), gradient_checkpointing=True, gradient_checkpointing_kwargs=REENTRANT
    )
    # Of the whole gradient: how far it is from a multiple of the right one, and from that size.
    return {"gradient": max(found["beside"], abs(found["times"] - 1)), "parameters": 63, **found}


def modes() -> dict[str, Any]:
    """Whether gradients were on, for each run of a layer."""
    seen: list[bool] = []
    model = checkpointed()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    loss_of(model).backward()
    return {"runs": seen}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **shared_kv_gradient_ranks.cases(),
    "LoRA": lora,
    "Trainer": by_trainer,
    "two losses": functools.partial(trained, "Gemma4", call=two_losses),
    "in place": functools.partial(trained, "Gemma4", call=in_place),
    "sdpa": functools.partial(trained, "Gemma4", attn_implementation="sdpa"),
    "compiled": functools.partial(compiled, "aot_eager"),
    "two passes": two_passes,
    "evaluation": in_evaluation,
    "no gradients": without_gradients,
    "generated": generated,
    "returned": returned,
    "own class": lambda: digest(own_class(checkpointed())),
    "own forward": lambda: digest(own_forward(checkpointed())),
    "no sharing": lambda: digest(checkpointed(num_kv_shared_layers=0)),
    "Qwen3": qwen3,
    "touched": lambda: digest(checkpointed()),
    "modes": modes,
}


def main() -> None:
    shared_kv_gradient_ranks.main(CASES)
