"""Patches of THUDM slime."""

NO_PROOF = "slime is a checkout beside Megatron and SGLang on GPUs, for which the tests have stand-ins"
"""Why `rlhf-patches prove` cannot try those of the patches that have no proof."""
