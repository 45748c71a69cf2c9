"""slime-linear-attention-gradient: what goes back through the layer on ranks, against one rank in float64.

With a clone slime's own file of a tag, without one the stand-in for it; linear_attention_gradient_ranks.py has the
attention. Float32 sums of 40 tokens of some units: 1e-6 of the gradient's norm, and ten times that is allowed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import slime_clone
from tests.harness.forkserver import MEGATRON, Level
from tests.harness.slime_clone import with_clone

WORKER = "tests.patches.slime.linear_attention_gradient_ranks"
FILES = ("slime_plugins/models/hf_attention.py",)
STANDIN = Path(__file__).parents[2] / "harness" / "standins" / "slime_linear_attention"
# The stand-in has both defects. v0.2.4 calls itself 0.2.3.
VERSIONS = {
    "v0.2.0": "0.2.0",
    "v0.2.1": "0.2.1",
    "v0.2.3": "0.2.3",
    "v0.2.4": "0.2.3",
    "v0.3.0": "0.3.0",
    "v0.3.1": "0.3.1",
}
INFLATED, CUT = ("v0.2.0", "v0.2.1", "v0.2.3", None), ("v0.2.4", "v0.3.0", "v0.3.1", None)
ROUNDING = 1e-5
RULE_COVERAGE = {
    "minimal scope": "test_without_either_nothing_changes",
    "no side effects": "because it gathers the tensor that slime gathers",
    "backward compatible": "test_without_either_nothing_changes",
    "no new blocking": "because all ranks of a group gather, forward and backward, as they did forward",
    "own weights were right": "test_context_parallelism",
    "Without sequence and context": "test_without_either_nothing_changes",
    "results are bitwise identical": ("test_without_either_nothing_changes", "test_the_half_that_a_release_has_right"),
    "does not change a layer": "because nothing of slime's is looked at for it",
}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def start(run_ranks, tmp_path_factory):
    def run(tag, tensor, context, *sequence):
        folder = STANDIN
        if tag is not None:
            folder = slime_clone.write(tmp_path_factory.mktemp("slime"), tag, VERSIONS[tag], FILES)
        levels = (*MEGATRON, Level("tests.harness.loading:torch", str(folder)))
        found = run_ranks(WORKER, str(tensor), str(context), *sequence, levels=levels, ranks=tensor * context)
        assert all(report["status"] == "applied" for report in found)
        for report in found:
            assert report["before"] == report["reverted"]
            for state in ("before", "after"):
                assert max(report[state]["in"], report[state]["out"]) <= ROUNDING, "the layer's own weights"
        return found

    return run


def each(tags):
    return pytest.mark.parametrize(
        "tag",
        [tag if tag is None else pytest.param(tag, marks=[with_clone, exhaustive]) for tag in tags],
        ids=lambda tag: tag or "stand-in",
    )


@each(INFLATED)
def test_sequence_parallelism(start, tag):
    """Two ranks: twice the gradient."""
    for report in start(tag, 2, 1, "SP"):
        assert report["before"]["states"] == pytest.approx(1.0, abs=ROUNDING)
        assert report["after"]["states"] <= ROUNDING
        assert max(report[state]["own"] for state in ("before", "after")) <= ROUNDING, "heads of a rank"


@each(CUT)
def test_context_parallelism(start, tag):
    """What goes back to other ranks' tokens is lost."""
    found = start(tag, 1, 2)
    assert max(report["before"]["states"] for report in found) > 0.3, "seen: 0.45 and 0.26"
    for report in found:
        assert report["after"]["states"] <= ROUNDING
        assert max(report[state]["own"] for state in ("before", "after")) <= ROUNDING, "which adds up itself"


@exhaustive
@each(CUT)
def test_both(start, tag):
    """Not before v0.2.4: there torch's own gathering wants, off NCCL, a group of all ranks."""
    found = start(tag, 2, 2, "SP")
    assert max(report["before"]["states"] for report in found) > 0.3
    for report in found:
        assert report["after"]["states"] <= ROUNDING


@pytest.mark.parametrize("sizes", [(1, 1), pytest.param((2, 1), marks=exhaustive)], ids=["one rank", "TP"])
@each(("v0.2.3", "v0.3.1", None))
def test_without_either_nothing_changes(start, sizes, tag):
    for report in start(tag, *sizes):
        assert report["after"] == report["before"]
        assert report["after"]["states"] <= ROUNDING


@exhaustive
@with_clone
@pytest.mark.parametrize(("tag", "sizes"), [("v0.2.3", (1, 2)), ("v0.2.4", (2, 1, "SP")), ("v0.3.1", (2, 1, "SP"))])
def test_the_half_that_a_release_has_right(start, tag, sizes):
    for report in start(tag, *sizes):
        assert report["after"] == report["before"]
        assert report["after"]["states"] <= ROUNDING
