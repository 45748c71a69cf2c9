"""Patches of TransformerEngine."""

NO_PROOF = "TransformerEngine's core is CUDA alone, for which the tests have a stand-in"
"""Why `rlhf-patches prove` cannot try those of the patches that have no proof."""
