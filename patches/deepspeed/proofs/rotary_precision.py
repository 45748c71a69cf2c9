"""Log-probabilities of a long sequence in bf16."""

from __future__ import annotations

from functools import partial

from rlhf_patches.proving.proof import Case, Proof

from ... import _rotary_proof

CASE = Case(
    "deepspeed",
    "deepspeed-rotary-precision",
    "bf16, 1,024 tokens",
    "bf16, ZeRO-1, a sequence of 1,024 tokens: mean error of the second half's log-probabilities",
)
NAME = "bf16, ZeRO-1"

PROOF = Proof((CASE,), partial(_rotary_proof.rows, CASE, NAME), ranks=1, seconds=15, arguments=(NAME,))
