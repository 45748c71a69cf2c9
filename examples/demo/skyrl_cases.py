"""The demo's rows for SkyRL: the workers of the tests (tests/support/skyrl_*.py), with the releases side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch import WORKER, launch
from row import Row
from side_by_side import on_path

RELEASES = ("0.2", "0.3")
CASES = {"chunked": "chunked log-probabilities", "chunked-loss": "the same, and the entropy in the loss"}


def rows(folder: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Run the cases and yield their rows. Repaired: bit for bit, no failure, little memory in backward."""
    for release in RELEASES:
        progress(f"SkyRL {release}.0: log-probabilities and entropies, without and with the patches")
        settings = {**on_path(f"skyrl-{release}"), "TORCHDYNAMO_DISABLE": "1"}
        out = folder / release
        reports = launch(("demo",), out, settings=settings, worker=WORKER.with_name("skyrl_ranks.py"))
        for name, case in CASES.items():
            (before, after), *_ = found = [
                (report["demo"]["before"][name], report["demo"]["after"][name]) for report in reports
            ]
            repaired = all(
                after["same_log_probs"] and after["failed"] is None and after["extra_memory"][1] < 0.2
                for _, after in found
            )
            verdict = f"log-probabilities bit for bit, gradient {after['error_of_gradient']:.0e} from float64"
            yield Row(f"skyrl {release}.0", case, seen(before), seen(after), verdict, repaired)


def seen(report: dict[str, Any]) -> str:
    """What backward did, in a few words."""
    if report["failed"]:
        return report["failed"].partition(": [")[0]
    forward, backward = report["collectives"]
    memory = report["extra_memory"][1]
    return f"{forward} collectives forward, {backward} backward; backward takes {memory:.2f} x the logits' memory"


def fp8_rows(folder: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """What FP8 training with SkyRL 0.2.0 needs besides: padding, memory, and outputs in their order."""
    settings = {**on_path("skyrl-0.2"), "TORCHDYNAMO_DISABLE": "1"}
    progress("SkyRL 0.2.0: padding for FP8, whose shapes are checked as TransformerEngine does")
    worker = WORKER.with_name("skyrl_fp8_ranks.py")
    cases = [report["cases"] for report in launch((), folder / "fp8", settings=settings, worker=worker)]
    for name, case in {
        "tensor-packed-ragged-delayed": "FP8, recipe delayed, tensor and sequence parallel, packed",
        "context-packed-whole-mxfp8": "FP8, recipe mxfp8, context parallel, packed",
    }.items():
        here = cases[0][name]
        difference = max(rank[name]["difference_of_log_probs"] for rank in cases)
        refused = here["refused_before"].get("training") or "nothing was refused"
        yield Row(
            "skyrl 0.2.0",
            case,
            f"{here['given_before'][0]} tokens: {refused.partition(',')[0]}",
            f"{here['given_after'][0]} tokens",
            "log-probabilities " + (f"within {difference:.0e}" if difference else "bit for bit"),
            all(rank[name]["refused_before"] and not rank[name]["refused_after"] for rank in cases)
            and difference <= 1e-5,
        )
    progress("SkyRL 0.2.0: memory of bf16 logits")
    memory = launch(("memory",), folder / "memory", settings=settings, worker=WORKER.with_name("skyrl_bf16_ranks.py"))
    before, after = (
        max(rank["memory"][patches]["plain"]["step"] for rank in memory) for patches in ("before", "with all")
    )
    yield Row(
        "skyrl 0.2.0",
        "a training step's peak memory",
        f"{before:.1f} x that of the logits in bf16",
        f"{after:.1f} x",
        "numbers: tests/frameworks/test_skyrl_bf16_logits.py",
        after < before / 2,
    )
    progress("SkyRL 0.2.0: outputs of the loss, 2 data-parallel x 2 tensor-parallel ranks")
    worker = WORKER.with_name("skyrl_loss_outputs.py")
    (found,) = launch(("meshes",), folder / "outputs", settings=settings, worker=worker, ranks=1)
    mesh = "2-1-2-1-tsdp"
    samples = {state: found[state][mesh]["samples"] for state in ("before", "after")}
    yield Row(
        "skyrl 0.2.0",
        "`loss_fn_outputs` of samples 0 to 5, 2 data-parallel x 2 tensor-parallel ranks",
        str(samples["before"]),
        str(samples["after"]),
        "each sample once, in order",
        samples["after"] == list(range(6)),
    )
