"""Patches of NVIDIA NeMo-RL."""

NO_PROOF = "NeMo-RL is not a package, but a checkout in containers; the tests run its modules with fakes for the rest"
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
