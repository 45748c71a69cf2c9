"""Patches of Hugging Face TRL."""

NO_PROOF = (
    "a proof needs more than TRL: a vLLM server, kernels on a GPU, ZeRO-3, or an older release of "
    "transformers; the tests run those"
)
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
