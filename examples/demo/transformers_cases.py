"""transformers' Trainer."""

from __future__ import annotations

from cases import proved

from tests.harness.forkserver import beside

GROUPS = tuple(
    proved(f"transformers.{name}", lambda: beside(None, "trainer"))
    for name in ("accumulation_scale", "packed_linear_attention", "shared_kv_gradient")
)
