"""Patches of THUDM slime."""

NO_PROOF = "slime is a checkout that needs Megatron and SGLang on GPUs; the tests replace them with fakes"
"""Why `rlhf-patches prove` cannot run the patches without a proof."""
