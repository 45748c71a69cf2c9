"""What a worker observes in three states of one patch: as released, patched, and reverted."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import api
from ..definitions.status import Status

_ON = (Status.APPLIED, Status.OBSERVED, Status.PENDING)


def parser() -> argparse.ArgumentParser:
    """With ``--out``, the folder for the ranks' reports."""
    made = argparse.ArgumentParser()
    made.add_argument("--out", type=Path, required=True)
    return made


def folder() -> str:
    """One for what a worker saves, which is removed when its process ends."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def as_released(only: str | None = None) -> None:
    """Make sure that nothing is applied, and nothing waits for an import.

    Args:
        only: a patch; None means all.

    Raises:
        RuntimeError: something is: what was seen, or will be, is not the release.
    """
    on = [row.name for row in api.report() if row.status in _ON and only in (None, row.name)]
    if on:
        raise RuntimeError(f"not as released: {', '.join(on[:3])} applied already, by a sitecustomize or a plugin")


def report(patch: str, observe: Callable[[], Any], out: Path, *, reverted: bool = True) -> None:
    """Write this rank's report: ``version``, ``status``, and what was observed ``before``, ``after`` and ``reverted``.

    And ``reached``: how often the patched functions were entered, and whether the bug's condition held there.

    Args:
        patch: the patch's name.
        observe: called once in each state; what it returns becomes JSON.
        out: the folder.
        reverted: whether to observe that state as well: not where it costs much and another worker does.
    """
    found: dict[str, Any] = {"before": observe()}
    as_released(patch)
    row = api.apply(only=patch)[patch]
    found.update(version=row.version, status=row.status.value)
    found["after"] = observe()
    reached = api.report()[patch].reached
    found["reached"] = reached and reached.to_dict()
    api.revert()
    if reverted:
        found["reverted"] = observe()
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged meanwhile, from warnings on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rlhf_patches").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("rlhf_patches").removeHandler(handler)
