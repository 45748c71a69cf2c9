"""Proofs of these patches, which `rlhf-patches prove`, the tests and the demo run."""
