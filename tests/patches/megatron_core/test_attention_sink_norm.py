"""megatron-core-attention-sink-norm on megatron-core's optimizer, its attention and TransformerEngine's, two ranks.

The norm is held against float64 over the whole model. Tolerance: float32, some 100 squares.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.harness import look_alikes
from tests.harness.forkserver import megatron_with_transformer_engine

WORKER = "tests.patches.megatron_core.transformer_engine_norms_ranks"
PATCH = "megatron-core-attention-sink-norm"
FLOAT32 = 1e-6
RULE_COVERAGE = {
    "minimal scope": "test_the_sinks_of_all_ranks_count",  # data parallelism alone
    "no side effects": "because it marks a parameter while its layer is made, as Megatron's linear layers do",
    "backward compatible": "test_the_sinks_of_all_ranks_count",
    "known": "test_a_class_of_a_user_s_that_marks_its_sinks",
    "no new blocking": "because it sets attributes; no lock, no collective",
    "does not change a layer": ("test_the_sinks_of_all_ranks_count", "test_it_marks_divided_sinks_alone"),
    "does not change a subclass": "test_a_class_of_a_user_s_that_marks_its_sinks",
    "only those of Megatron-FSDP": "because no other format of a checkpoint reads the mark",
    "only the logged value changes": "because Megatron scales gradients only where the norm is above `clip_grad`",
    "then has only one of the two classes": "because the other class needs TransformerEngine",
}
LAYOUTS = [(False, "TP 2"), (True, "TP 2"), (False, "DP 2")]
MARKED = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}


@pytest.fixture(scope="module", params=[None, pytest.param("megatron-0.19", marks=pytest.mark.exhaustive)])
def reports(run_ranks, request):
    releases = [request.param] if request.param else []
    levels = megatron_with_transformer_engine("2.13", *releases)
    cases = [f"{layout}{', distributed' * distributed}" for distributed, layout in LAYOUTS]
    return run_ranks(WORKER, "--patch", PATCH, *cases, levels=levels, ranks=2)


@pytest.mark.parametrize(("distributed", "layout"), LAYOUTS)
def test_the_sinks_of_all_ranks_count(reports, distributed, layout):
    for report in reports:
        assert report["status"] == "applied"
        assert 0 < report["reached"]["held"] < report["reached"]["asked"]
        assert report["reached"]["asked"] == report["reached"]["calls"] - 2, "not told of the user's two classes"
        name = f"{layout}{', distributed' * distributed}"
        before, after = (report[state][name] for state in ("before", "after"))
        assert after["norm"] == pytest.approx(after["exact"], rel=FLOAT32)
        assert after.get("off", 0.0) < FLOAT32  # the weights after a step that was clipped
        if layout == "TP 2":
            assert before["norm"] < 0.98 * before["exact"]
            assert distributed or before["off"] > 1e-4
        else:
            assert before == after


def test_it_marks_divided_sinks_alone(reports):
    """Of all parameters and in all layouts; sinks of another softmax are none, and no parameter."""
    for report in reports:
        before, after = report["before"], report["after"]
        for layout in ("DP 2", "TP 2, off-by-one", "TP 2, vanilla"):
            assert after[layout]["marks"] == before[layout]["marks"]
        sinks = [name for name in before["TP 2"]["marks"] if name.startswith("sinks")]
        assert len(sinks) == 2  # megatron-core's own attention and TransformerEngine's
        assert after["TP 2"]["marks"] == {**before["TP 2"]["marks"], **dict.fromkeys(sinks, MARKED)}
        assert report["reverted"]["TP 2"] == before["TP 2"]


def test_a_class_of_a_user_s_that_marks_its_sinks(reports):
    """The obvious workaround, as Megatron marks its own: it requires that nothing has."""
    for report in reports:
        found = report["after"]["a user's"]["marks"]
        assert found == report["before"]["a user's"]["marks"]
        assert all(marks["tensor_model_parallel"] is True for marks in found.values())


MARKS = "set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)\n"
NATIVE = (
    "                self.softmax_offset = config.init_method(self.softmax_offset)\n",
    f"            tensor_parallel.{MARKS}",
)
TRANSFORMER_ENGINE = (
    "            layer_number=layer_number,\n            **extra_kwargs,\n        )\n",
    f"        {MARKS}",
)


@pytest.mark.parametrize(
    ("version", "where", "status"),
    [
        ("0.16.1", NATIVE, "refused"),
        ("0.16.1", TRANSFORMER_ENGINE, "refused"),
        (None, NATIVE, "unaffected"),
        ("0.15.0rc3", ("", ""), "unaffected"),
    ],
)
def test_it_keeps_away_from_sinks_that_are_marked(tmp_path, version, where, status):
    """As PR #7530 marks them: its function requires that nothing has."""

    def edit(text: str) -> str:
        return text.replace(where[0], "".join(where)) if where[0] else text

    (folder,) = importlib.util.find_spec("megatron").submodule_search_locations
    row = look_alikes.checked_copy(tmp_path, Path(folder).parent, PATCH, version=version, edit=edit)
    assert row["status"] == status, row
