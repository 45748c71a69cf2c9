"""Micro-batches of a step of DeepSpeed's engines."""

from __future__ import annotations

from functools import partial

from rlhf_patches.proving.proof import Case, Proof

from .rows import of_stages

CASE = Case(
    "deepspeed",
    "deepspeed-pipeline-accumulation",
    "two stages, 4 micro-batches",
    "a pipeline of two stages, 4 micro-batches a step: how much of its gradient each stage trains on",
)

PROOF = Proof(
    (CASE,),
    partial(of_stages, CASE),
    ranks=2,
    seconds=15,
    arguments=(CASE.patch, "pipeline"),
    worker="accumulation_scale_ranks",
)
