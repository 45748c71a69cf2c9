"""What `rlhf-patches prove` runs of these patches, and the tests and the demo with it."""
