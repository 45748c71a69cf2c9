"""Several adapters on one layer, merged: ``--out DIR``, with a release of PEFT on sys.path.

``rank0.json`` has the errors before apply() of peft-dora-second-merge, after it, and after revert().
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from rlhf_patches.patches.peft.proofs import dora
from rlhf_patches.proving import states

NAME = "peft-dora-second-merge"
CASES: dict[str, tuple[str, tuple[bool, ...], dict[str, Any]]] = {
    **{kind: (kind, (True, True), {}) for kind in dora.LAYERS},
    **{f"{kind}, safe merge": (kind, (True, True), {"safe": True}) for kind in dora.LAYERS},
    "LoRA, then DoRA": ("linear", (False, True), {}),
    "three": ("linear", (True, False, True), {}),
    "one by one": ("linear", (True, True), {"one by one": True}),
    "bfloat16": ("linear", (True, True), {"dtype": torch.bfloat16}),
    "float16": ("linear", (True, True), {"dtype": torch.float16}),
    "float64": ("linear", (True, True), {"dtype": torch.float64}),
}
RIGHT: dict[str, tuple[str, tuple[bool, ...], dict[str, Any]]] = {
    **{f"one, {kind}": (kind, (True,), {}) for kind in dora.LAYERS},
    "one, safe merge": ("linear", (True,), {"safe": True}),
    "DoRA, then LoRA": ("linear", (True, False), {}),
    "two LoRA": ("linear", (False, False), {}),
}


def merged(kind: str, adapters: tuple[bool, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The error of the merged weight, of its outputs, and of the base weight after an unmerge."""
    more = {"dtype": options["dtype"]} if "dtype" in options else {}
    model, layer = dora.layer_of(kind, *adapters, **more)
    order, base, as_trained = "abc"[: len(adapters)], dora.weight_of(layer), dora.outputs(model, kind)
    right = dora.merged_in_float64(layer, kind, order)
    unloaded = copy.deepcopy(model).merge_and_unload(safe_merge=bool(options.get("safe")))
    for names in [[name] for name in order] if "one by one" in options else [list(order)]:
        model.merge_adapter(adapter_names=names, safe_merge=bool(options.get("safe")))
    found: dict[str, Any] = {
        "off": dora.off(dora.weight_of(layer), right),
        "outputs off": dora.off(dora.outputs(model, kind), as_trained),
        "unloaded off": dora.off(dora.weight_of(unloaded["layer"]), right),
        "digest": dora.digest(layer),
    }
    try:
        model.unmerge_adapter()
        found["unmerged off"] = dora.off(dora.weight_of(layer), base)
    except RuntimeError as error:  # without peft-dora-conv1d-unmerge
        found["unmerged off"] = str(error)
    return found


def observe() -> dict[str, Any]:
    return {case: merged(*given) for case, given in {**CASES, **RIGHT}.items()}


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
