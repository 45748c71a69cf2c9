"""A Ray of this process's own, on a machine with much to do."""

from __future__ import annotations

from typing import Any

import ray

_ATTEMPTS = 4


def start(**options: Any) -> None:
    """``ray.init``, again where its processes are not there in time: Ray gives them 30 seconds, a fixed number."""
    for attempt in range(_ATTEMPTS):
        try:
            ray.init(include_dashboard=False, log_to_driver=False, **options)
            return
        except Exception as error:
            if attempt == _ATTEMPTS - 1 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
