"""ms-swift's sums of gradients, reference pass and KTO: workers of the tests, with an older release side by side."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import fp32_gradients
from cases import Case, Group, Row, Runner

from tests.harness.forkserver import swift

REFERENCE_PASS = (
    Case(
        "ms-swift", "swift-null-ref-context", "reference pass, LoRA and dropout", "reference pass with LoRA and dropout"
    ),
    Case(
        "ms-swift",
        "swift-null-ref-context",
        "an exception in that pass",
        "an exception in the reference pass; norms of the adapters' gradients in the next step",
    ),
)
# As tests/patches/swift/kto_sequence_parallel_ranks.py names them: in the second the slices are wrong in silence.
KTO = {
    "packed,last,sequence,kl,longer": Case(
        "ms-swift",
        "swift-kto-sequence-parallel",
        "KTO, last pipeline stage",
        "KTO, tensor and sequence parallel, last pipeline stage",
    ),
    "flash,middle,sequence,kl,shorter": Case(
        "ms-swift",
        "swift-kto-sequence-parallel",
        "KTO, middle stage, longer KL part",
        "KTO, the same on a middle stage, longer KL part",
    ),
}

GRPO = Case(
    "ms-swift",
    "swift-vocab-parallel-logprob-gradient",
    "GRPO, gradient of the logits",
    "GRPO's loss, tensor parallel: gradient of the logits",
)

FP32 = Case(
    "ms-swift",
    "swift-fp32-gradients",
    "a step of 64 micro-batches",
    "the gradients of 64 micro-batches on two ranks, in bfloat16",
)


def grpo(runner: Runner) -> Iterator[Row]:
    """MegatronGRPOTrainer.forward_step and its loss on a GPTModel, on two tensor-parallel ranks."""
    reports = runner.forked(
        "tests.patches.swift.logits_ranks", GRPO.patch, "step", levels=swift("swift-4.5", "swift_megatron")
    )
    before, after = ([report["step"][state][""] for report in reports] for state in ("released", "patched"))
    without, patched = (max(found["gradient"] for found in observed) for observed in (before, after))
    norms = [found[0]["norm at the logits"] for found in (before, after)]
    exact = after[0]["norm in float64"]
    yield Row(
        GRPO,
        reports[0]["row"]["version"],
        f"norm {norms[0]:.3f}, off by {without:.0%}",
        f"{norms[1]:.3f}, by {patched:.0e}",
        f"float64 {exact:.3f}",
        without > 0.4 and patched < 1e-5,
        (
            f"norm {norms[0]:.3f}, off by {without:.0%}; the loss is right",
            f"norm {norms[1]:.3f}, off by {patched:.0e}",
            f"float64 {exact:.3f}",
        ),
    )


def reference_pass(runner: Runner) -> Iterator[Row]:
    """null_ref_context on a GPTModel with dropout and LoRA."""
    worker = "tests.patches.swift.null_ref_context_ranks"
    (observed,) = runner.forked(worker, "megatron", levels=swift(None, "swift_megatron"), ranks=1)
    release = importlib.metadata.version("ms-swift")
    before, after = (observed[state]["two_passes"] for state in ("released", "patched"))
    kl_before, kl_after = (f"{found['KL of the policy against itself']:.1e}" for found in (before, after))
    off = f"{after['off float64 by']:.0e}"
    yield Row(
        REFERENCE_PASS[0],
        release,
        f"KL with itself {kl_before}",
        kl_after,
        f"float64 {off}",
        before["passes differ by"] > 0 and after["passes differ by"] == 0 and after["off float64 by"] < 1e-5,
        (
            f"two passes differ by {before['passes differ by']:.2g}; KL of the policy against itself {kl_before}",
            f"two passes differ by {after['passes differ by']:.2g}; KL of the policy against itself {kl_after}",
            f"{off} from float64",
        ),
    )
    before, after = (observed[state]["trained_after_an_exception"] for state in ("released", "patched"))

    def norms(found: dict[str, float]) -> str:
        return ", ".join(f"{adapter} {norm:.3g}" for adapter, norm in found.items())

    repaired = before["default"] == 0 < before["ref_adapter"] and after["ref_adapter"] == 0 < after["default"]
    yield Row(
        REFERENCE_PASS[1],
        release,
        f"policy {before['default']:.3g}, reference {before['ref_adapter']:.3g}",
        f"{after['default']:.3g}, {after['ref_adapter']:.3g}",
        "whose adapter" if repaired else "NO",
        repaired,
        (norms(before), norms(after), "the policy's is trained" if repaired else "NO"),
    )


def kto(runner: Runner) -> Iterator[Row]:
    """MegatronKTOTrainer.forward_step on a later pipeline stage."""
    reports = runner.forked(
        "tests.patches.swift.kto_sequence_parallel_ranks", *KTO, levels=swift("swift-3.12", "swift_kto")
    )

    def error(found: list[dict[str, Any]]) -> float:
        return max(error for report in found for error in report.get("errors", {"failed": 1.0}).values())

    for name, case in KTO.items():
        before, after = ([report[state][name] for report in reports] for state in ("before", "after"))
        first, failure = before[0]["decoder inputs"][0][1], before[0]["failure"]
        off = f"{error(after):.0e}"
        passes = f"{len(after[0]['decoder inputs'])} passes, each with its part"
        yield Row(
            case,
            reports[0]["versions"]["ms-swift"],
            f"{failure.partition(':')[0].strip('`')}, {first}" if failure else f"off by {error(before):.1g}",
            passes.partition(",")[0],
            f"float64 {off}",
            error(before) > 0.1 and error(after) < 1e-5,
            (
                f"a model gets {first}: {failure}" if failure else f"off by {error(before):.1g}",
                passes,
                f"{off} from float64",
            ),
        )


GROUPS = (
    fp32_gradients.group(
        FP32, "tests.patches.swift.fp32_gradients_ranks", lambda: swift("swift-4.3.1", "swift_megatron")
    ),
    Group((GRPO,), grpo),
    Group(REFERENCE_PASS, reference_pass),
    Group(tuple(KTO.values()), kto),
)
