"""SkyRL's training step with logits in the model's dtype, on two ranks: in each combination of patches.

``--out FOLDER PART ...``, with the folder of a SkyRL release on sys.path. The model, the batches and the trainer are
those of logprob_backward_training_ranks.py. What log-probabilities, entropies and the gradient of the model's output
should be is computed in float64 from that output, by both ranks' halves of the vocabulary at once. Each rank writes its
report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu

megatron_on_cpu.install()

from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module

import rlhf_patches
from rlhf_patches.patches._vocab_parallel import softmax
from rlhf_patches.patches.skyrl import _logits
from tests.harness import small_gpt
from tests.harness.token_reference import counted_all_reduces, peak_memory
from tests.patches.skyrl import logprob_backward_training_ranks as training

PATCH = "skyrl-bf16-logits"
COMBINATIONS = {
    "alone": [PATCH],
    "with log-probabilities": [PATCH, "skyrl-logprob-backward"],
    "with entropies": [PATCH, "skyrl-entropy-backward"],
    "with both": [PATCH, "skyrl-logprob-backward", "skyrl-entropy-backward"],
    "with all": ["skyrl-*"],
}
ENTROPY_WEIGHT = 0.3
CHUNK_BYTES = _logits.CHUNK_BYTES  # as shipped
MISSING = "missing"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"packed": True},
    "chunks of 5": {"chunk": 5},
    "no chunks": {"chunk": None},
    "entropy in the loss": {"entropy": True},
    "entropy in the loss, packed": {"entropy": True, "packed": True},
    "temperature": {"temperature": 0.7, "chunk": 5},
    "fp32 model": {"bf16": False, "entropy": True, "chunk": 5},
}


def settings(case: dict[str, Any]) -> SimpleNamespace:
    """The trainer's configuration; 0.2.0's has no ``logprobs_chunk_size`` unless the case has one."""
    config = SimpleNamespace(
        algorithm=SimpleNamespace(
            policy_loss_type="regular",
            use_entropy_loss=case.get("entropy", False),
            entropy_loss_coef=ENTROPY_WEIGHT,
            use_kl_loss=False,
            kl_loss_coef=0.0,
        ),
        use_sample_packing=case.get("packed", False),
        remove_microbatch_padding=case.get("packed", False),  # 0.3.0's name for it
        policy=SimpleNamespace(
            megatron_config=SimpleNamespace(mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
        ),
    )
    if case.get("chunk", MISSING) != MISSING:
        config.logprobs_chunk_size = case["chunk"]
    return config


@contextlib.contextmanager
def watched(gpt: Any) -> Iterator[list[list[torch.Tensor]]]:
    """The model's outputs and their gradients, without holding either."""
    found: list[list[torch.Tensor]] = []

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        entry = [output.detach().clone()]
        found.append(entry)
        if output.requires_grad:
            output.register_hook(lambda gradient: entry.append(gradient.clone()))

    handle = gpt.register_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def wrapper_of(model: Any, case: dict[str, Any]) -> Any:
    module = training.skyrl_on_cpu.model_wrapper()
    return module.MegatronModelWrapper(settings(case), [model], None, training.policy_loss)


def train(case: dict[str, Any]) -> dict[str, Any]:
    model = training.make_model(case.get("bf16", True))
    wrapper = wrapper_of(model, case)
    wrapper.train()
    gpt = model.module.module if case.get("bf16", True) else model.module
    temperature = case.get("temperature", 1.0)
    with watched(gpt) as outputs, logits_seen() as dtypes, counted_all_reduces() as collectives:
        metrics = wrapper.forward_backward_mini_batch(
            training.make_micro_batches(), training.LENGTH, training.ROWS, temperature=temperature
        )
    with torch.no_grad():
        inference = wrapper.forward(training.make_micro_batches(), training.LENGTH, training.ROWS, temperature)
    return {
        "metrics": metrics,
        "outputs": outputs,
        "inference": inference,
        "logits": dtypes,
        "collectives": len(collectives),
        "gradients": {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()},
    }


@contextlib.contextmanager
def logits_seen() -> Iterator[list[str]]:
    """The dtypes of the logits that go into the loss, and of the log-probabilities that come out."""
    module = training.skyrl_on_cpu.model_wrapper()
    seen: list[str] = []
    original = module.from_parallel_logits_to_logprobs

    def logprobs(given: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        result: torch.Tensor = original(given, *arguments, **keywords)
        seen.append(f"{given.dtype} {result.dtype} {keywords['chunk_size']}".replace("torch.", ""))
        return result

    module.from_parallel_logits_to_logprobs = logprobs
    try:
        yield seen
    finally:
        module.from_parallel_logits_to_logprobs = original


# ------------------------------------------------------------------------------------- float64


def whole(output: torch.Tensor) -> torch.Tensor:
    """Both ranks' halves, in float64."""
    halves = [torch.empty_like(output) for _ in range(2)]
    torch.distributed.all_gather(halves, output.contiguous())
    return torch.cat(halves, -1).double()


def exact(output: torch.Tensor, batch: dict[str, Any], case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Log-probabilities and mean entropy of one micro-batch, and the gradient of the model's output, in float64."""
    leaf = whole(output).requires_grad_()
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1)
    placed = torch.zeros(*mask.shape, leaf.shape[-1], dtype=torch.float64)
    if case.get("packed"):
        starts = itertools.accumulate((length + length % 2 for length in lengths.tolist()), initial=0)
        rows = [leaf[0, start : start + length] for start, length in zip(starts, lengths.tolist(), strict=False)]
    else:
        rows = [leaf[row, :length] for row, length in enumerate(lengths.tolist())]
    placed[mask] = torch.cat(rows)
    log_p = (placed / case.get("temperature", 1.0)).log_softmax(-1)
    target = batch["sequences"].roll(-1, -1)
    log_probs = log_p.gather(-1, target[..., None])[:, :-1, 0][:, -training.ACTIONS :]
    entropies = -(log_p.exp() * log_p).sum(-1)[:, -training.ACTIONS - 1 : -1]
    entropy = (entropies * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    old, advantages = batch["old_action_log_probs"], batch["advantages"]
    loss, _ = training.policy_loss(log_probs, old, advantages, None, batch["loss_mask"], None)
    if case.get("entropy"):
        # SkyRL multiplies the policy loss by the number of micro-batches, and megatron-core divides all by it.
        loss = loss - ENTROPY_WEIGHT * entropy / 2
    (gradient,) = torch.autograd.grad(loss, leaf)
    part = gradient.chunk(2, -1)[torch.distributed.get_rank()]
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "gradient": part}


def errors(found: dict[str, Any], case: dict[str, Any]) -> dict[str, float]:
    """The largest of both micro-batches.

    gradient: in units of what rounding to the output's dtype may do to a number, half a unit in the last place, and
    a millionth of the largest number, which is what float32 may do on the way.
    """
    result: dict[str, float] = {"log_probs": 0.0, "entropy": 0.0, "gradient": 0.0, "gradient as a whole": 0.0}
    batches = training.make_micro_batches()
    for number, (batch, metrics) in enumerate(zip(batches, found["metrics"], strict=True)):
        output, gradient = found["outputs"][number]
        truth = exact(output, batch, case)
        start, rows = number * training.ROWS, training.ROWS
        log_probs = found["inference"][start : start + rows].double()
        rounding = truth["gradient"].abs() * torch.finfo(gradient.dtype).eps / 2 + 1e-6 * truth["gradient"].abs().max()
        off = (gradient.double() - truth["gradient"]).abs()
        errors = {
            "log_probs": ((log_probs - truth["log_probs"]).abs() * batch["loss_mask"]).max(),
            "entropy": abs(metrics["policy_entropy"] - truth["entropy"]),
            "gradient": (off / rounding).max(),
            "gradient as a whole": off.norm() / truth["gradient"].norm(),
        }
        result = {name: max(value, float(errors[name])) for name, value in result.items()}
    return result


# ------------------------------------------------------------------------------------- parts


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    deviations = [
        (found - before["gradients"][name]).norm() / before["gradients"][name].norm().clamp(min=1e-30)
        for name, found in after["gradients"].items()
    ]
    outputs = [[one["loss_fn_outputs"] for one in state["metrics"]] for state in (before, after)]
    return {
        "same_log_probs": outputs[0] == outputs[1],
        "same_inference": torch.equal(before["inference"], after["inference"]),
        "inference_dtype": str(after["inference"].dtype),
        "entropies": [[one["policy_entropy"] for one in state["metrics"]] for state in (before, after)],
        "gradients_found": sum(bool(gradient.any()) for gradient in before["gradients"].values()),
        "largest_deviation": max(deviations).item(),
        "logits": [before["logits"], after["logits"]],
        "collectives": [before["collectives"], after["collectives"]],
    }


def status() -> str:
    (row,) = [row for row in rlhf_patches.report() if row.name == PATCH]
    return str(row.status)


def observed() -> dict[str, int]:
    """Since the last call."""
    found = _logits.observed()
    _logits._done.clear()
    return found


def some_numbers() -> dict[str, Any]:
    """One case of each kind, with this patch alone and with all."""
    kinds = ("plain", "packed", "entropy in the loss", "temperature", "fp32 model")
    return numbers(("alone", "with all"), {name: CASES[name] for name in kinds})


def numbers(
    combinations: Sequence[str] = ("alone", "with log-probabilities", "with entropies", "with all"),
    cases: dict[str, dict[str, Any]] = CASES,
) -> dict[str, Any]:
    """Every case, as released, in combinations of patches, and one after a revert.

    "with both" is as "with all", but for what `skyrl-sequence-parallel-logits` does.
    """
    _logits.CHUNK_BYTES = 4 * 4 * training.ROWS * (small_gpt.VOCABULARY // 2)  # four tokens
    before = {name: train(case) for name, case in cases.items()}
    report: dict[str, Any] = {"before": {name: errors(before[name], case) for name, case in cases.items()}}
    for combination, patches in [*((name, COMBINATIONS[name]) for name in combinations), ("reverted", [])]:
        if patches:
            rlhf_patches.apply(only=patches)
        observed()
        found: dict[str, Any] = {}
        for name, case in cases.items() if patches else [("plain", CASES["plain"])]:
            after = train(case)
            found[name] = {
                "observed": observed(),
                "errors": errors(after, case),
                **compared(before[name], after),
            }
        report[combination] = {"status": status() if patches else None, "cases": found}
        rlhf_patches.revert()
    return report


def own() -> dict[str, Any]:
    """Log-probabilities of a mini-batch: of 0.2.0 with the patch, or of 0.3.0, which the patch leaves alone."""
    rlhf_patches.apply(only=PATCH)
    found: dict[str, Any] = {"status": status()}
    for name, case in {"1024": {"chunk": 1024}, "5": {"chunk": 5}, "packed 5": {"chunk": 5, "packed": True}}.items():
        result = train(case)
        found[name] = [
            [one["loss_fn_outputs"] for one in result["metrics"]],
            result["inference"].tolist(),
            [one["policy_entropy"] for one in result["metrics"]],
            result["logits"][:1],
        ]
    rlhf_patches.revert()
    return found


def memory() -> dict[str, Any]:
    """The most memory at once in a step of one micro-batch, as a multiple of its logits in bfloat16."""
    _logits.CHUNK_BYTES = softmax.WORK_BYTES = 1 << 18
    small = small_gpt.VOCABULARY, training.LENGTH
    small_gpt.VOCABULARY, training.LENGTH = 1 << 14, 96
    unit = 2 * training.ROWS * training.LENGTH * (small_gpt.VOCABULARY // 2)

    def measured(case: dict[str, Any]) -> dict[str, Any]:
        model = training.make_model(case.get("bf16", True))
        wrapper = wrapper_of(model, case)
        wrapper.train()
        batches = training.make_micro_batches()[:1]
        with peak_memory() as step, logits_seen() as chunks:
            wrapper.forward_backward_mini_batch(batches, training.LENGTH, training.ROWS)
        batches = training.make_micro_batches()[:1]
        with torch.no_grad(), peak_memory() as inference:
            wrapper.forward(batches, training.LENGTH, training.ROWS)
        return {"step": step.bytes / unit, "inference": inference.bytes / unit, "logits": chunks}

    cases = {name: CASES[name] for name in ("plain", "packed", "entropy in the loss")} | {"fp32 model": {"bf16": False}}
    report: dict[str, Any] = {}
    for combination, patches in {"before": [], "others alone": ["skyrl-*-backward"], **COMBINATIONS}.items():
        if patches:
            rlhf_patches.apply(only=patches)
        report[combination] = {name: measured(case) for name, case in cases.items()}
        rlhf_patches.revert()
    small_gpt.VOCABULARY, training.LENGTH = small
    return report


def context_parallel() -> dict[str, Any]:
    """Packed logits put together from two context-parallel ranks: in bfloat16 as in float32."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    utils = sys.modules[training.skyrl_on_cpu.model_wrapper().preprocess_packed_seqs.__module__]
    batch = training.make_micro_batches()[0]
    mask = batch["attention_mask"].bool()

    def joined(dtype: torch.dtype) -> list[torch.Tensor]:
        _, packing = utils.preprocess_packed_seqs(batch["sequences"], mask)
        generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())
        tokens = int(packing.cu_seqlens_q_padded[-1]) // 2
        leaf = torch.randn(1, tokens, 6, generator=generator).bfloat16().to(dtype).requires_grad_()
        result = utils.postprocess_packed_seqs(leaf * 1, packing, mask, training.ROWS, training.LENGTH)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(8)).bfloat16().to(dtype)
        result.backward(weights)
        return [result.detach(), leaf.grad]

    def attempt(dtype: torch.dtype) -> Any:
        try:
            return joined(dtype)
        except RuntimeError as error:
            return str(error)

    reference, before = joined(torch.float32), attempt(torch.bfloat16)
    rlhf_patches.apply(only=PATCH)
    whole, half = joined(torch.float32), attempt(torch.bfloat16)
    report = {
        "before": before,
        "float32": all(torch.equal(a, b) for a, b in zip(reference, whole, strict=True)),
        "bfloat16": [[str(b.dtype), torch.equal(a, b.float())] for a, b in zip(reference, half, strict=True)],
    }
    rlhf_patches.revert()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return report


def models() -> dict[str, Any]:
    """Which models are called with fp32_output=False, and why others are not."""

    class Narrow(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids: Any, positions: Any, mask: Any, packed_seq_params: Any = None) -> Any: ...

    class Own(Float16Module):
        def forward(self, *inputs: Any, **keywords: Any) -> Any: ...

    _logits.CHUNK_BYTES = CHUNK_BYTES
    half, single = training.make_model(True), training.make_model(False)
    shapes = {
        "DDP": half,
        "no DDP": half.module,
        "fp32 with DDP": single,
        "fp32": single.module,
        "fp16": Float16Module(dataclasses.replace(half.module.config, bf16=False, fp16=True), torch.nn.Linear(1, 1)),
        "a wrapper of one's own": Narrow(half),
        "a Float16Module of one's own": Own(half.module.config, half.module.module),
    }
    report: dict[str, Any] = {}
    for name, model in shapes.items():
        observed()
        call = _logits.in_its_dtype(model, 1.0)
        report[name] = [getattr(call, "keywords", None), call is model, observed()]
    ids = training.make_micro_batches()[0]["sequences"]
    report["dtypes"] = [str(_logits.in_its_dtype(half, t)(ids, None, None).dtype) for t in (1.0, 1, 0.5)]
    report["chunks"] = chunk_sizes(_logits.tokens_per_chunk)
    return report


def chunk_sizes(function: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows, columns in ((1, 151936), (1, 18992), (8, 18992), (64, 1 << 22)):
        found[f"{rows} x {columns}"] = function(SimpleNamespace(), torch.empty(rows, 4, columns, device="meta"))
    for size in (None, 1, 300, 0, -1, 2.0, True, "16"):
        try:
            found[repr(size)] = function(SimpleNamespace(logprobs_chunk_size=size), torch.empty(1, 4, 8))
        except ValueError as error:
            found[repr(size)] = str(error)
    return found


PARTS = {f.__name__: f for f in (some_numbers, numbers, own, memory, context_parallel, models)}


def fill(report: dict[str, Any], parts: list[str]) -> None:
    training.skyrl_on_cpu.model_wrapper()
    for part in parts:
        report[part] = PARTS[part]()


def main() -> None:
    training.skyrl_on_cpu.on_each_rank(fill)
