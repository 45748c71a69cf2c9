"""A stand-in for Megatron-LM's trainer, of which only megatron.core is on PyPI: written for these tests.

`megatron` itself is a namespace package: this folder adds `megatron.training` to it, and
`megatron.core` still comes from site-packages. No file may be put at `megatron/__init__.py`.
"""
