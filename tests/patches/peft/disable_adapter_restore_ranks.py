"""Adapters that are switched off for a while: ``--out DIR``, with a release of PEFT on sys.path.

As the proof of peft-disable-adapter-restore: what is switched within, and what must not be touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel

from rlhf_patches.patches.peft.proofs import disable_adapter_restore_ranks, small
from rlhf_patches.patches.peft.proofs.disable_adapter_restore_ranks import (
    on_a_first_stage,
    once,
    policy,
    with_a_head,
)
from rlhf_patches.testing import untouched


def switched_within() -> list[str]:
    """An adapter that is made active in the context is the trainable one afterwards."""
    model = policy()
    model.add_adapter("other", model.peft_config["policy"])
    with model.disable_adapter():
        model.set_adapter("other")
    return sorted(name for name, flag in small.flags(model).items() if flag)


def unfrozen_within() -> list[str]:
    """A layer of the base model that is unfrozen in the context stays so."""
    model = policy()
    with model.disable_adapter():
        model.base_model.model.up.base_layer.weight.requires_grad_(True)
    return [name for name, flag in small.flags(model).items() if flag and "base_layer" in name]


def made_trainable_within(how: Callable[[PeftModel], Any], *, nested: bool = False) -> list[str]:
    """The trainable ones among parameters of an adapter that are frozen before and made trainable in the context."""
    model = policy()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    with model.disable_adapter():
        if nested:
            with model.disable_adapter():
                pass
        how(model)
    return [name for name, flag in small.flags(model).items() if flag and "lora_A" in name]


def by_hand(model: PeftModel) -> None:
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(True)


MADE_TRAINABLE = {
    "by hand": by_hand,
    "by set_adapter": lambda model: model.set_adapter("policy"),
    "not at all": lambda model: None,
}


def touched(make: Callable[[], PeftModel]) -> str | None:
    """What a context has changed of a model, its configurations and its optimizer."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    once(model)  # PEFT notes here that it has been
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    try:
        with untouched(model, optimizer):
            once(model)
    except AssertionError as error:
        return str(error)
    return None


def the_reference() -> dict[str, bool]:
    """In the context the adapter is off and nothing of it trainable; afterwards it is on."""
    model = policy()
    before = small.loss(model).item()
    with model.disable_adapter():
        within, trainable = small.loss(model).item(), any(small.flags(model).values())
    return {
        "off within": within == small.loss(small_like(model)).item(),
        "trainable within": trainable,
        "on afterwards": small.loss(model).item() == before != within,
    }


def small_like(model: PeftModel) -> small.Small:
    """The base model alone."""
    base = small.Small()
    values = {name.replace("base_layer.", ""): value for name, value in model.base_model.model.state_dict().items()}
    base.load_state_dict({name: values[name] for name in base.state_dict()})
    return base


def observe() -> dict[str, Any]:
    return {
        **disable_adapter_restore_ranks.observe(),
        "switched within": switched_within(),
        "reference": the_reference(),
        "unfrozen within": unfrozen_within(),
        "made trainable within": {name: made_trainable_within(how) for name, how in MADE_TRAINABLE.items()},
        "nested": made_trainable_within(lambda model: None, nested=True),
        "touched": {make.__name__: touched(make) for make in (policy, on_a_first_stage, with_a_head)},
    }


def main() -> None:
    disable_adapter_restore_ranks.main(observe)
