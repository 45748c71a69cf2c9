"""A C++ extension whose build was killed."""

from __future__ import annotations

from cases import proved

from tests.harness.forkserver import TORCH

GROUPS = (proved("torch.stale_build_lock", lambda: TORCH),)
