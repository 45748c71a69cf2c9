"""The programs that `rlhf-patches prove`, the tests and the demo run for these patches."""
