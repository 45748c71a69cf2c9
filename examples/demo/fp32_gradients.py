"""The sum of 64 micro-batches' gradients on two ranks, of whichever framework makes megatron-core's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cases import Case, Group, Row, Runner

from tests.harness.forkserver import Levels


def group(case: Case, worker: str, levels: Callable[[], Levels]) -> Group:
    """A case of a worker that reports what tests/harness/summed_gradients.py finds.

    The levels are asked for when it runs: not every session has their releases.
    """

    def row(runner: Runner) -> Iterator[Row]:
        reports = runner.forked(worker, levels=levels())
        before, after = (max(report[state]["by default"]["off"] for report in reports) for state in ("before", "after"))
        yield Row(
            case,
            reports[0]["version"],
            f"sum off by {before:.1%}",
            f"{after:.0e}",
            "float64",
            before > 0.005 and after < 1e-7,
            (f"their sum is off by {before:.1%}", f"off by {after:.0e}", "their sum in float64"),
        )

    return Group((case,), row)
