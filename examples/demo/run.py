"""Before and after, on real frameworks: ``make demo``, or ``make demo NAMES=trl`` for a framework or a patch.

Every row comes from a worker of the tests, which runs a framework's own code without and with the patches, and against
a reference. docs/evidence.md has the same in more words (``--words``).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

# Before anything else of that name: wheels bring a `tests` along.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if importlib.util.find_spec("rlhf_patches.patches") is None:  # nothing is installed yet: as setup.cfg has it
    sys.modules["rlhf_patches.patches"] = importlib.import_module("patches")
import accelerate_cases
import deepspeed_cases
import megatron_core_cases
import peft_cases
import rehearse_cases
import reward_cases
import rollout_cases
import skyrl_cases
import slime_cases
import swift_cases
import torch_cases
import transformer_engine_cases
import transformers_cases
import trl_cases
import verl_cases
import vllm_cases
from cases import Row, Runner

from tests.harness.forkserver import serving

# Of each session of noxfile.py, which is an environment.
SESSIONS = {
    "demo-megatron": (
        *rollout_cases.GROUPS,
        *megatron_core_cases.GROUPS,
        *swift_cases.GROUPS,
        *slime_cases.GROUPS,
        *skyrl_cases.GROUPS,
        *transformer_engine_cases.GROUPS,
        *verl_cases.GROUPS,
        *reward_cases.GROUPS,
        *rehearse_cases.VERL_GROUPS,
    ),
    "demo-trl": (
        *transformers_cases.GROUPS,
        *trl_cases.GROUPS,
        *peft_cases.GROUPS,
        *accelerate_cases.GROUPS,
        *deepspeed_cases.GROUPS,
        *torch_cases.GROUPS,
        *rehearse_cases.GROUPS,
    ),
    "demo-vllm": vllm_cases.GROUPS,
}
HEADS = ("", "without rlhf_patches", "with it", "compared with")
WIDTHS = (33, 26, 20, 13)
NOTES = {
    "megatron-core": "Training: losses and all parameters of one uninterrupted run. Losses: two ranks; float64.",
    "ms-swift": "The reference pass: norms of the gradients of the policy's adapter and the reference's.",
    "slime": "A function of ours with slime's statements, which is not on PyPI, on real megatron-core.",
    "megatron-lm": "A function of ours with Megatron-LM's statements, on real megatron-core.",
    "skyrl": "Collectives in forward + backward; memory of backward, as a multiple of the logits'.",
    "deepspeed": "Gradient norms as DeepSpeed logs them, compared with float64 without DeepSpeed.",
    "transformer-engine": "Its kernels, interpreted; norms of the gradient of a loss per token.",
    "peft": "LoRA: norm of the gradient after a frozen adapter was loaded; mean change of weights, of their mean size.",
    "accelerate": "What is left of an epoch, compared with the same loop without a stop.",
    "math-verify": "Rewards, compared with those that the same function gives on the main thread.",
    "transformers": "Gradients of an optimizer step, compared with the mean of the micro-batches' losses in float64.",
    "rehearse": "A run's own relation between gradients, losses or adapters, without another implementation.",
    "torch": "A fork that builds is killed, and another one loads: for how long it waits.",
    "trl": "ZeRO-3, compared with the same without partitioning; gathers in forward + backward. Gradients of GRPO.",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="frameworks or patches; all, if none is named")
    parser.add_argument("--session", choices=SESSIONS, help="run the cases of this session")
    parser.add_argument("--words", action="store_true", help="print Markdown, as in docs/evidence.md")
    options = parser.parse_args()
    every = [case for groups in SESSIONS.values() for group in groups for case in group.cases]
    known = dict.fromkeys(name for case in every for name in (case.framework, case.patch))
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no case for {', '.join(unknown)}; expected names among\n  " + "\n  ".join(known))
    names = set(options.names or known)
    wanted = {
        session: [group for group in groups if any(names & {case.framework, case.patch} for case in group.cases)]
        for session, groups in SESSIONS.items()
    }
    if options.session is None:  # what `make demo` has to start
        print(*(session for session, groups in wanted.items() if groups))
        return 0

    started = time.monotonic()
    frameworks: dict[str, list[Row]] = {}
    for group in wanted[options.session]:
        frameworks.update({case.framework: [] for case in group.cases})
    with tempfile.TemporaryDirectory() as folder, serving() as forkserver:
        runner = Runner(forkserver, Path(folder))
        for framework, rows in frameworks.items():
            for group in wanted[options.session]:
                if group.cases[0].framework != framework:
                    continue
                for row in group.rows(runner):
                    if names & {row.case.framework, row.case.patch}:
                        rows.append(row)
                        state = "repaired" if row.repaired else "NOT repaired"
                        clock = f"{time.monotonic() - started:4.0f} s"
                        print(f"{clock}  {framework} {row.release}: {row.case.title}: {state}", flush=True)
            print(words(rows) if options.words else table(framework, rows), flush=True)
    found = [row.repaired for rows in frameworks.values() for row in rows]
    print(
        f"{len(found)} case{'s' * (len(found) != 1)}, {'all repaired' if all(found) else 'NOT all repaired'}",
        flush=True,
    )
    return 0 if found and all(found) else 1


def table(framework: str, rows: list[Row]) -> str:
    """At most 100 columns: per release and patch a line, then its cases."""

    def line(*cells: str) -> str:
        return "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()

    lines, above = ["", line(*HEADS)], ""
    for row in rows:
        if above != (above := f"{framework} {row.release}, {row.case.patch}"):
            lines.append(above)
        lines.append(line(row.case.title, row.without, row.after, row.verdict))
    note = NOTES.get(framework)
    return "\n".join([*lines, *([f"  {note}"] if note else []), ""])


def words(rows: list[Row]) -> str:
    """Rows of a Markdown table."""
    return "\n".join(
        f"| {row.case.framework} {row.release} | {row.case.words or row.case.title} | {' | '.join(row.words)} |"
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
