"""What only a GPU can tell: ``python -m pytest tests/gpu``, where torch sees one; `make test` has none."""

from __future__ import annotations

from pathlib import Path

import pytest


def _has_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    if not _has_gpu():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip("torch sees no GPU"))
