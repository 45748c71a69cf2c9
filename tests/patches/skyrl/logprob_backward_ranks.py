"""What happens on each of two ranks in the tests of SkyRL's patches: the real SkyRL, real megatron-core, gloo.

``--out FOLDER PART ...``, with the folder of a SkyRL release on sys.path. A part runs its cases as released, with the
patches, and after a revert; each rank writes its report.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core import parallel_state

import rlhf_patches
from rlhf_patches.patches._vocab_parallel import counters, softmax
from tests.harness import skyrl_on_cpu
from tests.harness.token_reference import Peak, counted_all_reduces, made, peak_memory, reference

B, S, SHARD, ACTIONS = 2, 24, 64, 11  # rows, positions, columns of a rank, and how many positions have an entropy
CHUNK = 5  # the last chunk is ragged
softmax.WORK_BYTES = 4 * 4 * SHARD  # several blocks here too, of four tokens
Case = dict[str, Any]
upstream = skyrl_on_cpu.model_utils  # logprob_backward_ranks.py puts another module with the same functions here


def failure(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """What a function returns, and what it raised."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def in_every_state(cases: dict[str, Case], run: Callable[[Case], Case], *patches: str) -> dict[str, Any]:
    """The reports of cases, those of the last two states compared with the first."""
    found = {"before": {name: run(case) for name, case in cases.items()}}
    rlhf_patches.apply(only=patches)
    found["after"] = {name: run(case) for name, case in cases.items()}
    rlhf_patches.revert()
    found["reverted"] = {name: run(case) for name, case in list(cases.items())[::5]}
    for state in ("after", "reverted"):
        for name, one in found[state].items():
            compare(one, found["before"][name])
    return {state: {name: without_tensors(one) for name, one in some.items()} for state, some in found.items()}


def compare(found: Case, before: Case) -> None:
    """Note how far the tensors of a report are from those of another, relative to the largest value."""
    for name, tensor in list(found.items()):
        other = before.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor):
            found[f"same_{name}"] = torch.equal(tensor, other)
            found[f"distance_of_{name}"] = distance(tensor, other)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest deviation, relative to the largest value wanted."""
    scale = wanted.abs().max().item() or 1.0
    return (found.double() - wanted.double()).abs().max().item() / scale


def without_tensors(report: Case) -> Case:
    return {name: value for name, value in report.items() if not isinstance(value, torch.Tensor)}


# ------------------------------------------------------------------------------------- SkyRL's functions

_MORE: dict[str, Case] = {
    "entropy-first": {"kind": "chunked", "entropy": "loss", "first": True},
    "entropy-alone": {"kind": "", "entropy": "loss"},
    "entropy-alone-bfloat16": {"kind": "", "entropy": "loss", "dtype": "bfloat16"},
    "chunked-unknown": {"kind": "chunked", "entropy": "", "unknown": slice(None, None, 3)},
    "chunked-unknown-loss": {"kind": "chunked", "entropy": "loss", "unknown": slice(None)},
    "class-unknown": {"kind": "class", "entropy": "", "unknown": slice(None)},
    "chunked-class-unknown": {"kind": "chunked-class", "entropy": "", "unknown": slice(None)},
    "changed-metric": {"kind": "chunked", "entropy": "metric", "changed": True},
    "held": {"kind": "chunked", "entropy": "", "hold": True},
    "held-loss": {"kind": "chunked", "entropy": "loss", "hold": True},
    "inference": {"kind": "chunked", "entropy": "", "inference": True},
    "inference-packed-whole": {"kind": "packed-whole", "entropy": "metric", "inference": True},
}
FUNCTIONS: dict[str, Case] = {
    f"{kind}{entropy and '-' + entropy}{dtype and '-' + dtype}": {"kind": kind, "entropy": entropy, "dtype": dtype}
    for kind in ("chunked", "whole", "packed", "packed-whole", "class", "chunked-class")
    for entropy in ("", "metric", "loss")
    for dtype in ("", "bfloat16")
    if not (entropy == "metric" and dtype)
} | {name: {"dtype": "", **case} for name, case in _MORE.items()}


MEASURED = {
    *((kind, "") for kind in ("chunked", "whole", "packed", "packed-whole")),
    *((kind, "loss") for kind in ("chunked", "whole", "packed")),
}
"""Kinds and entropies of the cases whose memory is looked at."""


def no_peak() -> contextlib.nullcontext[Peak]:
    """In place of `peak_memory`."""
    return contextlib.nullcontext(Peak())


def run_function(case: Case) -> Case:
    """Log-probabilities and entropies of the same logits, and their backward, as SkyRL's loss function calls them."""
    generator = torch.Generator().manual_seed(5)
    dtype = getattr(torch, case["dtype"] or "float32")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    packed = case["kind"].startswith("packed")
    rows, tokens = (1, B * S) if packed else (B, S)
    whole = (torch.randn(rows, tokens, ranks * SHARD, generator=generator) * 4).to(dtype)
    target = torch.randint(ranks * SHARD, (rows, tokens), generator=generator)
    if "unknown" in case:  # targets that no rank has: ignored labels, and a vocabulary's padding
        target[:, case["unknown"]] = torch.tensor([-100, ranks * SHARD + 3])[:, None]
    weights = torch.randn(B, S - 1, generator=generator)
    entropy_weights = torch.randn(rows, tokens if packed else ACTIONS, generator=generator)
    part = slice(rank * SHARD, (rank + 1) * SHARD)
    gradients: list[torch.Tensor] = []
    logits = made(whole[..., part].contiguous(), gradients.append)
    if dtype is torch.bfloat16 and case["kind"] == "whole":
        logits = logits.float()  # as Megatron's Float16Module does it
    counters.reset()
    report: Case = {}
    held = logits if case.get("hold") else None
    version = logits._version

    def forward(logits: torch.Tensor) -> torch.Tensor:
        module = upstream()
        loss = torch.zeros(())
        for what in ("entropy", "log_probs") if case.get("first") else ("log_probs", "entropy"):
            if what == "entropy" and case["entropy"]:
                with torch.set_grad_enabled(case["entropy"] == "loss"):
                    window = logits if packed else logits[:, -ACTIONS - 1 : -1, :]
                    entropy = module.vocab_parallel_entropy(window, **case.get("chunks", {}))
                    if case.get("changed"):  # as a caller that masks it; the next one gets it as it was
                        entropy.mul_(0.0)
                        entropy = module.vocab_parallel_entropy(window)
                loss = loss + 0.1 * (entropy * entropy_weights).sum()
                report["entropy"], report["entropy_dtype"] = entropy.detach(), str(entropy.dtype)
            elif what == "log_probs" and case["kind"]:
                log_probs = call(module, case, logits, target, rank)
                loss = loss + (log_probs * weights).sum()
                report["log_probs"], report["log_probs_dtype"] = log_probs.detach(), str(log_probs.dtype)
        return loss

    # Measuring takes ten times as long as what is measured.
    plain = not {"first", "unknown", "changed", "hold", "inference", "chunks"} & set(case) and not case["dtype"]
    measured = peak_memory if plain and (case["kind"], case["entropy"]) in MEASURED else no_peak
    with counted_all_reduces() as forward_collectives, measured() as forward_peak:
        loss, report["failed_forward"] = failure(forward, logits)
    del logits
    with counted_all_reduces() as backward_collectives, measured() as backward_peak:
        _, report["failed"] = (None, None) if loss is None or not loss.requires_grad else failure(loss.backward)
    unit = whole.element_size() * whole[..., part].numel()
    report |= {
        "collectives": [len(forward_collectives), len(backward_collectives)],
        "extra_memory": [forward_peak.bytes / unit, backward_peak.bytes / unit],
        "observed": counters.observed(),
        "loss": loss,
    }
    if held is not None:
        report["held_unchanged"] = held._version == version and torch.equal(held, whole[..., part])
    if gradients:
        report["gradient"] = gradients[0]
        if not packed:
            exact = exactly(case, whole, target, weights, entropy_weights)
            report |= {f"error_of_{name}": distance(report[name], wanted) for name, wanted in exact if name in report}
    return report


def call(module: Any, case: Case, logits: torch.Tensor, target: torch.Tensor, rank: int) -> torch.Tensor:
    """Through SkyRL's callers, or the autograd functions themselves."""
    group = parallel_state.get_tensor_model_parallel_group()
    start, end, inference = rank * SHARD, (rank + 1) * SHARD, bool(case.get("inference"))
    chunk = CHUNK if "whole" not in case["kind"] else None
    if case["kind"].startswith("packed"):
        offsets = torch.arange(B + 1) * S
        return module.from_parallel_logits_to_logprobs_packed_sequences(
            logits, target, offsets, S, start, end, group, inference_only=inference, chunk_size=chunk
        )
    if case["kind"] in ("chunked", "whole"):
        return module.from_parallel_logits_to_logprobs(
            logits, target, start, end, group, inference_only=inference, chunk_size=chunk
        )
    target = target.roll(-1, -1)
    if case["kind"] == "class":
        return module.DistributedLogprob.apply(logits, target, start, end, group)[:, :-1]
    return module.ChunkedDistributedLogprob.apply(logits, target, start, end, CHUNK, group)[:, :-1]


def exactly(
    case: Case, whole: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, entropy_weights: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """In float64, over the whole vocabulary: what a report should have."""
    of_log_probs = torch.nn.functional.pad(weights, (0, 1)) if case["kind"] else torch.zeros(B, S)
    of_entropy = torch.nn.functional.pad(0.1 * entropy_weights, (S - ACTIONS - 1, 1))
    log_probs, entropy, gradient = reference(
        whole, target.roll(-1, -1), of_log_probs, of_entropy if case["entropy"] == "loss" else None
    )
    rank = torch.distributed.get_rank()
    return [
        ("log_probs", log_probs[:, :-1]),
        ("entropy", entropy[:, -ACTIONS - 1 : -1]),
        ("gradient", gradient[..., rank * SHARD : (rank + 1) * SHARD]),
    ]


def functions() -> dict[str, Any]:
    return in_every_state(FUNCTIONS, run_function, "skyrl-*")


def demo() -> dict[str, Any]:
    return in_every_state({name: FUNCTIONS[name] for name in ("chunked", "chunked-loss")}, run_function, "skyrl-*")


def functions_without_the_entropy_patch() -> dict[str, Any]:
    cases = {name: case for name, case in FUNCTIONS.items() if name in ("whole-loss", "chunked-loss", "class", "whole")}
    return in_every_state(cases, run_function, "skyrl-logprob-backward")


def chunked_entropy() -> dict[str, Any]:
    """0.4.0 cuts the logits of the entropy into chunks; a weighted sum for packed sequences."""
    base: Case = {"kind": "", "entropy": "loss", "dtype": ""}
    cases = {f"chunk-{size}": {**base, "chunks": {"chunk_size": size}} for size in (1, 3, 64)}
    report = in_every_state(cases, run_function, "skyrl-*")
    sums: dict[str, Case] = {f"sum-{size}": {"chunks": {"chunk_size": size}} for size in (None, 5, 12)}
    of_bad: Case = {"chunks": {"chunk_size": 2}, "bad": True}
    sums |= {"bad-sum": of_bad, "bad-metric": {**of_bad, "packed": True}}
    sums |= {f"{name}-after-log-probs": {**case, "log_probs": True} for name, case in sums.items() if name[:3] == "bad"}
    summed = in_every_state(sums, run_weighted_sum, "skyrl-*")
    return {state: {**report[state], **summed[state]} for state in report}


def run_weighted_sum(case: Case) -> Case:
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(1, B * S, SHARD, generator=generator)
    weights = (torch.arange(B * S) % S >= 12).float()  # whole chunks have none
    if case.get("bad"):
        values[0, 2, 7], values[0, S + 3, 9], values[0, S + 5] = torch.nan, torch.inf, -torch.inf
    module = skyrl_on_cpu.model_utils()
    gradients: list[torch.Tensor] = []
    logits = made(values, gradients.append)
    counters.reset()
    log_probs = None
    if case.get("log_probs"):  # the entropies are there already
        log_probs = call(module, {"kind": "packed"}, logits, torch.zeros(1, B * S, dtype=torch.long), 0)
    with counted_all_reduces() as collectives:
        if case.get("packed"):
            offsets, mask = torch.arange(B + 1) * S, torch.ones(B, S, dtype=torch.bool)
            metric, entropy = module.vocab_parallel_entropy_packed_sequences(
                logits, offsets, S, ACTIONS, mask, None, None, **case["chunks"]
            )
        else:
            metric = entropy = module.vocab_parallel_entropy_weighted_sum(logits, weights, **case["chunks"])
    del logits, log_probs
    with peak_memory() as peak:
        entropy.backward()
    unit = values.element_size() * values.numel()
    return {
        "sum": metric.detach(),
        "gradient": gradients[0],
        "collectives": len(collectives),
        "extra_memory": peak.bytes / unit,
        "observed": counters.observed(),
    }


def context_parallel() -> dict[str, Any]:
    """The ranks share the sequence, not the vocabulary; log-probabilities are gathered over them."""
    own = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]

    def run(case: Case) -> Case:
        generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())
        values = torch.randn(B, S // 2, SHARD, generator=generator)
        target = torch.randint(SHARD, (B, S), generator=torch.Generator().manual_seed(7))
        gradients: list[torch.Tensor] = []
        logits = made(values, gradients.append)
        counters.reset()
        log_probs = skyrl_on_cpu.model_utils().from_parallel_logits_to_logprobs(
            logits, target, 0, SHARD, own, cp_group=torch.distributed.group.WORLD, **case
        )
        del logits
        log_probs.square().sum().backward()
        return {"log_probs": log_probs.detach(), "gradient": gradients[0], "observed": counters.observed()}

    # SkyRL's backward of that gather moves an index to the GPU through pinned memory.
    make = torch.tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs))
        patch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
        return in_every_state({"whole": {}, "chunked": {"chunk_size": 5}}, run, "skyrl-*")


def whatever_worked() -> dict[str, Any]:
    """What SkyRL's functions take, or refuse, beyond what ours compute; and a backward that cannot be."""
    module, group = skyrl_on_cpu.model_utils(), parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(B, S, SHARD, generator=generator)
    target = torch.randint(torch.distributed.get_world_size() * SHARD, (B, S), generator=generator)
    start = torch.distributed.get_rank() * SHARD
    part = (start, start + SHARD)
    apply, chunked = module.DistributedLogprob.apply, module.ChunkedDistributedLogprob.apply

    def backward_of_inference_only() -> None:
        apply(values.clone().requires_grad_() * 1, target, *part, group, True).sum().backward()

    def changed_before_backward() -> torch.Tensor:
        logits = values.clone().requires_grad_() * 1
        log_probs = chunked(logits, target, *part, CHUNK, group)
        with torch.no_grad():
            logits.div_(2)
        log_probs.sum().backward()
        return log_probs.detach()

    calls: dict[str, Callable[[], Any]] = {
        "fewer targets": lambda: apply(values, target[:, :-1], *part, group),
        "fewer targets, chunked": lambda: chunked(values, target[:, :-1], *part, CHUNK, group, True),
        "integers": lambda: apply((values * 4).long(), target, *part, group),
        "integers, chunked": lambda: chunked((values * 4).long(), target, *part, CHUNK, group),
        "a wider range": lambda: apply(values, target, start, start + SHARD + 1, group),
        "a wider range, chunked": lambda: chunked(values, target, start, start + SHARD + 1, CHUNK, group),
        "int32 targets": lambda: chunked(values, target.int(), *part, CHUNK, group),
        "float64": lambda: apply(values.double(), target, *part, group),
        "one token's entropy": lambda: module.vocab_parallel_entropy(values[0, 0].clone()),
        "chunk of no tokens": lambda: chunked(values, target, *part, 0, group),
        "backward of inference_only": backward_of_inference_only,
        "changed before backward": changed_before_backward,
    }

    def run(case: Case) -> Case:
        found, error = failure(calls[case["call"]])
        return {"result": found, "failed": error}

    return in_every_state({name: {"call": name} for name in calls}, run, "skyrl-*")


def fused() -> dict[str, Any]:
    """With the patches: how far the functions are from SkyRL's fused one, which makes no logits (0.3.0 and later)."""
    module, group = skyrl_on_cpu.model_utils(), parallel_state.get_tensor_model_parallel_group()
    if not hasattr(module, "FusedLinearChunkedDistributedLogprob"):
        return {}
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    bounds, chunk = (rank * SHARD, (rank + 1) * SHARD), CHUNK
    generator = torch.Generator().manual_seed(8)
    hidden, whole = (torch.randn(*shape, generator=generator) for shape in ((B, S, 16), (ranks * SHARD, 16)))
    weights = torch.randn(B, S, generator=generator)
    rlhf_patches.apply(only="skyrl-*")
    found = {}
    for name, unknown in (("none", slice(0)), ("every third", slice(None, None, 3)), ("all", slice(None))):
        target = torch.randint(ranks * SHARD, (B, S), generator=generator)
        target[:, unknown] = torch.tensor([-100, ranks * SHARD + 3])[:, None]

        def run(kind: str, target: torch.Tensor = target) -> list[torch.Tensor]:
            leaves = [hidden.clone().requires_grad_(), whole[slice(*bounds)].clone().requires_grad_()]
            if kind == "fused":
                apply = module.FusedLinearChunkedDistributedLogprob.apply
                log_probs = apply(*leaves, target, *bounds, chunk, group, False)
            elif kind == "chunked":
                apply = module.ChunkedDistributedLogprob.apply
                log_probs = apply(leaves[0] @ leaves[1].t(), target, *bounds, chunk, group, False)
            else:
                log_probs = module.DistributedLogprob.apply(leaves[0] @ leaves[1].t(), target, *bounds, group, False)
            return [log_probs.detach(), *torch.autograd.grad((log_probs * weights).sum(), leaves)]

        wanted = run("fused")
        found[name] = {
            kind: [distance(one, other) for one, other in zip(run(kind), wanted, strict=True)]
            for kind in ("chunked", "whole")
        }
        found[name]["gradients"] = [one.abs().max().item() for one in wanted[1:]]
    rlhf_patches.revert()
    return found


def without_group() -> dict[str, Any]:
    """Before Megatron is initialized, as in SkyRL's own tests, which replace the autograd function."""
    module, logits = skyrl_on_cpu.model_utils(), torch.arange(24.0).view(1, 6, 4)
    calls: dict[str, Callable[[], Any]] = {"entropy": lambda: module.vocab_parallel_entropy(logits).tolist()}
    if hasattr(module, "vocab_parallel_entropy_weighted_sum"):
        weights = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0, 1.0])
        weighted = module.vocab_parallel_entropy_weighted_sum
        calls["in chunks"] = lambda: module.vocab_parallel_entropy(logits, 4).tolist()
        calls["sum"] = lambda: weighted(logits, weights).item()
        calls["sum in chunks"] = lambda: weighted(logits, weights, chunk_size=2).item()

    def run(case: Case) -> Case:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", None)
            bare = {name: failure(one) for name, one in calls.items()}
            patch.setattr(module._VocabParallelEntropy, "apply", lambda logits: logits.sum(-1))
            return {"bare": bare, "replaced": {name: failure(one) for name, one in calls.items()}}

    return in_every_state({"run": {}}, run, "skyrl-*")


def across() -> dict[str, str | None]:
    """Backward in another state than forward: what it says."""

    def losses() -> dict[str, torch.Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        target = torch.zeros(B, S, dtype=torch.long)
        logits = [torch.zeros(B, S, SHARD, requires_grad=True) * 1 for _ in range(3)]
        module = skyrl_on_cpu.model_utils()
        return {
            "whole": module.DistributedLogprob.apply(logits[0], target, 0, SHARD, group).sum(),
            "chunked": module.ChunkedDistributedLogprob.apply(logits[1], target, 0, SHARD, CHUNK, group).sum(),
            "entropy": module._VocabParallelEntropy.apply(logits[2]).sum(),
        }

    before = losses()
    rlhf_patches.apply(only="skyrl-*")
    found = {f"{name}, then apply": failure(loss.backward)[1] for name, loss in before.items()}
    after = losses()
    rlhf_patches.revert()
    return found | {f"{name}, then revert": failure(loss.backward)[1] for name, loss in after.items()}


def statuses() -> dict[str, str]:
    """With every patch of these functions asked for."""
    names = "skyrl-*-backward"
    rlhf_patches.apply(only=names)
    skyrl_on_cpu.model_utils()
    found = {row.name: row.status.value for row in rlhf_patches.report() if fnmatch.fnmatch(row.name, names)}
    rlhf_patches.revert()
    return found


PARTS = {
    part.__name__: part
    for part in (
        demo,
        functions,
        functions_without_the_entropy_patch,
        chunked_entropy,
        context_parallel,
        whatever_worked,
        fused,
        without_group,
        across,
        statuses,
    )
}


def fill(report: dict[str, Any], parts: list[str]) -> None:
    report.update({part: PARTS[part]() for part in parts})


def main() -> None:
    skyrl_on_cpu.on_each_rank(fill)
