"""Patches of Hugging Face TRL."""

NO_PROOF = (
    "nobody has written one: most of these bugs need a vLLM server, kernels on a GPU, several ranks, or an older "
    "release; the tests run those"
)
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
