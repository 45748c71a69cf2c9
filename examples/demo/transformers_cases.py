"""transformers' Trainer."""

from __future__ import annotations

from cases import proved

from tests.harness.warm import beside

GROUPS = (proved("transformers.accumulation_scale", lambda: beside(None, "trainer")),)
