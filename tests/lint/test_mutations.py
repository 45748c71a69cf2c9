"""The data of ``make mutants`` fits the tree: whoever moves code or a test sees here which entries went stale."""

from __future__ import annotations

import ast
import functools
from collections import Counter

from tests import mutants
from tests.harness import effort


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
    assert Counter(one.folder for one in few) == {folder: max(1, number // 40) for folder, number in numbers.items()}
    assert not [one.name for one in few if one.hangs and any(not o.hangs for o in found if o.folder == one.folder)]


def test_another_mutation_moves_one_of_its_folder_at_most():
    found = [mutation for mutation in mutants.load() if mutation.survives is None]
    before = {one.name for one in mutants.few(found)}
    for left_out in found[::9]:
        without = {one.name for one in mutants.few(one for one in found if one != left_out)}
        assert len(before - without) <= 1
        assert len(without - before) <= 1


def test_ci_runs_a_test_of_each_mutation():
    """`make test`, or the part of the exhaustive tests that is CI's: a wrong version must not pass both."""
    found = [mutation for mutation in mutants.load() if mutation.tests and mutation.survives is None]
    unseen = [one.name for one in found if not any(is_run(mutants.node_id(test)) for test in one.tests)]
    assert not unseen, f"only exhaustive tests of files that are in no part of CI's notice them: {', '.join(unseen)}"


def is_run(node_id: str) -> bool:
    file, *_, name = node_id.partition("[")[0].split("::")
    return name not in exhaustive(file) or effort.in_part(file.removeprefix("tests/"), effort.OF_CI)


@functools.cache
def exhaustive(file: str) -> set[str]:
    """The tests of a file that have the mark themselves, or whose module has it."""
    tree = ast.parse((mutants.ROOT / file).read_text())
    of_module = any("mark.exhaustive" in ast.unparse(node) for node in tree.body if _assigns(node, "pytestmark"))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    marks = ("exhaustive", "pytest.mark.exhaustive")
    return {
        node.name for node in functions if of_module or any(ast.unparse(each) in marks for each in node.decorator_list)
    }


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == [name]
