"""What `rlhf-patches diagnose` makes of a log."""

from __future__ import annotations

import io

from rlhf_patches.definitions import registry
from rlhf_patches.offline import diagnose, tracebacks


def diagnosed(log: str) -> list[tuple[str, bool]]:
    """The bugs, each with whether it is sure."""
    found, _ = diagnose.diagnose(tracebacks.read(io.BytesIO(log.encode())), registry.load()[0])
    return [(one.item.patch.name, one.sure) for one in found]
