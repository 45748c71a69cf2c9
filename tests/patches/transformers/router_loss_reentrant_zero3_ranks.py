"""The router's loss under real DeepSpeed ZeRO-3, on each of two ranks: ``--out FOLDER``."""

from __future__ import annotations

import importlib

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.patches.transformers.proofs import router_loss_reentrant_ranks as proof
from rlhf_patches.proving import states
from tests.patches.transformers.reentrant_zero3 import step


def main() -> None:
    importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    options = states.parser().parse_args()
    on_cpu.start()
    states.report_cases(proof.NAME, lambda names: {name: step(proof, name) for name in names}, ["Mixtral"], options.out)
