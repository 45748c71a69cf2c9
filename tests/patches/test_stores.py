"""What was found in a release's text comes back from its file as it was: every patch, every release at hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf_patches.guards import shapes, sources
from rlhf_patches.guards.sources import Source
from tests.patches.test_contract import CASES, Case


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_from_a_file(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {module: Source(module, f"{module}.py", case.read(module)) for module in case.variant.modules}

    def found() -> object:
        recognised = shapes.recognise_all(case.variant, texts)
        shapes.check_compiles(recognised)
        return recognised, [(code, [*code.co_positions()]) for code in (item.original_code() for item in recognised)]

    alone = found()
    monkeypatch.delenv("RLHF_PATCHES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with sources.parsed_once(stored=True):
        assert found() == alone
    monkeypatch.setattr(sources, "_parse", _never)
    with sources.parsed_once(stored=True):
        assert found() == alone


def _never(source: Source) -> None:
    raise AssertionError(f"{source.module} was parsed again")
