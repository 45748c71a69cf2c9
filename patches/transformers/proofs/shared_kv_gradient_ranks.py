"""Gradients of transformers' models whose layers share keys and values: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-shared-kv-gradient, after it, and after revert(): the gradient of a loss under
gradient checkpointing, and that without checkpointing, in float64.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from rlhf_patches.proving import states

NAME = "transformers-shared-kv-gradient"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 32
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
SIZES |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "num_kv_shared_layers": 2}
SIZES |= {"attention_dropout": 0.0, "use_cache": False}  # as Trainer sets it
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
SPARSE = {"intermediate_size": [16] * 4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4}
OF: dict[str, dict[str, Any]] = {
    "Gemma4": {**PER_LAYER, "intermediate_size": 16, "global_head_dim": 8},
    "Gemma3n": {**PER_LAYER, **SPARSE},
    "Gemma4Unified": {"intermediate_size": 16, "global_head_dim": 8},
}
REENTRANT = {"use_reentrant": True}


def made(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}TextConfig")(
        **{**SIZES, **OF[family], "attn_implementation": "eager", **more}
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim > 1:
                each.normal_(0, 0.3)
    return model.train()


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (2, 10), generator=generator, device="cpu").to(DEVICE)


def loss_of(model: Any, **given: Any) -> torch.Tensor:
    ids = tokens()
    logits = model(input_ids=ids, **given).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest error of a parameter's gradient; infinite for another set of parameters."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@functools.cache
def by_definition(family: str, **more: Any) -> dict[str, torch.Tensor]:
    model = made(family, **more).double()
    loss_of(model).backward()
    # Weights that no loss depends on, such as those that are compared only when a model generates.
    return {name: each for name, each in gradients(model).items() if each.norm() > 0}


def bits(model: Any, loss: torch.Tensor) -> str:
    digest = hashlib.sha256(loss.detach().cpu().numpy().tobytes())
    for name, each in sorted(gradients(model).items()):
        digest.update(name.encode() + each.cpu().numpy().tobytes())
    return digest.hexdigest()


def trained(
    family: str,
    checkpointing: dict[str, Any] | None = REENTRANT,
    call: Callable[[Any], torch.Tensor] = loss_of,
    **more: Any,
) -> dict[str, Any]:
    """The gradient under that checkpointing, compared with the definition."""
    model = made(family, **more)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return compared(model, by_definition(family, **more), call)


def compared(model: Any, wanted: dict[str, torch.Tensor], call: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """The gradient of a model's loss, compared with the one that is wanted."""
    loss = call(model)
    loss.backward()
    found = {name: each for name, each in gradients(model).items() if name in wanted}
    return {"gradient": off(found, wanted), "parameters": len(wanted), "bits": bits(model, loss), "loss": loss.item()}


def cases() -> dict[str, Callable[[], Any]]:
    """The observations, by name; for the families that this release of transformers has."""
    return of_families((family for family in OF if hasattr(transformers, f"{family}ForCausalLM")), trained)


def of_families(families: Iterable[str], train: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Each family under reentrant checkpointing, under the other one, and without."""
    found: dict[str, Callable[[], Any]] = {}
    for family in families:
        found[family] = functools.partial(train, family)
        found[f"{family}, not reentrant"] = functools.partial(train, family, {"use_reentrant": False})
        found[f"{family}, without checkpointing"] = functools.partial(train, family, None)
    return found


def main(known: dict[str, Callable[[], Any]] | None = None, patch: str = NAME) -> None:
    parser, known = states.parser(), known or cases()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(known))
    options = parser.parse_args()
    if DEVICE != "cpu":  # the setting is a mode, which would also apply there
        torch.set_default_device(DEVICE)
    chosen = [name for name in options.cases if name in known]
    states.report_cases(patch, lambda names: {name: known[name]() for name in names}, chosen, options.out)
