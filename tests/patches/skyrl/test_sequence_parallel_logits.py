"""SkyRL's padding around the model, on its real functions, and a real GPTModel under sequence parallelism.

sequence_parallel_logits_ranks.py runs the cases on two tensor-parallel ranks.
"""

from __future__ import annotations

import pytest

from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import skyrl
from tests.harness.logs import diagnosed
from tests.harness.look_alikes import checked_copy, replacing
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_equal_to_the_loop_bit_for_bit",
    "no side effects": "because it fills the tensors that SkyRL has made, and returns new ones",
    "backward compatible": (
        "test_equal_to_the_loop_bit_for_bit",
        "test_training_with_sequence_parallelism_is_as_before_bit_for_bit",
    ),
    "no new blocking": "test_split_logits_never_went_through",
    "bit for bit": "test_equal_to_the_loop_bit_for_bit",
}

PATCH = "skyrl-sequence-parallel-logits"
PARTS = ("padding", "operations", "errors")


@pytest.fixture(scope="module", params=exhaustive_but(("0.2", "0.3", "0.4"), "0.4"))
def reports(skyrl_ranks, request):
    """Each rank's."""
    release = request.param
    # SkyRL 0.4.0 lies there without loguru, which this module imports.
    more = {"levels": skyrl(release, "0.3")} if release == "0.4" else {}
    reports = skyrl_ranks(release, *PARTS, worker="sequence_parallel_logits_ranks", **more)
    assert {report["skyrl"] for report in reports} == {f"{release}.0"}
    return reports


@pytest.fixture(scope="module")
def trained(skyrl_ranks):
    """Each rank's, of real training with sequence parallelism."""
    reports = skyrl_ranks("0.2", "sequence_parallel", worker="sequence_parallel_logits_ranks")
    assert all(report["statuses"] == {"sequence_parallel": "applied"} for report in reports)
    return [report["sequence_parallel"] for report in reports]


# ------------------------------------------------------------------------------------- padding


def test_equal_to_the_loop_bit_for_bit(reports):
    """Tokens, masks, positions, logits and their gradients, in dtype and value, for every kind of mask."""
    for report in reports:
        assert set(report["statuses"].values()) == {"applied"}
        assert len(report["padding"]) == 10
        for name, found in report["padding"].items():
            assert all(equal for equal, _ in found.values()), (name, found)
            assert len(found) == (5 if name == "not the first stage" else 7)
        assert report["padding"]["full"]["ids"][1] == [3, 14], "rounded up to the ranks: longer than the rows were"
        assert report["padding"]["all rows empty"]["ids"][1] == [2, 0]


def test_the_number_of_operations_does_not_depend_on_the_batch(reports):
    for report in reports:
        before, after = report["operations"]["before"], report["operations"]["after"]
        assert after["1"] == after["64"]
        assert after["64"]["waiting"] == 2 < before["1"]["waiting"], "the longest length, and the check of the masks"
        for key in ("forward", "backward", "waiting"):
            assert before["64"][key] > 30 * before["1"][key]
            assert before["64"][key] > 30 * after["64"][key]
        assert report["reverted"] == before


def test_what_does_not_fit_together_is_named(reports):
    for report in reports:
        before, after = report["errors"]["before"], report["errors"]["after"]
        assert "The shape of the mask [14] at index 0 does not match the shape of the indexed tensor" in before["split"]
        assert diagnosed(report["errors"]["log"]) == [(PATCH, True)]
        assert diagnosed(before["split"]) == [], "any index by a mask raises it"
        assert after["split"].startswith("ValueError: the model's output is split on the sequence: it is [4, 7, 9]")
        assert "docs/skyrl-split-logits.md" in after["split"]
        assert "is [4, 26, 9], the mask of its input [4, 13]" in after["longer"], "longer is not split"
        assert "is [3, 13, 9], the mask of its input [4, 13]" in after["rows"]
        assert "[B, 14]" in after["length"]
        assert "the same number of real tokens in each row" in after["lengths"]


# ------------------------------------------------------------------------------------- sequence parallelism


def test_a_real_models_logits_are_whole(trained):
    """So there is nothing to gather; and sequence parallelism changes no gradient."""
    for found in trained:
        assert found["shapes"] == [[[2, 22, 32], [2, 22]]] * 4
        assert found["same as without"] < 1e-6


def test_training_with_sequence_parallelism_is_as_before_bit_for_bit(trained):
    for found in trained:
        assert found["gradients"] == 0
        assert found["log-probabilities"]
        before, after = found["metrics"]
        assert before == after
        assert len(before) == 2


def test_split_logits_never_went_through(trained):
    """A crash before, and one that says why after."""
    for found in trained:
        assert found["split before"].startswith("IndexError: The shape of the mask [22] at index 0 does not match")
        assert found["split after"].startswith("ValueError: the model's output is split on the sequence: it is [2, 11,")


def test_gathering_split_logits_would_be_wrong(trained):
    """As the pull request does it. A rank's own tokens are right; others' have another part of the vocabulary."""
    for found in trained:
        assert found["parts"] == [[2, 24, 32], [2, 12, 32]]
        own, others = found["gathered, own tokens and others'"]
        assert own < 1e-5
        assert others > 1


def test_the_way_out_that_our_page_describes(trained):
    """The input of the output layer is gathered: the gradients of a model whose output layer does that itself."""
    for found in trained:
        assert found["way out"] < 1e-6


# ------------------------------------------------------------------------------------- keeping away


@pytest.mark.exhaustive
def test_disabled_it_stays_away(skyrl_ranks):
    reports = skyrl_ranks("0.2", "operations", worker="sequence_parallel_logits_ranks", RLHF_PATCHES_DISABLE=PATCH)
    for report in reports:
        assert report["statuses"] == {"operations": "disabled"}
        assert report["operations"]["before"] == report["operations"]["after"]


LOOP = "new_position_ids[i, : seq_lens[i]] = position_ids[i, attention_mask[i]]"
RESTORED = "new_result[i, original_attention_mask[i]] = result[i, attention_mask[i]]"


@pytest.mark.parametrize(
    ("version", "edit", "status"),
    [
        ("0.2.0", (LOOP, LOOP.replace("position_ids[i, att", "position_ids[i, ~att")), "refused"),
        ("0.2.0", (RESTORED, RESTORED.replace("] = ", "] += ")), "refused"),
        (None, (), "applies"),
    ],
)
def test_look_alikes_and_a_copy_without_metadata(tmp_path, version, edit, status):
    row = checked_copy(tmp_path, folder("skyrl-0.2"), PATCH, version=version, edit=replacing(*edit))
    assert row["status"] == status, row["reason"]
