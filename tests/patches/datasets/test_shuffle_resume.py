"""``datasets-shuffle-resume``: which examples a real shuffled data set gives over an interruption, and what is told."""

from __future__ import annotations

import collections
import itertools
from types import SimpleNamespace

import pytest

import rlhf_patches
from rlhf_patches.patches.datasets._conditions import resumed

RULE_COVERAGE = {
    "minimal scope": "because nothing is applied: an advice",
    "no side effects": "because nothing is applied: an advice",
    "backward compatible": "test_results_are_those_without_the_advice",
    "no new blocking": "because nothing is applied: an advice",
}
NAME = "datasets-shuffle-resume"
EXAMPLES, BUFFER, READ = 1000, 100, 300


@pytest.fixture
def told():
    """How often a run was told so far, with the advice on."""
    pytest.importorskip("datasets")
    rlhf_patches.apply(only=NAME)
    assert rlhf_patches.report()[NAME].status.value == "advice"
    yield lambda: rlhf_patches.report()[NAME].reached.held
    rlhf_patches.revert()


def streamed(shards=1, shuffled=True, mapped=False):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"a": list(range(EXAMPLES))})
    if not shuffled:
        return made.shuffle(seed=1).to_iterable_dataset(num_shards=shards)
    made = made.to_iterable_dataset(num_shards=shards)
    if mapped:
        made = made.map(lambda example: example)
    return made.shuffle(seed=42, buffer_size=BUFFER)


def read(dataset, number=None):
    """The examples, and the state after them."""
    found = []
    for example in dataset:
        found.append(example["a"])
        if len(found) == number:
            return found, dataset.state_dict()
    return found, None


def over_an_interruption(make, at=READ):
    """The examples before and after: how many come twice, and how many never."""
    before, state = read(make(), at)
    again = make()
    again.load_state_dict(state)
    counted = collections.Counter(before + read(again)[0])
    return sum(each > 1 for each in counted.values()), EXAMPLES - len(counted)


@pytest.mark.parametrize(("shards", "at"), [(1, READ), (4, READ), (1, 999)])
def test_resumed_examples_come_twice_and_others_never(shards, at):
    twice, never = over_an_interruption(lambda: streamed(shards), at)
    if at == READ:
        assert twice >= 4
        assert never >= 29
    else:
        assert twice or never


@pytest.mark.parametrize("shards", [1, 4])
def test_skipping_is_exact(shards):
    whole, _ = read(streamed(shards))
    assert sorted(whole) == list(range(EXAMPLES))
    assert [each["a"] for each in itertools.islice(streamed(shards), READ, None)] == whole[READ:]


def test_accelerates_skipping_is_exact():
    """As `Trainer` does by default."""
    accelerate = pytest.importorskip("accelerate")
    data = pytest.importorskip("torch").utils.data
    batches = [batch["a"].tolist() for batch in data.DataLoader(streamed(), batch_size=10)]
    left = accelerate.skip_first_batches(data.DataLoader(streamed(), batch_size=10), READ // 10)
    assert [batch["a"].tolist() for batch in left] == batches[READ // 10 :]


@pytest.mark.parametrize("shards", [1, 4])
def test_shuffled_before_it_is_streamed_the_state_is_exact(shards):
    assert over_an_interruption(lambda: streamed(shards, shuffled=False)) == (0, 0)


@pytest.mark.parametrize("mapped", [False, True], ids=["tables", "examples"])
def test_a_run_that_resumes_is_told(told, mapped):
    """Not one that iterates from the start, also once more."""
    _, state = read(streamed(mapped=mapped), READ)
    again = streamed(mapped=mapped)
    read(again)
    read(again)
    assert told() == 0
    again.load_state_dict(state)
    read(again)
    assert told() == 1


@pytest.mark.parametrize(("shards", "mapped"), [(1, False), (4, True)])
def test_a_state_of_an_epoch_s_end_is_not_told(told, shards, mapped):
    """Nothing comes twice, and nothing is left."""
    whole = streamed(shards, mapped=mapped)
    assert len(read(whole)[0]) == EXAMPLES
    again = streamed(shards, mapped=mapped)
    again.load_state_dict(whole.state_dict())
    assert read(again)[0] == []
    assert told() == 0


def test_results_are_those_without_the_advice(request):
    before = [read(streamed()), over_an_interruption(streamed)]
    request.getfixturevalue("told")
    assert [read(streamed()), over_an_interruption(streamed)] == before


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"_state_dict": None, "_original_state_dict": {}}, False),
        ({"_state_dict": {"at": 0}, "_original_state_dict": {"at": 0}}, False),
        ({"_state_dict": {"at": 1}, "_original_state_dict": {"at": 0}}, True),
        ({"_state_dict": None}, False),
        ({"_state_dict": {"at": 1}}, None),
        ({}, None),
    ],
)
def test_the_condition(fields, expected):
    assert resumed(SimpleNamespace(**fields)) is expected
