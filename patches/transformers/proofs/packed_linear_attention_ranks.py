"""Losses of packed documents by transformers' recurrent models: ``--out FOLDER [CASE ...] [--patch NAME]``.

Each case before apply() of the patch, transformers-packed-linear-attention by default, after it, and after revert():
the gradient of packed rows, and that of the same documents one by one, in float64; or a digest of a call that stays as
released.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DataCollatorWithFlattening

from rlhf_patches.patches.transformers.proofs import packed_documents_ranks as rows
from rlhf_patches.proving import states

NAME = "transformers-packed-linear-attention"
SIZES: dict[str, Any] = {"vocab_size": rows.VOCABULARY, "hidden_size": 16, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 2, "initializer_range": 0.3}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "use_cache": False}  # as Trainer of 5.23 sets it
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1}
LINEAR |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS: dict[str, Any] = {**LINEAR, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
EXPERTS |= {"experts_implementation": "eager", "shared_expert_intermediate_size": 8}
OF = {"Qwen3Next": ("Qwen3NextConfig", EXPERTS), "Qwen3_5": ("Qwen3_5TextConfig", LINEAR)}
OF |= {"Qwen3_5Moe": ("Qwen3_5MoeTextConfig", EXPERTS)}
OF |= {"OlmoHybrid": ("OlmoHybridConfig", LINEAR)}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2}
OF |= {"Bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]})}
OF |= {"FalconH1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 32})}
NEMOTRON: dict[str, Any] = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}
SHORT: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
OF |= {"Lfm2": ("Lfm2Config", SHORT)}
ROUTED = {"num_dense_layers": 1, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
OF |= {"Lfm2Moe": ("Lfm2MoeConfig", {**SHORT, **ROUTED, "experts_implementation": "eager"})}
NEMOTRON |= {"layers_block_type": ["linear_attention", "full_attention"]}
OF |= {"NemotronH": ("NemotronHConfig", NEMOTRON)}

# the cache that the model itself makes: 4.57 takes no other
LEFT = {**rows.LEFT, "a cache": lambda model: {**rows.beside(model), "use_cache": True}}


def made(family: str, attention: str = "sdpa", **sizes: Any) -> Any:
    torch.manual_seed(0)
    config, more = OF[family]
    made_of = getattr(transformers, config)(**{**SIZES, **more, **sizes}, attn_implementation=attention)
    model = getattr(transformers, f"{family}ForCausalLM")(made_of)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-2.0)  # a state that decays slowly, as heads with a long memory learn it
    return model


def collated() -> dict[str, Any]:
    """A batch of transformers' own collator for packed rows, by its defaults."""
    return DataCollatorWithFlattening()([{"input_ids": each.tolist()} for each in rows.documents()])


def checkpointed(family: str, reentrant: bool) -> dict[str, Any]:
    model = made(family)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return rows.right(model.train(), made(family))


def cases() -> dict[str, Callable[[], Any]]:
    """The observations, by name; for the families that this release of transformers has."""
    found: dict[str, Callable[[], Any]] = {}
    for family in (each for each in OF if hasattr(transformers, f"{each}ForCausalLM")):
        right = functools.partial(_compared, family)
        found |= {
            f"{family}, packed": right,
            f"{family}, 2 rows": functools.partial(right, rows=2),
            f"{family}, long": functools.partial(right, lengths=(70, 1, 66)),
            f"{family}, bfloat16": functools.partial(_in_bfloat16, family),
            f"{family}, checkpointed": functools.partial(checkpointed, family, False),
            f"{family}, reentrant": functools.partial(checkpointed, family, True),
        }
        for how, given in LEFT.items():
            found[f"{family}, {how}"] = functools.partial(rows.bits, functools.partial(made, family), given)
        found[f"{family}, generated"] = functools.partial(rows.generated, functools.partial(made, family))
    return found


def _compared(family: str, **given: Any) -> dict[str, Any]:
    return rows.right(made(family), made(family), **given)


def _in_bfloat16(family: str) -> dict[str, Any]:
    return rows.right(made(family).bfloat16(), made(family).bfloat16())


def main() -> None:
    parser, known = states.parser(), cases()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(known))
    parser.add_argument("--patch", default=NAME)
    options = parser.parse_args()
    if rows.DEVICE != "cpu":  # the setting is a mode, which would also apply there
        torch.set_default_device(rows.DEVICE)
    states.report(options.patch, lambda: {name: known[name]() for name in options.cases if name in known}, options.out)
