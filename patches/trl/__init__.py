"""Patches of Hugging Face TRL."""

NO_PROOF = "a proof needs vLLM, as a server or in the trainer's process; the tests run it, or replace it with a fake"
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
