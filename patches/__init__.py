"""The built-in patches: one folder per framework, one module per bug. Installed as ``rlhf_patches.patches``."""
