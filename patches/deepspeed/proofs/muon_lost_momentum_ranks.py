"""Muon's momentum under ZeRO-1 and ZeRO-2: ``--out FOLDER [CASE ...]``, on one or two ranks, against float64."""

from __future__ import annotations

from rlhf_patches.patches.deepspeed.proofs import muon
from rlhf_patches.proving import states

NAME = "deepspeed-muon-lost-momentum"
CASES = {
    "stage 1": muon.Case(stage=1),
    "stage 2": muon.Case(stage=2, micro_batches=2),
    "padded": muon.Case(stage=2, zero={"round_robin_gradients": True}),
    "stage 3": muon.Case(stage=3),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    muon.start()
    states.report(NAME, lambda: {case: muon.outcome(CASES[case]) for case in options.cases}, options.out)
