"""What the record of pairs says is known to fail fails: the real packages are imported, each pair in a process."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.specifiers import SpecifierSet

from rlhf_patches.offline import pairs
from tests.harness.pairs import log_of

TRANSFORMERS = importlib.metadata.version("transformers")
CALLERS = {"peft": ("0.17.1", "0.21.2"), "trl": ("0.22.2",)}
"""The newest release of a range that fails beside this environment's own releases or accelerate 0.31."""
BESIDE = {"transformers": [TRANSFORMERS], "accelerate": ["0.31.0"]}


def here():
    for row in pairs.record():
        for caller in CALLERS.get(row.caller, ()):
            for other in BESIDE.get(row.other, ()):
                if SpecifierSet(row.versions).contains(caller) and SpecifierSet(row.beside).contains(other):
                    yield pytest.param(row, caller, other, id=f"{row.caller} {caller} beside {row.other} {other}")


CASES = list(here())


@pytest.mark.exhaustive
@pytest.mark.skipif(not TRANSFORMERS.startswith("5."), reason="`nox -s exhaustive` has it, in TRL's environment")
@pytest.mark.parametrize(("row", "caller", "other"), CASES)
def test_it_fails_for_want_of_that_name(row, caller, other):
    own = f"{row.caller}=={caller}"
    beside = [] if other == TRANSFORMERS else [f"{row.other}=={other}"]
    for entry in row.entries:
        log = log_of(f"import {entry}", own, *beside)
        assert log.splitlines()[-1].startswith(f"ImportError: cannot import name '{row.name}' from '{row.module}'")


@pytest.mark.exhaustive
@pytest.mark.skipif(not TRANSFORMERS.startswith("5."), reason="`nox -s exhaustive` has it, in TRL's environment")
def test_what_is_not_in_the_record_need_not_fail():
    assert not log_of("import peft", "peft==0.18.1")


def test_there_are_such_pairs_here():
    assert len(CASES) == (4 if TRANSFORMERS.startswith("5.") else 2)
