"""Needs torch, and nothing else. With ``--device cuda`` the tests of one process run on a GPU.

There backward runs in a thread of its own, and memory is another allocator's: what counts of holders say on the CPU is
no proof.
"""

from __future__ import annotations

import pytest

OF_THE_CPU = ("numpy", "memory", "ranks")
"""NumPy, shared memory, and what `token_reference.peak_memory` measures; and gloo's ranks."""


def pytest_addoption(parser):
    parser.addoption("--device", help="where tensors are made, if not on the CPU")


@pytest.fixture(autouse=True)
def _fresh(request):
    import torch

    from rlhf_patches.patches._vocab_parallel import counters

    device = request.config.getoption("--device", None)
    if device and any(word in request.node.nodeid.partition("::")[2] + request.path.stem for word in OF_THE_CPU):
        pytest.skip("of the CPU alone")
    torch.set_default_device(device)  # None is no mode at all, as users have it
    counters.reset()
    torch.manual_seed(0)
