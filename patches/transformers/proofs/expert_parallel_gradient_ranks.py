"""Gradients of tiny mixtures under expert parallelism, on each of two ranks: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-expert-parallel-gradient, after it, and after revert(). All ranks have the same
batch, so each gradient must be that of the same weights in float64 in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.proving import states

NAME = "transformers-expert-parallel-gradient"
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
}
WORST = 1e9
"""For a gradient that is not a number."""
CASES = ("Qwen3-MoE", "batched_mm", "gpt-oss", "converted", "no gradient", "tensor parallelism")


def config(case: str) -> Any:
    import transformers

    if case == "gpt-oss":
        return transformers.GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"] * 2)
    return transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True)


def loaded(case: str, folder: str, parallel: bool) -> Any:
    """The model whole in float64, or this rank's part in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    if parallel:
        implementation = "batched_mm" if case == "batched_mm" else "grouped_mm"
        options = {"dtype": torch.float32, "experts_implementation": implementation}
        known = {each.name for each in dataclasses.fields(DistributedConfig)}
        sized = "tp_size" in known
        sizes: dict[str, int] = {"tp_size": 2} if sized else {}
        if case != "tensor parallelism":
            experts = {"ep_size": 2} if "ep_size" in known else {"enable_expert_parallel": True}
            options["distributed_config"] = DistributedConfig(**sizes, **experts)
        elif sized:
            options["distributed_config"] = DistributedConfig(**sizes)
        else:
            options["tp_plan"] = "auto"
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).train()


def gradients(model: Any, case: str) -> tuple[str, dict[str, torch.Tensor]]:
    """The logits' digest, and each whole gradient by name."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad() if case == "no gradient" else contextlib.nullcontext():
        found = model(input_ids=ids, labels=ids)
    digest = hashlib.sha256(found.logits.detach().float().numpy().tobytes()).hexdigest()
    if case == "no gradient":
        return digest, {}
    found.loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return digest, {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}


def converted(model: Any) -> None:
    """As of a user's own block, which converts the routing weights before the experts take them."""
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, given, found: (found[0], found[1] * 1.0, *found[2:]))


def observe_one(case: str, folder: str) -> dict[str, Any]:
    _, right = gradients(loaded(case, folder, False), case)
    model = loaded(case, folder, True)
    if case == "converted":
        converted(model)
    digest, found = gradients(model, case)
    errors: dict[str, float] = {"router": 0.0, "rest": 0.0}
    for name, gradient in found.items():
        if gradient.shape == right[name].shape and "experts" not in name:
            kind = "router" if ".gate." in name or ".router." in name else "rest"
            error = float((gradient.double() - right[name]).norm() / right[name].norm().clamp(min=1e-12))
            errors[kind] = max(errors[kind], error if math.isfinite(error) else WORST)
    bits = b"".join(found[name].detach().contiguous().numpy().tobytes() for name in sorted(found))
    return {"logits": digest, "gradients": hashlib.sha256(bits).hexdigest(), "of": len(found), **errors}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--first", default="")
    parser.add_argument("cases", nargs="*", default=CASES[:1])
    options = parser.parse_args()
    if options.first:
        sys.path[:0] = options.first.split(os.pathsep)
    dist.init_process_group("gloo")
    shared = [states.folder()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        for case in options.cases:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config(case)).save_pretrained(f"{shared[0]}/{case}")
    dist.barrier()

    def observe() -> dict[str, Any]:
        return {case: observe_one(case, f"{shared[0]}/{case}") for case in options.cases}

    states.report(NAME, observe, options.out)
    dist.barrier()
