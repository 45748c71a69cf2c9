"""What tests of the rotary-precision patches expect of a case: log-probabilities and gradient (_rotary_model.py)."""

from __future__ import annotations

from typing import Any


def assert_rounded(found: dict[str, Any]) -> None:
    """Distant tokens are wrong; those that are near are as wrong as bfloat16 is: 0.01."""
    assert found["far"] > 4 * found["near"], found


def assert_exact(found: dict[str, Any]) -> None:
    """Distant tokens are as exact as near ones."""
    assert found["far"] < 1.5 * found["near"], found


def assert_repaired(found: dict[str, Any], before: dict[str, Any]) -> None:
    """The same, and the gradient is closer to the exact one."""
    assert_exact(found)
    assert found["gradient"] < 0.5 * before["gradient"], found
