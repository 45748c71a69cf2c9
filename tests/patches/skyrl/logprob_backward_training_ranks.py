"""SkyRL's own training step on two tensor-parallel ranks: its real `MegatronModelWrapper` around a real GPTModel.

``--out FOLDER``, with the folder of a SkyRL release on sys.path. Each case runs a mini-batch of two micro-batches
through `forward_backward_mini_batch`, and so through megatron-core's `forward_backward_func`, as released and then with
the patches; each rank writes its report.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

import rlhf_patches
from rlhf_patches.patches._vocab_parallel import counters
from tests.harness import skyrl_on_cpu
from tests.harness.small_gpt import VOCABULARY, make_model
from tests.harness.token_reference import counted_all_reduces

LENGTH, ACTIONS, ROWS = 24, 10, 2
CASES: dict[str, dict[str, Any]] = {
    "-".join(filter(None, ("bf16", packed, entropy, chunked))): {
        "bf16": True,
        "packed": bool(packed),
        "entropy": bool(entropy),
        "chunk": 7 if chunked else None,
    }
    for packed, entropy, chunked in itertools.product(("", "packed"), ("", "entropy"), ("", "chunked"))
} | {
    "fp32": {"bf16": False, "packed": False, "entropy": True, "chunk": 7},
    "fp32-packed": {"bf16": False, "packed": True, "entropy": True, "chunk": 7},
    "bf16-temperature": {"bf16": True, "packed": False, "entropy": True, "chunk": 7, "temperature": 0.7},
}


def make_micro_batches() -> list[dict[str, Any]]:
    """Rows padded on the left, as SkyRL's are."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(2):
        sequences = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
        mask = (torch.arange(LENGTH) >= torch.tensor([[3], [7]])).long()
        per_action = {
            name: torch.randn(ROWS, ACTIONS, generator=generator) * 0.1 - 3
            for name in ("old_action_log_probs", "base_action_log_probs", "rollout_action_logprobs")
        }
        batches.append(
            {
                "sequences": sequences * mask,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "num_actions": ACTIONS,
                "advantages": torch.randn(ROWS, ACTIONS, generator=generator),
                "loss_mask": (torch.rand(ROWS, ACTIONS, generator=generator) > 0.2).float(),
                "num_microbatches": 2,
                **per_action,
            }
        )
    return batches


def policy_loss(log_probs: Any, old: Any, advantages: Any, config: Any, loss_mask: Any, rollout_logprobs: Any) -> Any:
    """The policy gradient, without any clipping."""
    return -((log_probs - old).exp() * advantages * loss_mask).sum(), {}


def train(case: dict[str, Any]) -> dict[str, Any]:
    """One mini-batch: what SkyRL logs, the gradients of all parameters, and what the patches observed."""
    algorithm = SimpleNamespace(
        policy_loss_type="regular",
        use_entropy_loss=case["entropy"],
        entropy_loss_coef=0.3,
        use_kl_loss=False,
        kl_loss_coef=0.0,
    )
    mtp = SimpleNamespace(mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
    config = SimpleNamespace(
        algorithm=algorithm,
        logprobs_chunk_size=case["chunk"],
        use_sample_packing=case["packed"],  # 0.2.0's name for
        remove_microbatch_padding=case["packed"],
        policy=SimpleNamespace(megatron_config=mtp),
    )
    model = make_model(case["bf16"])
    wrapper = skyrl_on_cpu.model_wrapper().MegatronModelWrapper(config, [model], None, policy_loss)
    wrapper.train()
    counters.reset()
    with counted_all_reduces() as collectives:
        metrics = wrapper.forward_backward_mini_batch(
            make_micro_batches(), LENGTH, ROWS, temperature=case.get("temperature", 1.0)
        )
    observed = counters.observed()
    log_probs = wrapper.forward(make_micro_batches(), LENGTH, ROWS)
    return {
        "metrics": metrics,
        "gradients": {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()},
        "inference": log_probs,
        "all_reduces": len(collectives),
        "observed": observed,
    }


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a test wants to know."""
    deviations = [
        (found - before["gradients"][name]).norm() / before["gradients"][name].norm().clamp(min=1e-30)
        for name, found in after["gradients"].items()
    ]
    outputs = [[one["loss_fn_outputs"] for one in state["metrics"]] for state in (before, after)]
    entropies = [[one["policy_entropy"] for one in state["metrics"]] for state in (before, after)]
    return {
        "same_log_probs": outputs[0] == outputs[1],
        "same_inference": torch.equal(before["inference"], after["inference"]),
        "entropies": entropies,
        "losses": [[one["final_loss"] for one in state["metrics"]] for state in (before, after)],
        "gradients_found": sum(bool(gradient.any()) for gradient in before["gradients"].values()),
        "largest_deviation": max(deviations).item(),
        "all_reduces": [before["all_reduces"], after["all_reduces"]],
        "observed": [before["observed"], after["observed"]],
    }


def fill(report: dict[str, Any], parts: list[str]) -> None:
    before = {name: train(CASES[name]) for name in parts or CASES}
    rlhf_patches.apply(only="skyrl-*")
    report["training"] = {name: compared(before[name], train(CASES[name])) for name in before}
    report["report"] = [row.to_dict() for row in rlhf_patches.report() if row.name.startswith("skyrl-")]


def main() -> None:
    skyrl_on_cpu.on_each_rank(fill)
