"""One line of the demo's tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What happened without the patches and with them, and what that was held against."""

    framework: str
    case: str
    without: str
    after: str
    verdict: str
    repaired: bool
