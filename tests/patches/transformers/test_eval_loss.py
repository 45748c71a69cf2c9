"""transformers-eval-loss: evaluations of small models by the real Trainer, on two gloo ranks and on one.

The yardstick: in float64, from the logits, the mean over samples of their batch's mean.
"""

from __future__ import annotations

import math
from types import SimpleNamespace as Has

import pytest

from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import beside

WORKER = "tests.patches.transformers.eval_loss_ranks"
#: What is wrong in every release, in 5.23.0, and in 4.57.6.
WRONG = ("causal", "causal, even", "causal, 13", "Qwen3-MoE", "label smoothing", "own loss")
WRONG += ("counts others", "after an exception", "beside the other patch")
UNUSED = ("T5", "classifier")  # the count, which 4.57.6 does not pass to them
AS_RELEASED = ("not averaged", "by itself", "without count", "of another count", "counts itself", "asked by others")
AS_RELEASED += ("context parallel", "passes on", "weighs", "divides")
EMPTY = ("one has no labels", "the same, unfiltered")
OTHERS = ("prediction", "training")
NEWEST = (*WRONG, *UNUSED, *AS_RELEASED, *EMPTY, *OTHERS, "tensor parallel")
OLDER = (*WRONG, *AS_RELEASED, *EMPTY, *OTHERS)
CORE = ("causal", "causal, 13", "own loss", "T5", "by itself", "context parallel", "weighs", "divides", *EMPTY, *OTHERS)
"""One for each claim and mutation; the others come to the same count in other ways."""
ALONE = ("causal", "causal, 13", "T5", "one has no labels", "by itself")
RULE_COVERAGE = {
    "minimal scope": "test_on_one_rank_nothing_changes",
    "no side effects": "test_where_nothing_is_wrong_or_known_nothing_changes",
    "backward compatible": (
        "test_where_nothing_is_wrong_or_known_nothing_changes",
        "test_a_batch_without_labels_is_what_it_was_or_is_left_out",
        "test_between_training_steps_it_changes_what_is_evaluated_only",
    ),
    "no new blocking": "because the one collective is upstream's, with the same tensor; what is added is arithmetic",
    "known": "test_where_nothing_is_wrong_or_known_nothing_changes",
    "On one rank": "test_on_one_rank_nothing_changes",
    "in training": "test_between_training_steps_it_changes_what_is_evaluated_only",
    "nothing changes": "test_where_nothing_is_wrong_or_known_nothing_changes",
    "stay what they are": "test_predictions_and_metrics_stay",
    "batch without any label": (
        "test_a_batch_without_labels_is_what_it_was_or_is_left_out",
        "test_where_nothing_is_wrong_or_known_nothing_changes",
    ),
    "left as released": "test_where_nothing_is_wrong_or_known_nothing_changes",
    "a count of its own, nothing changes": "test_where_nothing_is_wrong_or_known_nothing_changes",
    "filled up only in part": "test_the_page_has_these_numbers",
}
#: float32 against float64.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((None, CORE), id="5.23"),
        pytest.param((None, NEWEST), id="5.23, all", marks=pytest.mark.exhaustive),
        pytest.param(
            ("transformers-4.57", (*WRONG, *AS_RELEASED, *EMPTY, *OTHERS)), id="4.57", marks=pytest.mark.exhaustive
        ),
    ],
)
def reports(request, run_ranks):
    release, cases = request.param
    reports = run_ranks(WORKER, *cases, levels=beside(release, "trainer"))
    for report in reports:
        assert report["version"].startswith(release.rpartition("-")[2] if release else "5.")
        assert report["status"] == "applied"
    return reports


def mean(losses):
    return sum(losses) / len(losses)


def in_both(reports, names):
    """Of each rank and case: as released, and with the patch."""
    for report in reports:
        for name in names:
            if name in report["before"]:
                yield report["before"][name], report["after"][name]


def test_without_it_the_loss_is_another(reports):
    for before, _ in in_both(reports, WRONG):
        assert abs(before["loss"] / mean(before["wanted"]) - 1) > 10 * TOLERANCE
    for before, _ in in_both(reports, UNUSED):
        assert before["loss"] == pytest.approx(2 * mean(before["wanted"]), rel=TOLERANCE)
    for report in reports:
        for name, found in report["reverted"].items():
            assert found == report["before"][name]


def test_with_it_the_loss_is_the_mean_over_samples(reports):
    for _, after in in_both(reports, (*WRONG, *UNUSED)):
        assert after["loss"] == pytest.approx(mean(after["wanted"]), rel=TOLERANCE)
        assert after["left"] == 0


def test_it_is_what_one_rank_has_but_where_the_last_batch_is_filled_up_in_part(reports):
    whole = set(WRONG) - {"causal, 13", "beside the other patch"}
    for _, after in in_both(reports, (*whole, *UNUSED)):
        assert after["loss"] == pytest.approx(mean(after["wanted of one rank"]), rel=TOLERANCE)
    for _, after in in_both(reports, ("causal, 13", "beside the other patch")):
        *same, last = after["wanted"]
        *same_of_one_rank, last_of_one_rank = after["wanted of one rank"]
        assert same == pytest.approx(same_of_one_rank)
        assert last != pytest.approx(last_of_one_rank, rel=TOLERANCE)


def test_the_page_has_these_numbers(reports):
    for before, after in in_both(reports, ("causal",)):
        assert (*before["wanted"], before["loss"]) == pytest.approx((3.634, 3.432, 3.436, 4.372), abs=5e-4)
        assert after["loss"] == pytest.approx(3.501, abs=5e-4)
    for _, after in in_both(reports, ("causal, 13",)):
        assert (after["loss"], mean(after["wanted of one rank"])) == pytest.approx((3.4756, 3.4727), abs=5e-5)


def test_tensor_parallel_ranks_have_the_loss_of_their_batch(reports):
    for before, after in in_both(reports, ("tensor parallel",)):
        assert before["loss"] == pytest.approx(mean(before["wanted"]), rel=TOLERANCE)
        assert after["loss"] == pytest.approx(mean(after["wanted"]), rel=TOLERANCE)


@pytest.mark.parametrize("case", exhaustive_but(AS_RELEASED, *(case for case in AS_RELEASED if case in CORE)))
def test_where_nothing_is_wrong_or_known_nothing_changes(reports, case):
    if case not in reports[0]["before"]:
        pytest.skip("among all cases")
    ((before, after), *_) = in_both(reports, (case,))
    assert after == before
    assert after.get("loss", 1) > 0
    assert after.get("touched", "") == ""


def test_a_trainer_that_scales_by_itself_gets_the_count_of_all_ranks(reports):
    counts = [report["after"]["by itself"]["counts"] for report in reports]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 3


def test_a_batch_without_labels_is_what_it_was_or_is_left_out(reports):
    """Its loss was 0 over the others' tokens; 0 / 0 is left out by 5.23.0, unless it is told to filter nothing."""
    for case in EMPTY:
        for report in reports:
            before, after = report["before"][case], report["after"][case]
            losses = [loss for loss in after["wanted"] if not math.isnan(loss)]
            assert len(losses) == len(after["wanted"]) - 1
            left_out = case == "one has no labels" and report["version"].startswith("5.")
            number = len(losses) if left_out else len(after["wanted"])
            assert after["loss"] == pytest.approx(sum(losses) / number, rel=TOLERANCE)
            assert math.isfinite(before["loss"])


def test_predictions_and_metrics_stay(reports):
    for before, after in in_both(reports, (*WRONG, *UNUSED)):
        assert after["metrics"] == before["metrics"]
        assert len(after["metrics"]) == 1
    for before, after in in_both(reports, ("prediction",)):
        assert after["predictions"] == before["predictions"]
        assert len({report["after"]["prediction"]["loss"] for report in reports}) == 1


def test_between_training_steps_it_changes_what_is_evaluated_only(reports):
    for before, after in in_both(reports, ("training",)):
        assert {**after, "evaluated": []} == {**before, "evaluated": []}
        assert len(after["losses"]) == len(after["gradients"]) == len(after["evaluated"]) == 4
        assert not set(after["evaluated"]) & set(before["evaluated"])


def test_on_one_rank_nothing_changes(run_ranks):
    (report,) = run_ranks(WORKER, *ALONE, levels=beside(None, "trainer"), ranks=1)
    assert report["status"] == "applied"
    assert report["after"] == report["before"]
    for name in ("causal", "causal, 13", "T5"):
        assert report["after"][name]["loss"] == pytest.approx(mean(report["after"][name]["wanted"]), rel=TOLERANCE)


def test_a_trainer_that_is_left_as_released_is_not_said_to_be_repaired(tmp_path):
    transformers = pytest.importorskip("transformers")
    counts = pytest.importorskip("rlhf_patches.patches.transformers._batch_counts")

    class Computing(transformers.Trainer):
        def compute_loss(self, *arguments, **options):
            return super().compute_loss(*arguments, **options)

    class Predicting(transformers.Trainer):
        def prediction_step(self, *arguments, **options):
            return super().prediction_step(*arguments, **options)

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    ranks = {"world_size": 2, "average_tokens_across_devices": True, "n_gpu": 0}
    for kind, told in ((transformers.Trainer, True), (Computing, None), (Predicting, None)):
        trainer = kind(model=model, args=transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
        assert counts.evaluates_over_ranks(trainer) is False
        trainer.args = Has(**ranks)
        assert counts.evaluates_over_ranks(trainer) is told
