"""Shared keys and values under real DeepSpeed ZeRO-3, on each of two ranks: ``--out FOLDER``."""

from __future__ import annotations

import importlib

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.patches.transformers.proofs import shared_kv_gradient_ranks as proof
from rlhf_patches.proving import states
from tests.patches.transformers.reentrant_zero3 import step


def main() -> None:
    for name in ("gemma3n", "gemma4"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    parser = states.parser()
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=["Gemma4"])
    options = parser.parse_args()
    on_cpu.start()
    states.report_cases(
        proof.NAME, lambda names: {name: step(proof, name) for name in names}, options.families, options.out
    )
