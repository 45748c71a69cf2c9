"""Observe three states of one patch in a worker: as released, patched, and reverted."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import api
from ..definitions.status import Status

_ON = (Status.APPLIED, Status.OBSERVED, Status.PENDING)


def parser() -> argparse.ArgumentParser:
    """A parser with ``--out``, the folder for the ranks' reports."""
    made = argparse.ArgumentParser()
    made.add_argument("--out", type=Path, required=True)
    return made


def folder() -> str:
    """A temporary folder for a worker's files, removed when the process ends."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def as_released(only: str | None = None) -> None:
    """Check that no patch is applied or pending.

    Args:
        only: a patch; None means all.

    Raises:
        RuntimeError: a patch is applied or pending, so the observed code is not the release.
    """
    on = [row.name for row in api.report() if row.status in _ON and only in (None, row.name)]
    if on:
        raise RuntimeError(f"not as released: {', '.join(on[:3])} applied already, by a sitecustomize or a plugin")


def counts(patch: str) -> tuple[int, int]:
    """In how many calls so far a patch's bug occurred, and in how many that is known."""
    reached = api.report()[patch].reached
    return (reached.held, reached.asked) if reached is not None else (0, 0)


def report(patch: str, observe: Callable[[], Any], out: Path, *, reverted: bool = True) -> None:
    """Write this rank's report: ``version``, ``status``, and the observations ``before``, ``after`` and ``reverted``.

    Also ``reached``: how often the patched functions were entered, and whether the bug's condition held.

    Args:
        patch: the patch's name.
        observe: called once in each state; its result is written as JSON.
        out: the folder.
        reverted: whether to observe that state, too; False if it is expensive and another worker observes it.
    """
    states: dict[str, Any] = {"before": observe()}
    as_released(patch)
    row = api.apply(only=patch)[patch]
    states.update(version=row.version, status=row.status.value)
    states["after"] = observe()
    reached = api.report()[patch].reached
    states["reached"] = reached and reached.to_dict()
    api.revert()
    if reverted:
        states["reverted"] = observe()
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(states, indent=1))


def report_cases(
    patch: str,
    observe: Callable[[list[str]], Any],
    cases: Iterable[str],
    out: Path,
    *,
    reverted: Iterable[str] | None = None,
) -> None:
    """Write the same report of cases: all of them as released and patched, some of them reverted.

    Args:
        patch: the patch's name.
        observe: called with the cases in each state.
        cases: the cases.
        out: the folder.
        reverted: the cases that are observed after revert(); by default the first one.
    """
    chosen = list(cases)
    of_states = iter((chosen, chosen, chosen[:1] if reverted is None else list(reverted)))
    report(patch, lambda: observe(next(of_states)), out)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The messages that are logged within the context, from warnings on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rlhf_patches").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("rlhf_patches").removeHandler(handler)
