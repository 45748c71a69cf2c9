"""A DoRA adapter on one layer, merged and unmerged: ``--out DIR``, with a release of PEFT on sys.path.

``rank0.json`` has the errors of base weights before apply() of peft-dora-conv1d-unmerge, after it, and after revert().
"""

from __future__ import annotations

from typing import Any

import torch

from rlhf_patches.patches.peft.proofs import dora
from rlhf_patches.proving import states

NAME = "peft-dora-conv1d-unmerge"


def cycle(kind: str, *adapters: bool, safe: bool = False, **more: Any) -> dict[str, Any]:
    """The base weight after a merge and an unmerge, and the exception of the latter."""
    model, layer = dora.layer_of(kind, *(adapters or (True,)), **more)
    before, right = dora.weight_of(layer), dora.outputs(model, kind)
    model.merge_adapter(safe_merge=safe)
    found: dict[str, Any] = {"raised": None, "merged": dora.off(dora.outputs(model, kind), right)}
    try:
        model.unmerge_adapter()
    except RuntimeError as error:
        found["raised"] = str(error)
    found["off"] = dora.off(dora.weight_of(layer), before)
    found["digest"] = dora.digest(layer)
    return found


def disabled() -> dict[str, Any]:
    """The base model's outputs, from `disable_adapter()` while an adapter is merged."""
    model, _ = dora.layer_of("Conv1D", True)
    with model.disable_adapter():
        right = dora.outputs(model, "Conv1D")
    model.merge_adapter()
    with model.disable_adapter():
        return {"off": dora.off(dora.outputs(model, "Conv1D"), right)}


def observe() -> dict[str, Any]:
    found = {kind: cycle(kind) for kind in dora.LAYERS}
    found["Conv1D, safe merge"] = cycle("Conv1D", safe=True)
    found["Conv1D, bfloat16"] = cycle("Conv1D", dtype=torch.bfloat16)
    found["Conv1D, LoRA"] = cycle("Conv1D", False)
    found["disabled"] = disabled()
    return found


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
