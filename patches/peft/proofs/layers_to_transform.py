"""The modules of a mixture that PEFT adapts for ``layers_to_transform``."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

EXPERTS = Case(
    "peft",
    "peft-layers-to-transform",
    "Mixtral, experts of layer 1 of 3",
    "Mixtral of three layers with two experts each, layers_to_transform=[1]: which modules are adapted",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The modules, compared with those of the selected layer."""
    (report,) = reports
    before, after = (report[state]["one layer"] for state in ("before", "after"))
    wrong = [len({*found["adapted"]} ^ {*found["right"]}) for found in (before, after)]
    without, with_it = (f"{count} modules wrong" if count else "all right" for count in wrong)
    verdict = f"{len(after['right'])} by name" if not wrong[1] else "NO"
    repaired = wrong[0] > 0 == wrong[1] and bool(after["right"])
    yield Row(EXPERTS, report["version"], without, with_it, verdict, repaired, (without, with_it, verdict))


PROOF = Proof((EXPERTS,), rows)
