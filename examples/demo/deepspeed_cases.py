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


GROUPS = (Group((OFFLOAD,), offload), Group((TOPK,), topk))
