"""The data of ``make mutants`` fits the tree: whoever moves code or a test sees here which entries went stale."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import mutants

pytest.importorskip("tomllib", reason="from Python 3.11 on")


def test_every_mutation_can_be_made_and_its_test_is_there():
    stale = []
    for mutation in mutants.load():
        try:
            compile(mutation.mutated((mutants.ROOT / mutation.file).read_text()), mutation.file, "exec")
            for test in mutation.tests:
                mutants.node_id(test)
        except (OSError, ValueError, SyntaxError) as error:
            stale.append(f"tests/mutations/{mutation.area}.toml, {mutation.name}: {error}")
    assert not stale, "\n".join(stale)


def test_no_mutation_comes_twice_and_each_says_why():
    found = mutants.load()
    assert [name for name, number in Counter(one.name for one in found).items() if number > 1] == []
    assert [what for what, number in Counter((one.file, one.old, one.new) for one in found).items() if number > 1] == []
    assert [one.name for one in found if not one.why or one.environment not in mutants.ENVIRONMENTS] == []
    assert [one.name for one in found if not one.tests and one.survives is None] == []
