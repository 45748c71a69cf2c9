"""The demo's rows for ms-swift's reference pass and KTO: the workers of the tests, with older releases side by side."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch import WORKER, launch
from row import Row
from side_by_side import on_path

SUPPORT = WORKER.parent
# Of tests/support/kto_pipeline_ranks.py: in the second the slices are wrong, and nothing says so.
KTO_CASES = {
    "packed,last,sequence,kl,longer": "KTO, tensor and sequence parallel, last pipeline stage",
    "flash,middle,sequence,kl,shorter": "KTO, the same on a middle stage, longer KL part",
}


def rows(folder: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Run the cases and yield their rows."""
    folder.mkdir()
    framework = f"ms-swift {importlib.metadata.version('ms-swift')}"
    progress(f"{framework}: null_ref_context on a GPTModel with dropout and LoRA, without and with the patches")
    out = folder / "reference_pass.json"
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "reference_pass.py"), str(out), "megatron"]
    subprocess.run(command, check=True, capture_output=True)
    observed = json.loads(out.read_text())
    before, after = observed["released"], observed["patched"]
    yield reference_passes(framework, before["two_passes"], after["two_passes"])
    yield after_an_exception(framework, before["trained_after_an_exception"], after["trained_after_an_exception"])

    progress("ms-swift 3.12.2: MegatronKTOTrainer.forward_step on a later pipeline stage, without and with the patch")
    worker = SUPPORT / "kto_pipeline_ranks.py"
    reports = launch(tuple(KTO_CASES), folder / "kto", settings=on_path("swift-3.12"), worker=worker)
    for case, title in KTO_CASES.items():
        yield kto(title, [report["before"][case] for report in reports], [report["after"][case] for report in reports])


def reference_passes(framework: str, before: dict[str, float], after: dict[str, float]) -> Row:
    def seen(found: dict[str, float]) -> str:
        kl = found["KL of the policy against itself"]
        return f"two passes differ by {found['passes differ by']:.2g}; KL of the policy against itself {kl:.1e}"

    return Row(
        framework,
        "reference pass with LoRA and dropout",
        seen(before),
        seen(after),
        f"{after['off float64 by']:.0e} from float64",
        before["passes differ by"] > 0 and after["passes differ by"] == 0 and after["off float64 by"] < 1e-5,
    )


def after_an_exception(framework: str, before: dict[str, float], after: dict[str, float]) -> Row:
    def seen(found: dict[str, float]) -> str:
        return ", ".join(f"{adapter} {norm:.3g}" for adapter, norm in found.items())

    repaired = before["default"] == 0 < before["ref_adapter"] and after["ref_adapter"] == 0 < after["default"]
    verdict = "the policy's is trained" if repaired else "NO"
    case = "an exception in the reference pass; norms of the adapters' gradients in the next step"
    return Row(framework, case, seen(before), seen(after), verdict, repaired)


def kto(title: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Row:
    def error(found: list[dict[str, Any]]) -> float:
        return max(error for report in found for error in report.get("errors", {"failed": 1.0}).values())

    first = before[0]["decoder inputs"][0][1]
    failure = f"a model gets {first}: {before[0]['failure']}" if before[0]["failure"] else f"off by {error(before):.1g}"
    passes = f"{len(after[0]['decoder inputs'])} passes, each with its part"
    repaired = error(before) > 0.1 and error(after) < 1e-5
    return Row("ms-swift 3.12.2", title, failure, passes, f"{error(after):.0e} from float64", repaired)
