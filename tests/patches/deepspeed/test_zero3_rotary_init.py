"""``deepspeed-zero3-rotary-init`` on real models, built under ZeRO-3 (proofs/zero3_rotary_init_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.deepspeed.proofs import zero3_rotary_init_ranks
from tests.harness.forkserver import beside

RULE_COVERAGE = {
    "minimal scope": ("test_without_the_bug_it_is_the_same_bit_for_bit", "test_a_module_with_parameters_is_left_alone"),
    "no side effects": ("test_parameters_and_random_numbers_are_as_released", "test_the_buffers_stay_the_same_objects"),
    "backward compatible": (
        "test_what_is_not_transformers_own_is_as_released",
        "test_a_module_that_cannot_be_made_twice_is_left_alone",
    ),
    "known": "test_what_is_not_transformers_own_is_as_released",
    "no new blocking": "because it is arithmetic on one rank: no lock, no collective",
    "They are the same objects": "test_the_buffers_stay_the_same_objects",
    "buffers of other modules stay as released": (
        "test_parameters_and_random_numbers_are_as_released",
        "test_a_module_with_parameters_is_left_alone",
    ),
    "stay as released too": "test_what_is_not_transformers_own_is_as_released",
}
WORKER = zero3_rotary_init_ranks.__name__
IN_CONTEXT = ("YaRN", "LongRoPE", "vision")
PRETRAINED = tuple(case for case in zero3_rotary_init_ranks.CASES if "from_" in case)
OWN = ("own class", "own method", "own function", "own module")
FAST = (*IN_CONTEXT, "YaRN, from_pretrained", "vision, from_pretrained", "float32", "plain", *OWN)
ALL = tuple(zero3_rotary_init_ranks.CASES)
TRANSFORMERS_4 = ("transformers-4.57",)


@pytest.fixture(
    scope="module",
    params=[
        (None, (), FAST),
        (None, TRANSFORMERS_4, FAST),
        pytest.param((None, (), ALL), marks=pytest.mark.exhaustive),
        pytest.param((None, TRANSFORMERS_4, ALL), marks=pytest.mark.exhaustive),
        pytest.param(("0.18.9", (), FAST), marks=pytest.mark.exhaustive),
        pytest.param(("0.15.2", (), FAST), marks=pytest.mark.exhaustive),
    ],
    ids=lambda param: f"{param[0] or 'newest'}-{'4' if param[1] else '5'}-{len(param[2])}",
)
def report(request, run_ranks):
    """Each case without the patch, with it, and after it was reverted."""
    release, others, cases = request.param
    folder = release and f"deepspeed-{release}"
    (report,) = run_ranks(WORKER, *cases, levels=beside(folder, "deepspeed", *others), ranks=1)
    assert report["status"] == "applied"
    assert release in (None, report["version"])
    report["wrong"] = [
        case
        for case in cases
        if case in (*IN_CONTEXT, "YaRN, fp16") or (case == "default" and not others) or (case in PRETRAINED and others)
    ]
    return report


def test_without_it_frequencies_are_rounded(report):
    for case in report["wrong"]:
        found = report["before"][case]
        assert found["error"] > (0.05 if "fp16" not in case else 0.005), case
        assert not found["same"]


def test_with_it_they_are_those_without_zero_3_bit_for_bit(report):
    for case in report["wrong"]:
        found = report["after"][case]
        assert found["same"], case
        assert found["error"] < 1e-3
        assert set(found["types"].values()) == {"torch.float32"}


def test_the_buffers_stay_the_same_objects(report):
    """`original_inv_freq` may be the buffer itself, or one more."""
    for case in report["wrong"]:
        assert report["after"][case]["original"] is report["before"][case]["original"]
        assert report["after"][case]["alias"] == report["before"][case]["alias"]


def test_parameters_and_random_numbers_are_as_released(report):
    for case in [case for case in report["before"] if case != "a step"]:
        for name in ("parameters", "partitioned", "random"):
            assert report["after"][case][name] == report["before"][case][name], (case, name)
        assert report["after"][case]["partitioned"] is (case != "plain")


def test_without_the_bug_it_is_the_same_bit_for_bit(report):
    """In float32, outside of `zero.Init`, and where transformers keeps them exact."""
    exact = {"float32", "plain", *PRETRAINED, "default"} - {*report["wrong"]}
    for case in exact & report["before"].keys():
        assert report["before"][case]["same"], case
        assert report["after"][case] == report["before"][case]


def test_what_is_not_transformers_own_is_as_released(report):
    for case in ("own class", "own method", "own function"):
        assert report["after"][case] == report["before"][case]
        assert report["before"][case]["error"] > 1
    before, after = (report[state]["own module"] for state in ("before", "after"))
    assert after["bits"]["own.inv_freq"] == before["bits"]["own.inv_freq"]
    assert after["types"]["own.inv_freq"] == "torch.bfloat16"
    assert any("Own is not transformers' own" in message for message in after["messages"])


def test_distant_tokens_are_as_exact_as_bfloat16_is(report):
    """In an engine of a release that does not round buffers itself."""
    if "a step" in report["before"]:
        before, after = (report[state]["a step"] for state in ("before", "after"))
        assert after["far"] < 0.7 * before["far"]
        assert after["gradient"] < 0.7 * before["gradient"]


def test_reverted_it_is_deepspeed_s_own_again(report):
    for case, found in report["reverted"].items():
        assert {**found, "messages": []} == {**report["before"][case], "messages": []}


def test_a_run_is_told_whether_it_was_affected(report):
    reached = report["reached"]
    assert reached["calls"] == len(report["before"]) - 1  # each but "plain"
    # A module of one's own may be in a model that has the bug.
    own = not report["before"]["own module"]["same"]
    assert reached["held"] == len(report["wrong"]) + ("a step" in report["before"]) + own


# Without DeepSpeed's context.

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")


@pytest.fixture
def exact_tables(monkeypatch):
    """The repair, as if each module was transformers' own."""
    from deepspeed.runtime.zero import partition_parameters  # noqa: F401

    from rlhf_patches.patches.deepspeed import _exact_tables

    monkeypatch.setattr(_exact_tables, "_is_transformers", lambda _: True)
    monkeypatch.setattr(_exact_tables, "_computes_again", lambda: False)
    return _exact_tables


class Context:
    """As much of `zero.Init` as the repair reads."""

    dtype = torch.bfloat16


class Table(torch.nn.Module):
    """With a table that was rounded."""

    def __init__(self, make=None, parameters=0):
        super().__init__()
        make = make or (lambda: torch.full((3,), 0.1))
        self.register_buffer("table", make(), persistent=False)
        self.register_buffer("saved", make())
        if parameters:
            self.weight = torch.nn.Parameter(torch.ones(parameters))


def rounded(exact_tables, make=None, parameters=0):
    """A table after the repair."""
    module = Table(make, parameters)
    module.table.data = torch.full((3,), 0.1).bfloat16()
    module.saved.data = torch.full((3,), 0.1).bfloat16()
    assert exact_tables.exact(Context(), Table.__init__, module, (make, parameters), {}) is module
    return module


def test_a_saved_buffer_is_as_released(exact_tables):
    module = rounded(exact_tables)
    assert (module.table.dtype, module.saved.dtype) == (torch.float32, torch.bfloat16)


def test_a_module_with_parameters_is_left_alone(exact_tables):
    assert rounded(exact_tables, parameters=2).table.dtype == torch.bfloat16


def test_a_module_that_cannot_be_made_twice_is_left_alone(exact_tables):
    """It is random, or it raises."""
    state = torch.get_rng_state()
    assert rounded(exact_tables, lambda: torch.rand(3)).table.dtype == torch.bfloat16
    torch.set_rng_state(state)
    Table(lambda: torch.rand(3))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    rounded(exact_tables, lambda: torch.rand(3))
    assert torch.equal(torch.get_rng_state(), after)
    calls = iter((torch.ones(3), torch.ones(3)))
    assert rounded(exact_tables, lambda: next(calls)).table.dtype == torch.bfloat16
