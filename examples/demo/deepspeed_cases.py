"""DeepSpeed's engine on two ranks: the workers of the tests, with an older release side by side."""

from __future__ import annotations

from collections.abc import Iterator

from cases import Case, Group, Row, Runner

from tests.harness.warm import beside

OFFLOAD = Case(
    "deepspeed",
    "deepspeed-offload-accumulation",
    "ZeRO-2, offload, 4 micro-batches",
    "ZeRO-2 with an offloaded optimizer, 4 micro-batches a step: gradient norm of three steps",
)

TOPK = Case(
    "deepspeed",
    "deepspeed-topk-drops",
    "8 experts, k 4, negative logits",
    "MoE layer, 8 experts, k 4, negative router logits: choices of 59 tokens that are taken, and the output",
)


PIPELINE = Case(
    "deepspeed",
    "deepspeed-pipeline-accumulation",
    "two stages, 4 micro-batches",
    "a pipeline of two stages, 4 micro-batches a step: how much of its gradient each stage trains on",
)

UNSCALED = Case(
    "deepspeed",
    "deepspeed-unscaled-accumulation",
    "two stages, 4 micro-batches",
    "a pipeline of two stages, 4 micro-batches a step: how much of its gradient each stage trains on",
)


def topk(runner: Runner) -> Iterator[Row]:
    """The MoE layer's forward pass."""
    levels = beside("deepspeed-0.18.9", "deepspeed")
    (report,) = runner.forked("tests.patches.deepspeed.topk_drops_ranks", levels=levels, ranks=1)
    before, after = (report[state]["negative"] for state in ("before", "after"))
    room, off = after["to keep"], f"{after['off']:.0e}"
    yield Row(
        TOPK,
        report["version"],
        f"{before['kept']} of {room} taken",
        f"{after['kept']}",
        f"float64 {off}",
        before["kept"] < after["kept"] == room and after["off"] < 1e-5,
        (
            f"{before['kept']} of {room} for which there is room; the output is off by {before['off']:.0%}",
            f"{after['kept']}",
            f"{off} from float64",
        ),
    )


def offload(runner: Runner) -> Iterator[Row]:
    """The norms that DeepSpeed logs."""
    worker = "tests.patches.deepspeed.offload_accumulation_ranks"
    reports = runner.forked(worker, "four", levels=beside("deepspeed-0.18.9", "deepspeed"))
    before, after = (reports[0][state]["four"] for state in ("before", "after"))
    without, with_it, right = (
        ", ".join(f"{norm:.3f}" for norm in norms) for norms in (before["norms"], after["norms"], after["right norms"])
    )
    off = max(report["after"]["four"]["norm error"] for report in reports)
    repaired = off < 1e-5 < 0.1 < before["norm error"]
    yield Row(
        OFFLOAD,
        reports[0]["version"],
        f"norm {without}",
        with_it,
        f"float64 {off:.0e}",
        repaired,
        (without, with_it, f"{right} in float64: {off:.0e}"),
    )


def accumulation(case: Case, release: str, runner: Runner) -> Iterator[Row]:
    """The first step of a pipeline."""
    worker = "tests.patches.deepspeed.accumulation_scale_ranks"
    reports = runner.forked(worker, case.patch, "pipeline", levels=beside(release, "deepspeed"))
    before, after = ([report[state]["pipeline"] for report in reports] for state in ("before", "after"))
    without, with_it = (", ".join(f"{each['times']:.2f}" for each in found) for found in (before, after))
    off = max(each["error"] for each in after)
    yield Row(
        case,
        reports[0]["version"],
        f"{without} of it",
        with_it,
        f"float64 {off:.0e}",
        off < 1e-5 < 0.5 < max(each["error"] for each in before),
        (without, with_it, f"{off:.0e} from float64"),
    )


def pipeline(runner: Runner) -> Iterator[Row]:
    """Divided once for each stage."""
    yield from accumulation(PIPELINE, "deepspeed-0.18.9", runner)


def unscaled(runner: Runner) -> Iterator[Row]:
    """Not divided."""
    yield from accumulation(UNSCALED, "deepspeed-0.18.2", runner)


GROUPS = (
    Group((OFFLOAD,), offload),
    Group((TOPK,), topk),
    Group((PIPELINE,), pipeline),
    Group((UNSCALED,), unscaled),
)
