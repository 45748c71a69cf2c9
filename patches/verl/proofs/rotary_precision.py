"""Log-probabilities of a long sequence, of a reference model in bfloat16."""

from __future__ import annotations

from functools import partial

from rlhf_patches.proving.proof import Case, Proof

from ... import _rotary_proof

CASE = Case(
    "verl",
    "verl-rotary-precision",
    "bf16, 1,024 tokens",
    "a reference model in bf16, 1,024 tokens: mean error of the second half's log-probabilities",
)
NAME = "reference"

PROOF = Proof((CASE,), partial(_rotary_proof.rows, CASE, NAME), ranks=1, seconds=20, arguments=(NAME,))
