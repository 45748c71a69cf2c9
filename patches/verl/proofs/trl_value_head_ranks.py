"""verl's functions for TRL's model with a value head, with the TRL on the path: ``--out FOLDER``.

verl's own function loads a model of one layer from its folder, in float64, and another function prepares all models for
FSDP. FlashAttention, which both request, needs a GPU: transformers' own attention replaces it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from verl.models.transformers import monkey_patch
from verl.utils import model as models

import rlhf_patches
from rlhf_patches.proving import states

PATCH = "verl-trl-value-head"
TOKENS = torch.arange(12).reshape(2, 6) % 7


def fill(module: torch.nn.Module) -> None:
    """Fills the weights independently of the release."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)


@functools.cache
def folder() -> str:
    """A causal language model on disk, the same for every release."""
    config = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    made = Qwen2ForCausalLM(config).double()
    fill(made)
    path = states.folder()
    made.save_pretrained(path)
    return path


def loaded() -> dict[str, Any]:
    """verl's critic: its values, its gradient, its saved state, and the values by the formula."""
    config = Qwen2Config.from_pretrained(folder())
    model = models.load_valuehead_model(folder(), torch.float64, config, False)
    model = model.double().eval()
    fill(model.v_head)
    values = model(input_ids=TOKENS)[2]
    values.pow(2).sum().backward()
    hidden = model.pretrained_model.model(input_ids=TOKENS).last_hidden_state
    head = model.v_head.summary
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "values": values.tolist(),
        "by the formula": (hidden @ head.weight.T + head.bias).squeeze(-1).tolist(),
        "gradient": {name: each.flatten().tolist() for name, each in sorted(gradients.items())},
        "saved": sorted(model.state_dict()),
        "not saved": sorted(model._keys_to_ignore_on_save),
        "generates": model.can_generate(),
    }


def prepared() -> dict[str, Any]:
    """Whether verl's preparation of every model ends, and replaces the `state_dict` of TRL's class, if any."""
    monkey_patch.apply_monkey_patch(Qwen2ForCausalLM.from_pretrained(folder()))
    given = [found.__dict__["state_dict"].__module__ == monkey_patch.__name__ for found in classes()]
    return {"the rest": module_of_attention(), "given a state_dict": any(given)}


def classes() -> list[Any]:
    """TRL's classes, in either module; two, from 0.27 to 0.28."""
    found = []
    for module in ("trl", "trl.experimental.ppo"):
        with contextlib.suppress(ImportError, AttributeError):
            found.append(importlib.import_module(module).AutoModelForCausalLMWithValueHead)
    return found


def module_of_attention() -> str:
    """The module of the function that verl's last step, for all models, has put into transformers."""
    from transformers.integrations import flash_attention

    return str(flash_attention._flash_attention_forward.__module__)


def tried(make: Callable[[], Any]) -> Any:
    """The result, or the traceback."""
    try:
        return make()
    except Exception:
        return traceback.format_exc()


def observe() -> dict[str, Any]:
    # In this order, since verl's change of TRL's class stays.
    return {"every model": tried(prepared), "critic": tried(loaded)}


def main() -> None:
    options = states.parser().parse_args()
    plain = AutoModelForCausalLM.from_pretrained.__func__

    def without_flash(cls: Any, *args: Any, **settings: Any) -> Any:
        return plain(cls, *args, **{**settings, "attn_implementation": "eager"})

    AutoModelForCausalLM.from_pretrained = classmethod(without_flash)
    found: dict[str, Any] = {"trl": importlib.metadata.version("trl"), "before": observe()}
    row = rlhf_patches.apply(only=PATCH)[PATCH]
    found |= {"row": f"{row.status}: {row.reason}", "version": row.version, "after": observe()}
    rlhf_patches.revert()
    found["reverted"] = observe()
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
