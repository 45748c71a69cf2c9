"""megatron-core: cross entropies, a resume, experts, norms; the workers of the tests, on two ranks."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from cases import Case, Group, Row, Runner

from tests.harness.forkserver import MEGATRON, megatron, megatron_with_transformer_engine

WORKER = "tests.patches.megatron_core.cross_entropy_in_place_ranks"
PATCH = "megatron-core-cross-entropy-in-place"
LOGITS = Case("megatron-core", PATCH, "float32 logits after the loss")
FUSED = Case("megatron-core", PATCH, "its fused one, gradient", "gradient of float32 logits, fused cross entropy")
MEMORY = Case("megatron-core", PATCH, "bfloat16 logits, memory", "the loss of 1024 tokens, bfloat16 logits, memory")
DELTA_NET = Case(
    "megatron-core",
    "megatron-core-gdn-norm-gradient",
    "Gated DeltaNet's norm",
    "a Gated DeltaNet on two tensor-parallel ranks, the gradient of its norm",
)

NORMS = "tests.patches.megatron_core.transformer_engine_norms_ranks"
EXPERTS = Case(
    "megatron-core",
    "megatron-core-grouped-experts-norm",
    "norm with experts, TP 2, EP 2",
    "gradient norm of a mixture of experts, TP 2, EP 2, TransformerEngine 2.13.0 layers",
)
DUPLICATED = Case(
    "megatron-core",
    "megatron-core-duplicated-norm",
    "norm with a layer not divided",
    "gradient norm, TP 2, with a layer that is not split",
)

SINKS = Case(
    "megatron-core",
    "megatron-core-attention-sink-norm",
    "norm with attention sinks",
    "gradient norm, TP 2, with learnable attention sinks of both attention classes",
)

RESUMED = "tests.patches.megatron_core.resume_groups_ranks"
GROUPS_RESUMED = Case(
    "megatron-core",
    "megatron-core-resume-groups",
    "a resume with --decoupled-lr",
    "resume with `--decoupled-lr`: max_lr of both groups",
)

OFFLOADED = Case(
    "megatron-core",
    "megatron-core-offloaded-weights",
    "CPU offload, late weights",
    "CPU offload, weights loaded after the optimizer was built: weights in the first step",
)
RESHARDED = Case(
    "megatron-core",
    "megatron-core-reshardable-buckets",
    "fully_reshardable, 2 ranks to 1",
    "a `fully_reshardable` checkpoint of two ranks, several buckets, loaded on one: the optimizer's state",
)
COUNTED = Case(
    "megatron-core",
    "megatron-core-expert-bias-counts",
    "expert bias, bf16",
    "expert bias in bf16, two ranks, 24000 tokens: biases that move as the token counts require",
)

MOE = "tests.patches.megatron_core.moe_auxiliary_ranks"
BALANCE = Case(
    "megatron-core",
    "megatron-core-moe-auxiliary-per-token",
    "experts, per token, TP 2",
    "load balancing loss per token, tensor parallel 2: its gradient",
)
BALANCE_OF_MASK = Case(
    "megatron-core",
    "megatron-core-moe-auxiliary-padding",
    "experts, per token, a mask",
    "the same with a padding mask",
)
BALANCE_OF_ALL = Case(
    "megatron-core",
    "megatron-core-moe-auxiliary-global",
    "experts, all ranks, DP 2",
    "global load balancing loss, data parallel 2: its gradient",
)
BALANCE_OF_PARTS = Case(
    "megatron-core",
    "megatron-core-moe-auxiliary-context",
    "experts, context parallel 2",
    "load balancing loss, context parallel 2: its gradient",
)


def functions(runner: Runner) -> Iterator[Row]:
    """Whether the caller's logits are what they were, and the gradient against float64."""
    reports = runner.forked(WORKER, "--tp", "2", "functions", levels=MEGATRON)
    states = ("before", "after")
    release = importlib.metadata.version("megatron-core")

    def found(state: str, name: str) -> list[dict[str, Any]]:
        return [report[state]["functions"][name] for report in reports]

    kept = [all(one["unchanged"] for one in found(state, "plain as it is float32")) for state in states]
    name = "fused held float32"
    same = [one["bits"] for one in found("before", name)] == [one["bits"] for one in found("after", name)]
    said = ["as they were" if one else "overwritten" for one in kept]
    verdict = "bit for bit" if same else "NO"
    yield Row(LOGITS, release, *said, verdict, kept == [False, True] and same, (*said, f"losses {verdict}"))
    errors = [max(one["gradient"] for one in found(state, name)) for state in states]
    off = [f"off by {error:.0e}" for error in errors]
    yield Row(FUSED, release, *off, "float64", errors[1] < 1e-6 < errors[0], (*off, "in float64"))


def memory(runner: Runner) -> Iterator[Row]:
    """Beside the logits, forward and backward, in multiples of them."""
    reports = runner.forked(WORKER, "--tp", "2", "memory", levels=MEGATRON)
    taken = []
    for state in ("before", "after"):
        found = [report[state]["memory"]["plain bfloat16"] for report in reports]
        taken.append([max(one[when] for one in found) for when in ("forward", "backward")])
    said = [f"{forward:.2f} + {backward:.2f} x" for forward, backward in taken]
    words = tuple(
        f"{forward:.2f} x the logits' in forward, {backward:.2f} x in backward" for forward, backward in taken
    )
    release = importlib.metadata.version("megatron-core")
    yield Row(MEMORY, release, *said, "a tenth", max(taken[1]) <= 0.1, (*words, "at most a tenth"))


def delta_net(runner: Runner) -> Iterator[Row]:
    """The gradient of the norm that all heads share, on the worse of the ranks."""
    worker = "tests.patches.megatron_core.gdn_norm_gradient_ranks"
    reports = runner.forked(worker, "--tp", "2", levels=MEGATRON, TORCHDYNAMO_DISABLE="1")
    before, after = (
        max(report[state]["errors"]["layers.0.out_norm.weight"] for report in reports) for state in ("before", "after")
    )
    said = (f"off by {before:.0%}", f"off by {after:.0e}")
    release = importlib.metadata.version("megatron-core")
    yield Row(DELTA_NET, release, *said, "float64", after < 1e-5 < before, (*said, "the whole layer in float64"))


def norm(case: Case, layout: str) -> Callable[[Runner], Iterator[Row]]:
    """What the optimizer clips by, against the whole model's in float64."""

    def row(runner: Runner) -> Iterator[Row]:
        levels = megatron_with_transformer_engine("2.13")
        report, _ = runner.forked(NORMS, "--patch", case.patch, layout, levels=levels)
        found = [report[state][layout] for state in ("before", "after")]
        ratios = [one["norm"] / one["exact"] for one in found]
        said = [f"{ratio:.3f} x" for ratio in ratios]
        repaired = abs(ratios[1] - 1) < 1e-6 < abs(ratios[0] - 1)
        words = (*said, "the whole model's norm in float64")
        yield Row(case, report["version"], *said, "float64", repaired, words)

    return row


def resumed(runner: Runner) -> Iterator[Row]:
    """Learning rates of all else and of the embedding, and the weights of a run that was not interrupted."""
    reports = runner.forked(RESUMED, levels=MEGATRON)
    found = [reports[0][state]["distributed"] for state in ("before", "after")]
    rates = [[group[0] for group in one["loaded"][:2]] for one in found]
    said = ["{:g}, {:g}".format(*both) for both in rates]
    same = not any(report["after"]["distributed"]["wrong"] for report in reports)
    repaired = rates == [[1e-2, 1e-2], [1e-4, 1e-2]] and same
    words = (*said, f"weights of an uninterrupted run {'bit for bit' if same else 'NO'}")
    yield Row(GROUPS_RESUMED, reports[0]["version"], *said, "bit for bit" if same else "NO", repaired, words)


def offloaded(runner: Runner) -> Iterator[Row]:
    """How many tensors of the model are wrong after the first step."""
    reports = runner.forked("tests.patches.megatron_core.offloaded_weights_ranks", levels=MEGATRON)
    found = [reports[0][state]["bf16"] for state in ("before", "after")]
    said = [f"{len(one['wrong'])} of {len(one['weights'])} lost" for one in found]
    same = not any(report["after"]["bf16"]["wrong"] for report in reports)
    words = (*said, f"an optimizer built afterwards, {'bit for bit' if same else 'NO'}")
    yield Row(
        OFFLOADED,
        reports[0]["version"],
        *said,
        "bit for bit" if same else "NO",
        same and len(found[0]["wrong"]) == len(found[0]["weights"]),
        words,
    )


def resharded(runner: Runner) -> Iterator[Row]:
    """How many parameters have another state in the checkpoint, and after a load on one rank."""
    worker = "tests.patches.megatron_core.reshardable_buckets_ranks"
    with tempfile.TemporaryDirectory() as at:
        runner.forked(worker, "--folder", at, "save", levels=MEGATRON)
        (report,) = runner.forked(worker, "--folder", at, "load", levels=MEGATRON, ranks=1)
    found = [report[state][state]["buckets"] for state in ("before", "after")]
    wrong = [len(one["loaded"]["exp_avg"]) for one in found]
    said = [f"{count} of {len(one['sums'])} wrong" for count, one in zip(wrong, found, strict=True)]
    same = not any(found[1]["later"].values())
    words = (*said, f"an uninterrupted run after two more steps {'bit for bit' if same else 'NO'}")
    repaired = wrong[1] == 0 < wrong[0] and same
    yield Row(RESHARDED, report["version"], *said, "bit for bit" if same else "NO", repaired, words)


def counted(runner: Runner) -> Iterator[Row]:
    """How many expert biases move as integers say."""
    worker, case = "tests.patches.megatron_core.expert_bias_counts_ranks", "thousands, bf16"
    report = runner.forked(worker, case, levels=MEGATRON)[0]
    said = []
    for state in ("before", "after"):
        found = report[state][case]
        pairs = list(zip(chain(*found["directions"]), chain(*found["wanted"]), strict=True))
        said.append(f"{sum(one == other for one, other in pairs)} of {len(pairs)}")
    yield Row(COUNTED, report["version"], *said, "integers", said[0] != said[1] == "8 of 8", (*said, "integers"))


def balance(runner: Runner) -> Iterator[Row]:
    """How much of the gradient in float64 on one rank each router has."""
    (right,) = runner.forked(MOE, "aux/2", "aux/2/pad", "global/2", levels=MEGATRON, ranks=1)
    older, newer = megatron("megatron-0.15"), megatron("megatron-0.19")
    for case, sizes, kind, of, wrong, levels in (
        (BALANCE, ("--tp", "2"), "aux/token/2", "aux/2", 0.5, MEGATRON),
        (BALANCE_OF_MASK, ("--tp", "2"), "aux/token/2/pad", "aux/2/pad", 2.0, newer),
        (BALANCE_OF_ALL, (), "global/mean/1", "global/2", 0.5, MEGATRON),
        (BALANCE_OF_PARTS, ("--cp", "2"), "aux/mean/2", "aux/2", 0.5, older),
    ):
        reports = runner.forked(MOE, "--patch", case.patch, *sizes, kind, levels=levels)
        found = [reports[0][state][kind] for state in ("before", "after")]
        parts = [part(right[of], one) for one in found]
        said = [f"{one:.3f} x" for one in parts]
        repaired = abs(parts[0] - wrong) < 1e-5 and abs(parts[1] - 1) < 1e-5
        yield Row(case, reports[0]["version"], *said, "float64", repaired, (*said, "float64 on one rank"))


def part(right: dict[str, list[float]], found: dict[str, list[float]]) -> float:
    """Of the right gradient, in the found one."""
    pairs = [(one, other) for name in right for one, other in zip(right[name], found[name], strict=True)]
    return sum(one * other for one, other in pairs) / sum(one * one for one, _ in pairs)


GROUPS = (
    Group((LOGITS, FUSED), functions),
    Group((MEMORY,), memory),
    Group((EXPERTS,), norm(EXPERTS, "TP 2, EP 2")),
    Group((DUPLICATED,), norm(DUPLICATED, "TP 2")),
    Group((SINKS,), norm(SINKS, "TP 2")),
    Group((GROUPS_RESUMED,), resumed),
    Group((OFFLOADED,), offloaded),
    Group((RESHARDED,), resharded),
    Group((COUNTED,), counted),
    Group((BALANCE, BALANCE_OF_MASK, BALANCE_OF_ALL, BALANCE_OF_PARTS), balance),
    Group((DELTA_NET,), delta_net),
)
