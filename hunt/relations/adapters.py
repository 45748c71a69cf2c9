"""What is done with an adapter changes nothing but what it is for: merging, saving, switching off, loading another."""

from __future__ import annotations

from typing import Any

from hunt.relations import STEP, Pair

BASE: dict[str, Any] = {"adapter": "none"}
BITS: dict[str, Any] = {"dtype": "bfloat16"}
SWITCHES = ("flags", "active", "base", *STEP)

PAIRS = [
    Pair("fresh", BASE, {"adapter": "fresh", "done": []}, ("output",)),
    Pair("disabled", BASE, {"adapter": "random", "done": ["disable"]}, ("output",)),
    Pair("unloaded", BASE, {"adapter": "random", "done": ["unload"]}, ("output", "base")),
    Pair("merged", {"done": []}, {"done": ["merge"]}, ("output",)),
    Pair("merged-and-unloaded", {"done": []}, {"done": ["merge and unload"]}, ("output",)),
    Pair("two-merged", {"done": ["add active"]}, {"done": ["add active", "merge"]}, ("output",)),
    # Bit for bit.
    Pair("unmerged", {"done": [], **BITS}, {"done": ["merge", "unmerge"] * 10, **BITS}, ("base",), 0.0),
    Pair("saved-and-loaded", {"done": []}, {"done": ["save and load"]}, ("output", *STEP)),
    # The sum of one is that one.
    *(
        Pair(f"weighted-{how}", {"done": []}, {"done": [f"weighted {how}"]}, ("output",))
        for how in ("linear", "cat", "svd")
    ),
    Pair("reference", {"done": []}, {"done": ["reference"]}, (*SWITCHES, "modes")),
    Pair("reference-beside-frozen", {"done": ["freeze"]}, {"done": ["freeze", "reference"]}, (*SWITCHES, "modes")),
    Pair("frozen-one-loaded", {"done": []}, {"done": ["load frozen"]}, SWITCHES),
    # Dropout, which the other one's user does not want, is off for this one as well.
    Pair("frozen-one-loaded-modes", {"done": []}, {"done": ["load frozen"]}, ("modes",)),
    Pair("another-added", {"done": []}, {"done": ["add"]}, SWITCHES),
    Pair("another-and-back", {"done": []}, {"done": ["add", "to the other", "back"]}, SWITCHES),
    Pair("file", {"done": ["save"]}, {"done": ["add", "save"]}, ("file",), 0.0),
]
