"""How long a rank waits for the others, where a test has them wait for what does not come."""

from __future__ import annotations

import datetime

import torch.distributed as dist


def wait_at_most(seconds: float) -> None:
    """Collectives that the other rank does not enter fail after so long."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)
