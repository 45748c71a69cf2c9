"""verl's own training step on Megatron: its real actor or engine around a real GPTModel, on gloo.

``--out FOLDER``, with the folder of a verl release on sys.path. Each case runs a mini-batch of two micro-batches
through `MegatronEngineWithLMHead.forward_backward_batch` or `MegatronPPOActor.forward_backward_batch`, with verl's own
loss, and so through megatron-core's `forward_backward_func`: as released and then with the patch.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from tests.harness import absent_packages

absent_packages.install()

from megatron.core import parallel_state

import rlhf_patches
from rlhf_patches.patches._vocab_parallel import counters
from tests.harness.small_gpt import VOCABULARY, make_model
from tests.harness.token_reference import counted_all_reduces

PATCH = "verl-logprob-entropy"
MUTATED = "has been modified by an inplace operation"
PROMPT, RESPONSE, ROWS = 8, 12, 4
Case = dict[str, Any]


def make_rows() -> dict[str, torch.Tensor]:
    """Prompts padded on the left, responses on the right."""
    generator = torch.Generator().manual_seed(3)
    prompts, responses = torch.tensor([8, 5, 7, 8]), torch.tensor([12, 9, 12, 6])
    place = torch.arange(PROMPT + RESPONSE)
    mask = (place >= PROMPT - prompts[:, None]) & (place < PROMPT + responses[:, None])
    per_token = {
        name: torch.randn(ROWS, RESPONSE, generator=generator) * 0.1 + shift
        for name, shift in (("old_log_probs", -3.0), ("advantages", 0.0))
    }
    ids = torch.randint(1, VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=generator) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": mask[:, PROMPT:].long(),
        **per_token,
    }


# ------------------------------------------------------------------------------------- the engine


def engine_module() -> Any:
    return importlib.import_module("verl.workers.engine.megatron.transformer_impl")


def engine_step(case: Case, model: Any, forward_only: bool) -> dict[str, Any]:
    """One mini-batch of the engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    engine = object.__new__(engine_module().MegatronEngineWithLMHead)
    engine.module = [model]
    engine.tf_config = model.config
    engine.enable_routing_replay = False
    mtp = SimpleNamespace(enable=False, enable_train=False)
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
        mtp=mtp,
    )
    engine.engine_config = SimpleNamespace(
        use_fused_kernels=False,
        use_remove_padding=case["packed"],
        entropy_from_logits_with_chunking=bool(case.get("chunk")),
        entropy_from_logits_chunk_size=case.get("chunk"),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        dynamic_context_parallel=False,
        pad_bshd_to_minibatch_max=False,
        pad_to_length=False,
        pad_to_length_bucket=None,
        router_replay=SimpleNamespace(mode="disabled"),
    )
    rows = make_rows()
    lengths = rows["attention_mask"].bool()
    nested = {
        name: torch.nested.as_nested_tensor(
            [row[mask] for row, mask in zip(rows[name], lengths, strict=True)], layout=torch.jagged
        )
        for name in ("input_ids", "position_ids")
    }
    data = TensorDict({**rows, **nested, "loss_mask": rows["response_mask"]}, batch_size=ROWS)
    data["temperature"] = torch.full((ROWS,), case.get("temperature", 1.0))
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        calculate_entropy=case["entropy"],
        global_batch_size=ROWS,
        max_response_len=RESPONSE,
        max_seq_len=PROMPT + RESPONSE,
        calculate_sum_pi_squared=case.get("sum_pi_squared", False),
    )
    config = ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.3 if case["entropy"] else 0.0
    )
    found = engine.forward_backward_batch(data, functools.partial(ppo_loss, config=config), forward_only=forward_only)
    outputs = {name: value.values() if value.is_nested else value for name, value in found["model_output"].items()}
    return {"outputs": outputs, "metrics": [float(value) for value in found["loss"]]}


# ------------------------------------------------------------------------------------- the actor


def actor_module() -> Any:
    return importlib.import_module("verl.workers.actor.megatron_actor")


def actor_step(case: Case, model: Any, forward_only: bool) -> dict[str, Any]:
    """One mini-batch of the actor."""
    from omegaconf import OmegaConf
    from verl import DataProto

    actor = object.__new__(actor_module().MegatronPPOActor)
    actor.actor_module, actor.tf_config = [model], model.config
    actor.hf_config = SimpleNamespace(architectures=["Qwen2ForCausalLM"])
    actor.use_fused_kernels = False
    mtp = SimpleNamespace(enable=False, enable_train=False)
    actor.mtp_config, actor.enable_routing_replay = mtp, False
    actor.config = OmegaConf.create(
        {
            **{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0},
            **{"entropy_coeff": 0.3, "use_kl_loss": False, "loss_agg_mode": "token-mean"},
            **{"policy_loss": {"loss_mode": "vanilla"}, "megatron": {"use_remove_padding": True}},
            **{"ppo_micro_batch_size_per_gpu": 2, "loss_scale_factor": None, "global_batch_info": {}},
        }
    )
    data = DataProto.from_dict(make_rows(), meta_info={"temperature": case.get("temperature", 1.0)})
    found = actor.forward_backward_batch(
        data,
        forward_only=forward_only,
        post_process_fn=lambda output, data: {"log_probs": output["log_probs"]},
        calculate_entropy=case["entropy"],
        micro_batch_size=2,
    )["output"]
    outputs = {}
    if forward_only:
        outputs = {
            "log_probs": torch.cat([one[0]["log_probs"] if case["entropy"] else one["log_probs"] for one in found])
        }
        if case["entropy"]:
            outputs["entropy"] = torch.cat([one[1] for one in found])
    metrics = [value for one in found for value in one[0]["actor/pg_loss"]] if not forward_only else []
    return {"outputs": outputs, "metrics": metrics}


# ------------------------------------------------------------------------------------- both


def before(case: Case) -> dict[str, Any]:
    """As released; where that crashes, without the chunks, or with a copy of the logits as 0.6.0 makes it."""
    try:
        return train(case)
    except RuntimeError as error:
        failed = str(error)
        if MUTATED not in failed:
            raise
    if case.get("chunk"):
        return {**train({**case, "chunk": None}), "failed": failed}
    module = actor_module()
    entropy = module.vocab_parallel_entropy
    module.vocab_parallel_entropy = lambda logits: entropy(logits.clone())
    try:
        return {**train(case), "failed": failed}
    finally:
        module.vocab_parallel_entropy = entropy


def train(case: Case) -> dict[str, Any]:
    """What verl returns, the gradients of all parameters, and what the patch observed."""
    torch.manual_seed(2)
    model = make_model(case["bf16"], length=PROMPT + RESPONSE, **case.get("settings", {}))
    step = STEPS[case["step"]]
    counters.reset()
    with counted_all_reduces() as collectives:
        found = step(case, model, False)
    observed = counters.observed()
    with torch.no_grad():
        inference = step(case, model, True)
    return {
        **found,
        "inference": inference["outputs"],
        "gradients": {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()},
        "all_reduces": len(collectives),
        "observed": observed,
    }


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a test wants to know."""
    deviations = [
        (found - before["gradients"][name]).norm() / before["gradients"][name].norm().clamp(min=1e-30)
        for name, found in after["gradients"].items()
    ]
    return {
        "failed": before.get("failed"),
        "same": {
            f"{where} {name}": torch.equal(value, after[where][name])
            for where in ("outputs", "inference")
            for name, value in before[where].items()
        },
        "distance": {
            f"{where} {name}": (value - after[where][name]).abs().max().item()
            for where in ("outputs", "inference")
            for name, value in before[where].items()
        },
        "losses": [before["metrics"], after["metrics"]],
        "gradients_found": sum(bool(gradient.any()) for gradient in before["gradients"].values()),
        "largest_deviation": max(deviations).item(),
        "all_reduces": [before["all_reduces"], after["all_reduces"]],
        "observed": [before["observed"], after["observed"]],
    }


STEPS = {"engine": engine_step, "actor": actor_step}
MORE: dict[str, Case] = {
    "": {},
    "temperature": {"temperature": 0.7},
    "chunks": {"chunk": 5},
    "recompute": {"settings": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)},
}
CASES: dict[str, Case] = {
    "-".join(filter(None, (step, dtype, packed, entropy, more))): {
        **{"step": step, "bf16": dtype == "bf16", "packed": bool(packed), "entropy": bool(entropy)},
        **settings,
    }
    for step in STEPS
    for dtype in ("bf16", "fp32")
    for packed in ("packed", "")
    for entropy in ("entropy", "")
    for more, settings in MORE.items()
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=ranks // options.context_parallel, context_parallel_size=options.context_parallel
    )
    cases = {name: CASES[name] for name in options.cases or CASES}
    released = {name: before(case) for name, case in cases.items()}
    rlhf_patches.apply(only=PATCH)
    report: dict[str, Any] = {name: compared(released[name], train(case)) for name, case in cases.items()}
    report["row"] = rlhf_patches.report()[PATCH].to_dict()
    (options.out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
