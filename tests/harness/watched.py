"""A run while it is watched: what the log said, what the report has, and what the run itself returns."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import rlhf_patches
from rlhf_patches.proving import states
from rlhf_patches.watching import Figure


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    """The lines at level warning that begin with a name, complete when the block ends."""
    handler, lines = _Heard(), list[str]()
    logging.getLogger("rlhf_patches").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("rlhf_patches").removeHandler(handler)
        lines += [line for line in handler.lines if line.startswith(name)]


def observe(
    watch: str,
    figures: Iterable[Figure],
    run: Callable[[], dict[str, Any]],
    patches: tuple[str, ...] | None = None,
    limits: str = "",
) -> dict[str, Any]:
    """Put patches on, run, and take them off again.

    Args:
        watch: the name of the `Watch`.
        figures: its own, which forget earlier runs.
        run: what is watched; what it returns is part of the result.
        patches: what is on; the watch alone unless given; empty for nothing.
        limits: what RLHF_PATCHES_LIMITS is.

    Returns:
        what the run returned, and ``said``, ``observed``, ``applied``, and the watch's ``status`` and ``reason``.
    """
    for figure in figures:
        figure.start_anew()
    os.environ["RLHF_PATCHES_LIMITS"] = limits
    patches = (watch,) if patches is None else patches
    with _heard(watch) as said:
        rows = rlhf_patches.apply(only=patches) if patches else ()
        found = run()
        row = rlhf_patches.report()[watch]
    rlhf_patches.revert()
    return {
        **found,
        "said": said,
        "observed": dict(row.observations),
        "applied": [each.name for each in rows if each.status.value == "applied"],
        "status": row.status.value,
        "reason": row.reason,
    }


def report(
    watch: str, figures: Iterable[Figure], run: Callable[[dict[str, Any]], dict[str, Any]], cases: Mapping[str, Any]
) -> None:
    """A worker's ``main``: `observe` each case's run, and write all to this rank's file in ``--out``.

    Args:
        run: of a case's settings.
        cases: by name the settings: ``watched`` (False: nothing is on), ``limits``, and what `run` takes.
    """
    options = states.parser().parse_args()
    found = {}
    for name, case in cases.items():
        patches = None if case.get("watched", True) else ()
        found[name] = observe(watch, figures, functools.partial(run, case), patches, case.get("limits", ""))
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
