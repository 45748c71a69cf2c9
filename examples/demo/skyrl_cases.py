"""SkyRL over split vocabularies: the workers of the tests, with the releases side by side."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from cases import Case, Group, Row, Runner

from tests.harness.forkserver import TORCH, Level, skyrl
from tests.harness.side_by_side import on_path

# What SkyRL compiles is one product and sum; compiling it would take a GPU, or a minute.
SETTINGS = {"TORCHDYNAMO_DISABLE": "1"}
FUNCTIONS = {
    "0.2": {
        "chunked": Case("skyrl", "skyrl-logprob-backward", "chunked log-probabilities"),
        "chunked-loss": Case(
            "skyrl", "skyrl-entropy-backward", "and the entropy in the loss", "the same, and the entropy in the loss"
        ),
    },
    "0.3": {
        "chunked": Case("skyrl", "skyrl-logprob-backward", "chunked log-probabilities"),
        "chunked-loss": Case(
            "skyrl", "skyrl-entropy-backward", "and the entropy in the loss", "the same, and the entropy in the loss"
        ),
    },
}
FP8 = {
    "tensor-packed-ragged-delayed": Case(
        "skyrl",
        "skyrl-fp8-alignment",
        "FP8, delayed scaling, packed",
        "FP8, recipe delayed, tensor and sequence parallel, packed",
    ),
    "context-packed-whole-mxfp8": Case(
        "skyrl", "skyrl-fp8-alignment", "FP8, mxfp8, context parallel", "FP8, recipe mxfp8, context parallel, packed"
    ),
}
MEMORY = Case("skyrl", "skyrl-bf16-logits", "a training step's peak memory")
OUTPUTS = Case(
    "skyrl",
    "skyrl-loss-outputs-once",
    "loss_fn_outputs, samples 0 to 5",
    "`loss_fn_outputs` of samples 0 to 5, 2 data-parallel x 2 tensor-parallel ranks",
)


def functions(runner: Runner, release: str) -> Iterator[Row]:
    """Repaired: bit for bit, no failure, little memory in backward."""
    worker = "tests.patches.skyrl.logprob_backward_ranks"
    if release == "0.2":
        reports = runner.launched(worker, "demo", **SETTINGS, **on_path(f"skyrl-{release}"))
    else:
        reports = runner.forked(worker, "demo", levels=skyrl(release), **SETTINGS)
    for name, case in FUNCTIONS[release].items():
        (before, after), *_ = found = [
            [report["demo"][state][name] for state in ("before", "after")] for report in reports
        ]
        repaired = all(
            after["same_log_probs"] and after["failed"] is None and after["extra_memory"][1] < 0.2 for _, after in found
        )
        off = f"{after['error_of_gradient']:.0e}"
        verdict = f"log-probabilities bit for bit, gradient {off} from float64"
        (without, long_without), (with_it, long_with) = seen(before), seen(after)
        words = (long_without, long_with, verdict)
        yield Row(case, f"{release}.0", without, with_it, f"float64 {off}", repaired, words)


def seen(report: dict[str, Any]) -> tuple[str, str]:
    """What backward did, in a few words and in more."""
    if report["failed"]:
        return f"{report['failed'].partition(':')[0]} in backward", report["failed"].partition(": [")[0]
    forward, backward = report["collectives"]
    memory = f"{report['extra_memory'][1]:.2f} x"
    long = f"{forward} collectives forward, {backward} backward; backward takes {memory} the logits' memory"
    return f"{forward} + {backward}, {memory}", long


def fp8(runner: Runner) -> Iterator[Row]:
    """Padding, where the layers check shapes as TransformerEngine does."""
    reports = runner.forked("tests.patches.skyrl.fp8_alignment_ranks", levels=skyrl("0.2"), **SETTINGS)
    cases = [report["cases"] for report in reports]
    for name, case in FP8.items():
        here = cases[0][name]
        difference = max(rank[name]["difference_of_log_probs"] for rank in cases)
        refused = here["refused_before"].get("training")
        before, after = (f"{here[state][0]} tokens" for state in ("given_before", "given_after"))
        verdict = f"within {difference:.0e}" if difference else "bit for bit"
        accepted = all(rank[name]["refused_before"] and not rank[name]["refused_after"] for rank in cases)
        yield Row(
            case,
            "0.2.0",
            f"{before}: {'refused' if refused else 'accepted'}",
            f"{after}: accepted" if accepted else "refused",
            verdict,
            accepted and difference <= 1e-5,
            (
                f"{before}: {(refused or 'nothing was refused').partition(',')[0]}",
                after,
                f"log-probabilities {verdict}",
            ),
        )


def memory(runner: Runner) -> Iterator[Row]:
    """Peak memory of a training step, as a multiple of the logits' in bf16."""
    reports = runner.forked("tests.patches.skyrl.bf16_logits_ranks", "memory", levels=skyrl("0.2"), **SETTINGS)
    before, after = (
        max(report["memory"][patches]["plain"]["step"] for report in reports) for patches in ("before", "with all")
    )
    yield Row(
        MEMORY,
        "0.2.0",
        f"{before:.1f} x the bf16 logits",
        f"{after:.1f} x",
        "below a half",
        after < before / 2,
        (
            f"{before:.1f} x that of the logits in bf16",
            f"{after:.1f} x",
            "numbers: tests/patches/skyrl/test_bf16_logits.py",
        ),
    )


def outputs(runner: Runner) -> Iterator[Row]:
    """What the controller makes of the ranks' outputs, on 2 data-parallel x 2 tensor-parallel ranks."""
    worker = "tests.patches.skyrl.loss_outputs_once_ranks"
    levels = (*TORCH, Level("tests.harness.loading:skyrl_dispatch", on_path("skyrl-0.2")["PYTHONPATH"]))
    (found,) = runner.forked(worker, "meshes", levels=levels, ranks=1, **SETTINGS)
    before, after = (found[state]["2-1-2-1-tsdp"]["samples"] for state in ("before", "after"))
    words = (str(before), str(after), "each sample once, in order")
    short = (" ".join(map(str, samples)) for samples in (before, after))
    yield Row(OUTPUTS, "0.2.0", *short, "each once", after == list(range(6)), words)


GROUPS = (
    *(Group(tuple(cases.values()), functools.partial(functions, release=name)) for name, cases in FUNCTIONS.items()),
    Group(tuple(FP8.values()), fp8),
    Group((MEMORY,), memory),
    Group((OUTPUTS,), outputs),
)
