"""slime's own files of one tag, from a clone, on each of some ranks: before, after, and after a revert.

``--out FOLDER [--context-parallel N]``, with a folder on sys.path that has slime's `ppo_utils`, `loss` and `cp_utils`.
Cases go through `get_log_probs_and_entropy`, or through slime's `policy_loss_function`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu, slime_clone

torch.set_num_threads(1)
megatron_on_cpu.install()
slime_clone.install()

from megatron.core import parallel_state

import rlhf_patches
from rlhf_patches.patches._vocab_parallel import counters, softmax
from tests.harness.token_reference import counted_all_reduces, made, peak_memory, reference
from tests.patches.skyrl import logprob_backward_ranks as shared

PATCH = "slime-logprob-entropy"
SHARD, TEMPERATURE = 64, 2.0
LENGTHS, RESPONSES = (12, 16, 8), (7, 9, 5)
Case = dict[str, Any]


def loss_module() -> Any:
    return importlib.import_module("slime.backends.megatron_utils.loss")


def functions() -> Any:
    """The module with `calculate_log_probs_and_entropy`; 0.1.0 has it with the loss."""
    module = importlib.import_module("slime.utils.ppo_utils")
    return module if hasattr(module, "calculate_log_probs_and_entropy") else loss_module()


CASES: dict[str, Case] = {
    "log-probs": {"entropy": ""},
    "metric": {"entropy": "metric"},
    "loss": {"entropy": "loss"},
    "chunks": {"entropy": "loss", "chunk": 5},
    "held": {"entropy": "loss", "hold": True},
    "unknown": {"entropy": "", "unknown": True},
    "empty": {"entropy": "loss", "empty": True},
    "large": {"entropy": "loss", "large": True},
    "masked": {"entropy": "loss", "mask": True},
}


def options_of(case: Case) -> dict[str, Any]:
    """What the release's function takes of a case."""
    names = functions().calculate_log_probs_and_entropy.__code__.co_varnames
    wanted = {"chunk_size": case.get("chunk", -1), "with_entropy_grad": case["entropy"] == "loss"}
    return {name: value for name, value in wanted.items() if name in names}


def run(case: Case) -> Case:
    """`calculate_log_probs_and_entropy` itself."""
    generator = torch.Generator().manual_seed(5)
    large = case.get("large")
    softmax.WORK_BYTES = 1 << 20 if large else 4 * 4 * SHARD
    tokens, shard = (4096, 1024) if large else (0 if case.get("empty") else 24, SHARD)
    group = parallel_state.get_tensor_model_parallel_group()
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    part = slice(rank * shard, (rank + 1) * shard)
    whole = torch.randn(tokens, ranks * shard, generator=generator).mul_(4)
    values = whole[:, part].contiguous()
    label = torch.randint(ranks * shard, (tokens,), generator=generator)
    if case.get("unknown"):
        label[::3] = -100
    weights, of_entropy = torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator)
    gradients: list[torch.Tensor] = []
    logits = made(values, gradients.append)
    counters.reset()
    arguments = () if functions() is not sys.modules.get("slime.utils.ppo_utils") else (group,)
    keywords = options_of(case)
    if case.get("mask"):
        keywords["log_prob_keep_mask"] = torch.rand(values.shape, generator=generator) < 0.5

    def forward(logits: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
        function = functions().calculate_log_probs_and_entropy
        log_probs, entropy = function(logits, label, *arguments, with_entropy=bool(case["entropy"]), **keywords)
        loss = (log_probs.squeeze(-1) * weights).sum()
        if case["entropy"] == "loss":
            loss = loss + (entropy * of_entropy).sum()
        return log_probs, entropy, loss

    with counted_all_reduces() as of_forward, peak_memory() as forward_peak:
        log_probs, entropy, loss = forward(logits)
    report: Case = {"log_probs": log_probs.detach().clone(), "shapes": [list(log_probs.shape)]}
    if entropy is not None:
        report["entropy"] = entropy.detach().clone()
        report["shapes"] += [list(entropy.shape), str(entropy.dtype), entropy.requires_grad]
    report["untouched"] = torch.equal(logits, values)
    held = logits if case.get("hold") else None
    del logits, log_probs, entropy
    with counted_all_reduces() as of_backward, peak_memory() as backward_peak:
        if loss.requires_grad:
            loss.backward()
    report |= {
        "collectives": [len(of_forward), len(of_backward)],
        "extra_memory": [peak.bytes / max(1, values.nbytes) for peak in (forward_peak, backward_peak)],
        "observed": counters.observed(),
        "held": held is None or torch.equal(held, values),
    }
    if not tokens:
        return shared.without_tensors(report)
    if gradients and not large and not case.get("mask"):
        report["gradient"] = gradients[0]
        exact = reference(whole, label, weights, of_entropy if case["entropy"] == "loss" else None)
        known = label >= 0
        for name, wanted in (
            ("log_probs", exact[0][:, None][known]),
            ("entropy", exact[1]),
            ("gradient", exact[2][:, part]),
        ):
            if name in report:
                found = report[name][known] if name == "log_probs" else report[name]
                report[f"error_of_{name}"] = shared.distance(found, wanted)
    return report


def policy(case: Case) -> Case:
    """slime's own policy loss on packed samples, with a temperature."""
    module, cp = loss_module(), parallel_state.get_context_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group()
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    generator = torch.Generator().manual_seed(6)
    values = (torch.randn(1, sum(LENGTHS) // cp, ranks * SHARD, generator=generator) * 4)[..., rank * SHARD :][
        ..., :SHARD
    ]
    names: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("advantages", "log_probs", "loss_masks", "unconcat_tokens")
    }
    for total, response in zip(LENGTHS, RESPONSES, strict=True):
        names["unconcat_tokens"].append(torch.randint(ranks * SHARD, (total,), generator=generator))
        names["loss_masks"].append(torch.ones(response))
        of_rank = response
        if cp > 1:
            offsets = importlib.import_module("slime.backends.megatron_utils.cp_utils")
            _, _, of_logits, _ = offsets.get_logits_and_tokens_offset_with_cp(total, response)
            of_rank = sum(end - start for start, end in of_logits)
        names["log_probs"].append(torch.randn(of_rank, generator=generator) * 0.1 - 8)
        names["advantages"].append(torch.randn(of_rank, generator=generator))
    batch = {**names, "total_lengths": list(LENGTHS), "response_lengths": list(RESPONSES)}
    flags = ["use_rollout_logprobs", "use_opsm", "get_mismatch_metrics", "use_tis", "use_kl_loss", "allgather_cp"]
    args = SimpleNamespace(
        **dict.fromkeys(flags, False),
        **{"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None},
        **{
            "entropy_coef": case["entropy_coef"],
            "rollout_temperature": TEMPERATURE,
            "rollout_top_p": 1.0,
            "qkv_format": "thd",
        },
        **{"log_probs_chunk_size": case.get("chunk", -1), "calculate_per_token_loss": False},
    )
    gradients: list[torch.Tensor] = []
    logits = made(values.contiguous(), gradients.append)
    counters.reset()
    with counted_all_reduces() as collectives:
        loss, reported = module.policy_loss_function(args, batch, logits, lambda values: values.sum())
        del logits
        loss.backward()
    return {
        "loss": loss.detach(),
        "entropy": reported["entropy_loss"],
        "gradient": gradients[0],
        "collectives": len(collectives),
        "observed": counters.observed(),
    }


POLICY: dict[str, Case] = {
    "entropy": {"entropy_coef": 0.3},
    "no entropy": {"entropy_coef": 0.0},
    "chunks": {"entropy_coef": 0.3, "chunk": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context-parallel", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    importlib.import_module("torch._dynamo").config.disable = True  # compiling its products and sums takes a minute
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=torch.distributed.get_world_size() // options.context_parallel,
        context_parallel_size=options.context_parallel,
    )
    taken = functions().calculate_log_probs_and_entropy.__code__.co_varnames
    cases = {
        name: case
        for name, case in CASES.items()
        if ("mask" not in case or "log_prob_keep_mask" in taken) and ("chunk" not in case or "chunk_size" in taken)
    }
    report: dict[str, Any] = {"functions": shared.in_every_state(cases, run, PATCH)}
    report["policy"] = shared.in_every_state(POLICY, policy, PATCH)
    rlhf_patches.apply(only=PATCH)
    report["row"] = rlhf_patches.report()[PATCH].to_dict()
    (options.out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
