"""What happens on each rank in the tests of vocab-parallel log-probabilities: gloo, and SkyRL's own file.

``--out FOLDER``: each rank writes its report,
and the tests look at it. Every rank makes the same logits over the whole vocabulary, takes its part, and
compares with float64 over all of it.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf_patches.patches._vocab_parallel import counters, softmax
from rlhf_patches.patches._vocab_parallel.entropy import token_entropy
from rlhf_patches.patches._vocab_parallel.logprob import token_logprobs
from tests.harness import upstream_logprob
from tests.harness.token_reference import counted_all_reduces, made, reference

B, S = 2, 21
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def all_in_range(vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (B, S))


CASES: dict[str, dict[str, Any]] = {
    f"{dtype}-scale{scale}": {"dtype": dtype, "scale": scale} for dtype in DTYPES for scale in (1, 10, 100)
} | {
    "one-shard": {"target": lambda vocabulary: torch.randint(0, 5, (B, S))},
    "none-in-range": {"target": lambda vocabulary: torch.full((B, S), -100)},
    "some-in-range": {"target": lambda vocabulary: torch.randint(-vocabulary, 2 * vocabulary, (B, S))},
    "none-in-range-bfloat16": {"target": lambda vocabulary: torch.full((B, S), vocabulary + 3), "dtype": "bfloat16"},
    "masked": {"masked": True},
    "masked-bfloat16": {"masked": True, "dtype": "bfloat16"},
    "one-token-chunks": {"chunk": 1},
    "chunk-of-all": {"chunk": S},
    "chunk-beyond": {"chunk": 1000},
    "ragged": {"chunk": 8},
    "transposed": {"layout": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)},
    "transposed-bfloat16": {"layout": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "dtype": "bfloat16"},
    "nan": {"bad": True},
    "no-tokens": {"tokens": 0},
    "large": {"vocabulary": 8192, "dtype": "bfloat16"},
    "large-float32": {"vocabulary": 8192},
}
OUT_OF_VOCABULARY = ("none-in-range", "some-in-range", "none-in-range-bfloat16")


def make(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits over the whole vocabulary, targets, and the weights of log-probabilities and entropies in the loss."""
    torch.manual_seed(11)
    tokens, vocabulary = case.get("tokens", S), case.get("vocabulary", 96)
    logits = (torch.randn(B, tokens, vocabulary) * case.get("scale", 3)).to(DTYPES[case.get("dtype", "float32")])
    target = case.get("target", all_in_range)(vocabulary)[:, :tokens]
    if case.get("masked"):
        logits[..., ::3] = -torch.inf
        target[target % 3 == 0] += 1
    if case.get("bad"):
        logits[1, 2, 0] = torch.nan  # in the first rank's part
    return logits, target, torch.randn(B, tokens), torch.randn(B, tokens)


class Part:
    """This rank's part of the vocabulary."""

    def __init__(self, rank: int, ranks: int, group: Any) -> None:
        self.rank, self.ranks, self.group = rank, ranks, group

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.chunk(self.ranks, dim=-1)[self.rank]

    def bounds(self, vocabulary: int) -> tuple[int, int]:
        size = vocabulary // self.ranks
        return self.rank * size, (self.rank + 1) * size


def worst(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest deviation; NaN where only one of them is NaN counts as infinite, and where both are, as none."""
    if not found.numel():
        return 0.0
    deviation = (found.double() - exact).abs()
    deviation[found.isnan() & exact.isnan()] = 0.0
    deviation[found.double() == exact] = 0.0  # both -inf
    return deviation.nan_to_num(nan=torch.inf).max().item()


def typical(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The root of the mean square of the deviations that are finite."""
    deviation = found.double() - exact
    return deviation[deviation.isfinite()].square().mean().sqrt().nan_to_num().item()


def run(function: Any, case: dict[str, Any], part: Part) -> dict[str, Any]:
    """``function(logits, target, start, end, case)`` gives log-probabilities, and entropies or None."""
    whole, target, weights, of_entropy = make(case)
    values = case.get("layout", lambda x: x)(part.of(whole).clone())
    bounds = part.bounds(whole.shape[-1])
    gradients: list[torch.Tensor] = []
    counters.reset()
    logits = made(values, lambda gradient: gradients.append(gradient.clone()))
    assert logits.stride() == values.stride()
    before = target.clone()
    with counted_all_reduces() as forward:
        log_probs, entropy = function(logits, target, *bounds, case)
    assert torch.equal(target, before)
    del logits
    loss = (log_probs * weights).sum()
    if entropy is not None:
        loss = loss + (entropy * of_entropy).sum()
    with counted_all_reduces() as backward:
        loss.backward()
    exact = reference(whole, target, weights, None if entropy is None else of_entropy)
    return {
        "log_probs": worst(log_probs.detach(), exact[0]),
        "entropy": None if entropy is None else worst(entropy.detach(), exact[1]),
        "gradient": worst(gradients[0], part.of(exact[2])),
        "typical gradient": typical(gradients[0], part.of(exact[2])),
        "typical log_probs": typical(log_probs.detach(), exact[0]),
        "collectives": [len(forward), len(backward)],
        "observed": counters.observed(),
        "dtypes": [str(log_probs.dtype), str(gradients[0].dtype)],
        "bits": log_probs.detach().view(torch.int32).flatten().tolist(),
        "has a gradient": bool(gradients[0].any()),
        "bad rows": log_probs.detach().isnan().nonzero().tolist(),
        "bad rows of the gradient": gradients[0].isnan().all(-1).nonzero().tolist(),
        "bad elements of the gradient": int(gradients[0].isnan().sum()),
        "row": values.shape[-1],
    }


def ours(group: Any, kind: str) -> Any:
    def function(logits: torch.Tensor, target: torch.Tensor, start: int, end: int, case: dict[str, Any]) -> Any:
        chunk = case.get("chunk")
        log_probs = token_logprobs(logits, target, start, end, group, chunk_size=chunk, with_entropy=kind == "together")
        return log_probs, None if kind == "alone" else token_entropy(logits, group, chunk_size=chunk)

    return function


def theirs(module: Any, group: Any, chunked: bool) -> Any:
    def function(logits: torch.Tensor, target: torch.Tensor, start: int, end: int, case: dict[str, Any]) -> Any:
        if not chunked:
            return module.DistributedLogprob.apply(logits, target, start, end, group, False), None
        chunk = case.get("chunk", 8)
        return module.ChunkedDistributedLogprob.apply(logits, target, start, end, chunk, group, False), None

    return function


def chunks_of_8(module: Any, group: Any) -> Any:
    return lambda *arguments: module.ChunkedDistributedLogprob.apply(*arguments, 8, group, False)


def joint_loss(part: Part, log_probs: Any, entropy: Any) -> str | None:
    """Log-probabilities, and entropies of a window of the same logits, as SkyRL has them in one loss; the error."""
    whole, target, weights, of_entropy = make({})
    leaf = part.of(whole).clone().requires_grad_()
    logits = leaf * 1
    loss = (log_probs(logits, target, *part.bounds(whole.shape[-1])) * weights).sum()
    loss = loss + (entropy(logits[:, 3:]) * of_entropy[:, 3:]).sum()
    del logits
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    of_entropy[:, :3] = 0
    deviation = worst(leaf.grad, part.of(reference(whole, target, weights, of_entropy)[2]))
    return None if deviation < 1e-4 else f"the gradient is off by {deviation}"  # float32, factors up to 4 * 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = torch.distributed.new_group(list(range(ranks)))
    alone = [torch.distributed.new_group([one]) for one in range(ranks)][rank]
    part, whole = Part(rank, ranks, group), Part(0, 1, alone)
    softmax.WORK_BYTES = 4 * 96 * 5  # several blocks, and a ragged last one

    report: dict[str, Any] = {"ours": {}, "theirs": {}, "one rank": {}, "theirs on one rank": {}, "joint loss": {}}
    for name, case in CASES.items():
        for kind in ("alone", "together", "apart"):
            report["ours"][f"{name} {kind}"] = run(ours(group, kind), case, part)
        report["one rank"][name] = run(ours(alone, "together"), case, whole)
    report["default group"] = run(ours(None, "together"), {}, part)
    for version, file in upstream_logprob.find().items():
        module = upstream_logprob.load(file, group)
        found = report["theirs"][version] = {}
        for chunked, kind in ((True, "chunked"), (False, "unchunked")):
            for name in OUT_OF_VOCABULARY:
                one = run(theirs(module, alone, chunked), CASES[name], whole)
                report["theirs on one rank"][f"{version} {name} {kind}"] = one
            for name, case in CASES.items():
                if case.get("tokens") == 0:
                    continue
                try:
                    found[f"{name} {kind}"] = run(theirs(module, group, chunked), case, part)
                except RuntimeError as error:  # on all ranks alike
                    found[f"{name} {kind}"] = {"failed": str(error)}
        report["joint loss"][version] = joint_loss(part, chunks_of_8(module, group), module.vocab_parallel_entropy)
    report["joint loss"]["ours"] = joint_loss(
        part, partial(token_logprobs, group=group, with_entropy=True), partial(token_entropy, group=group)
    )
    (options.out / f"rank{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    os._exit(0)
