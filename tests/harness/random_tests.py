"""Hypothesis: derandomized, so that a failure here is one everywhere; HYPOTHESIS_PROFILE=explore looks further."""

from __future__ import annotations

import itertools
import os
from typing import Any

from hypothesis import HealthCheck

EXPLORE = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
COMMON: dict[str, Any] = {
    "deadline": None,
    "derandomize": not EXPLORE,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
numbers = itertools.count(1)
