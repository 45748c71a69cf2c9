"""A rehearsal of what trains on megatron-core in a worker's own process, as its command starts it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_patches.rehearsal import start


@contextlib.contextmanager
def armed(path: Path, word: str = "1") -> Iterator[None]:
    """Rehearse what trains first within the context, as RLHF_PATCHES_REHEARSE says, into a file."""
    os.environ.update(RLHF_PATCHES_REHEARSE=word, RLHF_PATCHES_REHEARSED=str(path))
    start._began = False
    start.arm()
    try:
        yield
    finally:
        schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        for name, each in list(vars(schedules).items()):
            if hasattr(each, "_rehearses"):
                setattr(schedules, name, each.__wrapped__)
        del os.environ["RLHF_PATCHES_REHEARSE"]


def results(path: Path) -> Any:
    """The results that the command reads; None without any."""
    return json.loads(path.read_text()) if path.exists() else None
