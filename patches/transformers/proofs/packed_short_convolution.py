"""Short convolutions on documents packed into a row."""

from __future__ import annotations

from rlhf_patches.proving.proof import Case, Proof

from .packed_linear_attention import of

CASE = Case(
    "transformers",
    "transformers-packed-short-convolution",
    "packed documents",
    "gradient of three documents packed into a row, compared with each by itself",
)
PROOF = Proof(
    (CASE,),
    of(CASE),
    arguments=("Lfm2, packed", "--patch", CASE.patch),
    worker="packed_linear_attention_ranks",
    seconds=15,
    gpu=True,
)
