"""Needs torch, and nothing else."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh():
    import torch

    from rlhf_patches.patches.vocab_parallel import counters

    counters.reset()
    torch.manual_seed(0)
