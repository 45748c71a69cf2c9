"""Patches of NVIDIA NeMo-RL."""

NO_PROOF = (
    "NeMo-RL is no package of its own, but a checkout in containers; the tests run its modules with stand-ins for"
    " the rest"
)
"""Why `rlhf-patches prove` cannot try those of the patches that have no proof."""
