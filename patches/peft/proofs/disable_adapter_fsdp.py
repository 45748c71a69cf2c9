"""disable_adapter on parameters that FSDP has flattened."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "peft",
    "peft-disable-adapter-fsdp",
    "a reference pass on FSDP",
    "a step with disable_adapter for the reference, on two ranks of FSDP",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradients of a step, compared with a step without FSDP in float64."""
    (report, _) = reports
    cases = {name: found for name, found in report["before"].items() if "raised" in found and name != "left late"}
    case = next((name for name in cases if name in report["after"] and "off by" in report["after"][name]), "first")
    before, after = (report[state][case] for state in ("before", "after"))
    failed = before.get("raised", "").strip().splitlines()
    off = after.get("off by", float("inf"))
    without = failed[-1][:26] if failed else "a step"
    # float32, a model of a few layers.
    right = off < 1e-5
    yield Row(CASE, report["version"], without, "a step", f"float64 {off:.0e}", bool(failed) and right)


PROOF = Proof((CASE,), rows, ranks=2)
