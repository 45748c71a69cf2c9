"""Merged DoRA adapters that peft-dora-second-merge leaves as released: ``--out DIR``."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from peft.tuners.lora import variants

import rlhf_patches
from rlhf_patches.patches.peft.proofs import dora
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "peft-dora-second-merge"


class Own(variants.DoraLinearVariant):
    """A user's variant."""


def changed(what: str) -> dict[str, Any]:
    model, layer = dora.layer_of("linear", True, True)
    if what.startswith("own"):
        layer.lora_variant[what[-1]] = Own()
    if what == "a magnitude of 0":
        layer.lora_magnitude_vector["a"].weight.data[3] = 0
    model.merge_adapter(adapter_names=["a"])
    if what == "deleted":
        del layer.lora_A["a"], layer.lora_variant["a"]
    model.merge_adapter(adapter_names=["b"])
    return {"digest": dora.digest(layer), "rows": dora.weight_of(layer).tolist()}


def tidy() -> dict[str, Any]:
    """What a merge changes of the user's model, and whether the weight before lives on."""
    model, layer = dora.layer_of("linear", True, True)
    model.merge_adapter(adapter_names=["a"])
    before = weakref.ref(layer.base_layer.weight.data.untyped_storage())
    touched = None
    try:
        with untouched(model, changes=("*.base_layer.weight", "*.merged_adapters*", "*._caches*")):
            model.merge_adapter(adapter_names=["b"])
    except AssertionError as error:
        touched = str(error)
    gc.collect()
    return {"touched": touched, "alive": before() is not None, "keys": sorted(layer._caches)}


def observe() -> dict[str, Any]:
    found = {what: changed(what) for what in ("own a", "own b", "deleted", "a magnitude of 0")}
    found["tidy"] = tidy()
    _, layer = dora.layer_of("linear", True, True)
    right = dora.merged_in_float64(layer, "linear", "ab")
    layer.lora_magnitude_vector["a"].weight.data[3] = 0
    right[3] = dora.merged_in_float64(layer, "linear", "ab")[3]
    found["right"] = {"rows": right.tolist()}
    return found


def both() -> dict[str, Any]:
    """With peft-dora-conv1d-unmerge as well: a Conv1D with two adapters, merged and unmerged."""
    rlhf_patches.apply(only=[NAME, "peft-dora-conv1d-unmerge", "peft-lora-merge-drift"])
    model, layer = dora.layer_of("Conv1D, not square", True, True)
    before = dora.weight_of(layer)
    model.merge_adapter()
    model.unmerge_adapter()
    found = {row.name: row.status.value for row in rlhf_patches.report() if row.name.startswith("peft-")}
    rlhf_patches.revert()
    return {"off": dora.off(dora.weight_of(layer), before), "status": found}


def main() -> None:
    seen: list[dict[str, Any]] = []

    def with_both() -> dict[str, Any]:
        found = observe()
        seen.append(found)
        if len(seen) == 3:
            found["both"] = both()
        return found

    states.report(NAME, with_both, states.parser().parse_args().out)
    assert torch.is_grad_enabled()
