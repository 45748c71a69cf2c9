"""The data of ``make mutants`` fits the tree: whoever moves code or a test sees here which entries went stale."""

from __future__ import annotations

from collections import Counter

from tests import mutants


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


def test_the_few_are_the_same_each_time_and_has_some_of_every_folder():
    found = [mutation for mutation in mutants.load() if mutation.survives is None]
    few = mutants.few(found)
    assert {one.name for one in mutants.few(reversed(found))} == {one.name for one in few}
    numbers = Counter(one.folder for one in found)
    assert Counter(one.folder for one in few) == {folder: max(1, number // 20) for folder, number in numbers.items()}
    assert not [one.name for one in few if one.hangs and any(not o.hangs for o in found if o.folder == one.folder)]


def test_another_mutation_moves_one_of_its_folder_at_most():
    found = [mutation for mutation in mutants.load() if mutation.survives is None]
    before = {one.name for one in mutants.few(found)}
    for left_out in found[::9]:
        without = {one.name for one in mutants.few(one for one in found if one != left_out)}
        assert len(before - without) <= 1
        assert len(without - before) <= 1
