"""verl's functions for the logits, and its engine's function that calls them, on each of some tensor-parallel ranks.

``--out FOLDER``, with the folder of a verl release on sys.path. Each case runs as released, with the patch, and after
a revert. Until 0.3 the caller is verl's loss function, which asks for log-probabilities first; here in its two calls.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core import parallel_state

import rlhf_patches
from rlhf_patches.patches._vocab_parallel import counters, softmax
from tests.harness.token_reference import Peak, counted_all_reduces, made, peak_memory, reference
from tests.patches.skyrl import logprob_backward_ranks as shared

PATCH = "verl-logprob-entropy"
TOKENS, SHARD, TEMPERATURE = 24, 64, 2.0
Case = dict[str, Any]


def functions() -> Any:
    return importlib.import_module("verl.utils.megatron.tensor_parallel")


def is_old() -> bool:
    return hasattr(functions(), "vocab_parallel_compute_entropy_loss")


def as_verl_calls_them(case: Case, logits: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
    """What verl's caller of a release returns; without one, log-probabilities alone and no temperature."""
    module = functions()
    if case.get("direct"):
        return {"log_probs": module.vocab_parallel_log_probs_from_logits(logits, label)}
    if not is_old():
        engine = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
        settings = SimpleNamespace(
            entropy_from_logits_with_chunking=bool(case.get("chunk")), entropy_from_logits_chunk_size=case.get("chunk")
        )
        return engine.MegatronEngineWithLMHead._lm_head_logits_processor(
            SimpleNamespace(engine_config=settings),
            logits,
            label,
            torch.full(label.shape, TEMPERATURE),
            calculate_sum_pi_squared=bool(case.get("sum")),
            calculate_entropy=bool(case["entropy"]),
            distillation_use_topk=bool(case.get("distillation")),
            distillation_only=False,
            logits_processor_func=lambda student_logits, **_: {"seen": student_logits.square().mean(-1)},
            batch=None,
            data_format="thd",
        )
    logits.div_(TEMPERATURE)
    back = logits.clone() if case["entropy"] and not case.get("patched") else logits  # 0.3.0 clones, and 0.1.0 does not
    found = {"log_probs": module.vocab_parallel_log_probs_from_logits(logits, label)}
    if case["entropy"]:
        found["entropy"] = module.vocab_parallel_entropy(back)
    return found


CASES: dict[str, Case] = {
    "log-probs": {"entropy": ""},
    "metric": {"entropy": "metric"},
    "loss": {"entropy": "loss"},
    "log-probs-bfloat16": {"entropy": "", "dtype": "bfloat16"},
    "loss-bfloat16": {"entropy": "loss", "dtype": "bfloat16"},
    "rows": {"entropy": "loss", "rows": 2},
    "held": {"entropy": "loss", "hold": True},
    "unknown": {"entropy": "", "unknown": True},
    "inference": {"entropy": "metric", "inference": True},
    "sum": {"entropy": "loss", "sum": True},
    "distillation": {"entropy": "loss", "distillation": True},
    "chunks": {"entropy": "metric", "chunk": 5},
    "large": {"entropy": "loss", "large": True},
    "large-bfloat16": {"entropy": "loss", "large": True, "dtype": "bfloat16"},
    "large-direct": {"entropy": "", "large": True, "direct": True},
}
ONLY_NEW = ("sum", "distillation", "chunks")


def run(case: Case) -> Case:
    generator = torch.Generator().manual_seed(5)
    dtype, large = getattr(torch, case.get("dtype", "float32")), case.get("large")
    # Several blocks, of which one is little beside the logits; or blocks of four tokens.
    softmax.WORK_BYTES = 1 << 18 if large else 4 * 4 * SHARD
    shard = 1024 if large else SHARD
    rows, tokens = case.get("rows", 1), 4096 if large else TOKENS
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    part = slice(rank * shard, (rank + 1) * shard)
    if large:
        values = torch.randn(rows, tokens, shard, generator=generator).mul_(4).to(dtype)
    else:
        whole = (torch.randn(rows, tokens, ranks * shard, generator=generator) * 4).to(dtype)
        values = whole[..., part].contiguous()
    label = torch.randint(ranks * shard, (rows, tokens), generator=generator)
    if case.get("unknown"):
        label[:, ::3] = torch.tensor([-100])
    weights, of_entropy = (torch.randn(rows, tokens, generator=generator) for _ in range(2))
    if case["entropy"] != "loss":
        of_entropy = torch.zeros_like(of_entropy)
    gradients: list[torch.Tensor] = []
    logits = made(values, gradients.append)
    counters.reset()
    patched = rlhf_patches.in_force(PATCH)
    measured = peak_memory if large else lambda: contextlib.nullcontext(Peak())

    def forward(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.set_grad_enabled(not case.get("inference")):
            found = as_verl_calls_them({**case, "patched": patched}, logits, label)
        found["loss"] = (found["log_probs"] * weights).sum()
        if case["entropy"] == "loss":
            found["loss"] = found["loss"] + (found["entropy"] * of_entropy).sum()
        if case.get("distillation"):
            found["loss"] = found["loss"] + found["seen"].sum()
        return found

    with counted_all_reduces() as forward_collectives, measured() as forward_peak:
        outputs, failed = shared.failure(forward, logits)
    assert outputs is not None, failed
    loss = outputs.pop("loss")
    report: Case = {name: value.detach().clone() for name, value in outputs.items()}
    report["dtypes"] = {name: str(value.dtype) for name, value in outputs.items()}
    after_forward = logits.detach().clone()
    held = logits if case.get("hold") else None
    del logits, outputs
    failed = None
    with counted_all_reduces() as backward_collectives, measured() as backward_peak:
        if loss.requires_grad:
            _, failed = shared.failure(loss.backward)
    report |= {
        "untouched": torch.equal(after_forward, values if case.get("direct") else values / TEMPERATURE)
        and (held is None or torch.equal(held, after_forward)),
        "collectives": [len(forward_collectives), len(backward_collectives)],
        "extra_memory": [forward_peak.bytes / values.nbytes, backward_peak.bytes / values.nbytes],
        "observed": counters.observed(),
        "failed": failed,
    }
    if not large:
        exact = reference(whole / TEMPERATURE, label, weights, of_entropy)
        gradient = exact[2][..., part]
        if case.get("distillation"):
            gradient = gradient + 2 * (values / TEMPERATURE).double() / shard
        wanted = {"log_probs": exact[0], "entropy": exact[1], "gradient": gradient / TEMPERATURE}
        if gradients:
            report["gradient"] = gradients[0]
        known = label >= 0
        for name in wanted.keys() & report.keys():
            keep = known if name == "log_probs" else slice(None)
            report[f"error_of_{name}"] = shared.distance(report[name][keep], wanted[name][keep])
    return report


def of_inputs() -> dict[str, Any]:
    """Shapes and types beyond those of the cases: what comes out, of which dtype; or what is raised."""
    module, rank = functions(), torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(7)
    found: dict[str, Any] = {}
    for shape, dtype, of_label in itertools.product(
        ((6,), (0,), (2, 0), (3, 4), (1, 1)), ("float32", "bfloat16", "float16", "float64"), ("int64", "int32")
    ):
        whole = (torch.randn(*shape, ranks * SHARD, generator=generator) * 4).to(getattr(torch, dtype))
        part = whole[..., rank * SHARD : (rank + 1) * SHARD]  # not contiguous
        label = torch.randint(ranks * SHARD, shape, generator=generator).to(getattr(torch, of_label))
        exact = torch.log_softmax(whole.double(), -1)
        wanted = {
            "log_probs": exact.gather(-1, label.long()[..., None])[..., 0],
            "entropy": -(exact.exp() * exact).sum(-1),
        }
        for name, call in {
            "log_probs": lambda given, label=label: module.vocab_parallel_log_probs_from_logits(given, label),
            "entropy": module.vocab_parallel_entropy,
        }.items():
            given = part.clone(memory_format=torch.preserve_format).requires_grad_()
            case = f"{name}, {shape}, {dtype}, {of_label}"
            try:
                out = call(given * 1.0)
                out.sum().backward()
            except Exception as error:
                found[case] = type(error).__name__
                continue
            distance = (out - wanted[name]).abs().max().item() if out.numel() else 0.0
            found[case] = [str(out.dtype), list(out.shape), str(given.grad.dtype), distance]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    cases = {name: case for name, case in CASES.items() if not (is_old() and name in ONLY_NEW)}
    inputs = {"before": of_inputs()}
    report: dict[str, Any] = shared.in_every_state(cases, run, PATCH)
    rlhf_patches.apply(only=PATCH)
    report["inputs"] = inputs | {"after": of_inputs()}
    report["row"] = rlhf_patches.report()[PATCH].to_dict()
    (options.out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
