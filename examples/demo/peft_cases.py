"""PEFT: the workers of the tests, on releases side by side."""

from __future__ import annotations

from cases import proved

from tests.harness.forkserver import peft

GROUPS = (
    proved("peft.adapter_freeze", lambda: peft("peft-0.20")),
    proved("peft.lora_merge_drift", lambda: peft(None)),
)
