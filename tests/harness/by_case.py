"""Reports of which a worker runs a case when a test first asks for it: what no test asks for costs nothing.

seen = States(lambda case: run_ranks(WORKER, case, levels=levels, ranks=1)[0])
seen["before"]["T5"]  # of run_ranks(WORKER, "T5", ...)

@pytest.mark.parametrize("case", exhaustive_but(CASES, "T5"))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


class ByCase:
    """What ``run`` returns for a case, by case."""

    def __init__(self, run: Callable[[str], Any]) -> None:
        self._run = functools.cache(run)

    def __getitem__(self, case: str) -> Any:
        return self._run(case)


class States(ByCase):
    """By state, then by case, of reports such as `rlhf_patches.proving.states.report` writes."""

    def __getitem__(self, state: str) -> ByCase:
        return ByCase(lambda case: self._run(case)[state][case])


def exhaustive_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of which `make test` runs those that are kept; all must be among the cases."""
    made = list(cases)
    assert {*kept} <= {*made}, f"{[one for one in kept if one not in made]} are no cases"
    return [one if one in kept else pytest.param(one, marks=pytest.mark.exhaustive) for one in made]
