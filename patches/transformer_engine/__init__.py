"""Patches of TransformerEngine."""

NO_PROOF = "TransformerEngine's core needs CUDA, which the tests replace with a fake"
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
