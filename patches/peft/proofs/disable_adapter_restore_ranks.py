"""``disable_adapter()`` on a small model: ``--out DIR``, with a release of PEFT on sys.path.

``rank0.json`` has the result of each trial before apply() of peft-disable-adapter-restore, after it, and after
revert().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from rlhf_patches.patches.peft.proofs import small
from rlhf_patches.proving import states

NAME = "peft-disable-adapter-restore"


def policy(**more: Any) -> PeftModel:
    config = LoraConfig(r=small.RANK, lora_alpha=small.ALPHA, target_modules=["up", "down"], **more)
    model = get_peft_model(small.Small(), config, adapter_name="policy")
    small.fill(model)
    return model


def freeze(model: PeftModel, part: str) -> None:
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.requires_grad_(False)


def on_a_first_stage() -> PeftModel:
    """A frozen adapter and the policy's, both active."""
    model = policy()
    model.add_adapter("first_stage", model.peft_config["policy"])
    small.fill(model)
    model.base_model.set_adapter(["policy", "first_stage"])
    freeze(model, ".first_stage.")
    return model


def in_part_by_hand() -> PeftModel:
    model = policy()
    freeze(model, "lora_A")
    return model


def in_inference_mode() -> PeftModel:
    return policy(inference_mode=True)


def with_a_head() -> PeftModel:
    model = policy(modules_to_save=["head"])
    freeze(model, "modules_to_save")
    return model


def disabled_before() -> PeftModel:
    model = policy()
    model.base_model.disable_adapter_layers()
    return model


MODELS = (on_a_first_stage, in_part_by_hand, in_inference_mode, with_a_head, disabled_before, policy)


def once(model: PeftModel) -> None:
    with model.disable_adapter():
        small.loss(model)


def nested(model: PeftModel) -> None:
    with model.disable_adapter(), model.disable_adapter():
        small.loss(model)


def overlapping(model: PeftModel) -> None:
    one, other = model.disable_adapter(), model.disable_adapter()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)


def raising(model: PeftModel) -> None:
    try:
        with model.disable_adapter():
            raise MemoryError
    except MemoryError:
        pass


def changed(make: Callable[[], PeftModel], way: Callable[[PeftModel], None]) -> list[str]:
    """Parameters that have become trainable, or are no longer trainable."""
    model = make()
    before = small.flags(model)
    way(model)
    return [name for name, flag in small.flags(model).items() if before[name] != flag]


def norm(gradients: list[torch.Tensor]) -> float:
    return float(sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5)


def clipping() -> dict[str, float]:
    """The clipping norm after a reference pass, and the policy's in float64."""
    model = on_a_first_stage()
    once(model)
    small.loss(model).backward()
    return {
        "norm": norm([p.grad for p in model.parameters() if p.grad is not None]),
        "wanted": norm(list(small.gradients_in_float64(model, "policy", "first_stage").values())),
    }


def observe() -> dict[str, Any]:
    ways = (once, nested, overlapping, raising)
    return {
        "changed": {make.__name__: {way.__name__: changed(make, way) for way in ways} for make in MODELS},
        "clipping": clipping(),
    }


def main(observe: Callable[[], dict[str, Any]] = observe) -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
