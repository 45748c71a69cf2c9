"""Patches of Hugging Face TRL."""

NO_PROOF = (
    "it takes more than TRL beside it: a vLLM server, kernels on a GPU, ZeRO-3, or an older release of "
    "transformers; the tests run those"
)
"""Why `rlhf-patches prove` cannot try those of the patches that have no proof."""
