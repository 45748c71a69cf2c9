"""Needs torch, and nothing else."""

from __future__ import annotations

import pytest
import torch

from rlhf_patches.patches.vocab_parallel import counters


@pytest.fixture(autouse=True)
def _fresh():
    counters.reset()
    torch.manual_seed(0)
