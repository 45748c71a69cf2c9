"""Patches of Hugging Face accelerate."""

NO_PROOF = "a proof needs FSDP2 on devices that have a stream, for which the tests have a stand-in"
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
