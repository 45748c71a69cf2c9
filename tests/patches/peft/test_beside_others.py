"""``peft-hybrid-cache`` and ``peft-clear-device-cache``: what they say is so, by the real pairs of releases."""

from __future__ import annotations

import pytest

from tests.harness import side_by_side
from tests.harness.logs import diagnosed
from tests.harness.pairs import log_of


def older() -> tuple[str, ...]:
    """transformers 4, with what it needs."""
    return (str(side_by_side.folder("transformers-4.57")),)


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["0.16.0", "0.17.1"])
def test_no_hybrid_cache_in_transformers_5(release):
    log = log_of("import peft", f"peft=={release}")
    assert "ImportError: cannot import name 'HybridCache' from 'transformers'" in log
    assert diagnosed(log) == [("peft-hybrid-cache", True)]


@pytest.mark.exhaustive
def test_either_pin_is_right_for_the_cache():
    assert not log_of("import peft", "peft==0.17.1", folders=older())
    assert not log_of("import peft", "peft==0.18.0")


@pytest.mark.exhaustive
def test_no_clear_device_cache_before_accelerate_0_32():
    log = log_of("import peft", "accelerate==0.31.0")
    assert "ImportError: cannot import name 'clear_device_cache' from 'accelerate.utils.memory'" in log
    assert diagnosed(log) == [("peft-clear-device-cache", True)]
    assert not log_of("import peft", "accelerate==0.32.0")
    assert not log_of("import peft", "peft==0.14.0", "accelerate==0.31.0", folders=older())
