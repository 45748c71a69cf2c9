"""Patches of Hugging Face accelerate."""

NO_PROOF = "a proof needs FSDP2 on devices that have a stream, which the tests replace with a fake"
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
