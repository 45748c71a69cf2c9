"""transformers' Trainer."""

from __future__ import annotations

from cases import proved

from tests.harness.forkserver import beside

GROUPS = (proved("transformers.accumulation_scale", lambda: beside(None, "trainer")),)
