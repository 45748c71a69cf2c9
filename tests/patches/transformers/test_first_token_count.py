"""transformers-first-token-count: steps of the real Trainer with GPT-2 and others, against float64."""

from __future__ import annotations

from types import SimpleNamespace as Has

import pytest

from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import beside

WORKER = "tests.patches.transformers.first_token_count_ranks"
WRONG = ("GPT-2", "GPT-2, one by one", "LoRA", "compiled before", "BERT", "CTRL", "inherits")
RIGHT = ("not the first", "Qwen3", "own count", "own step")
LEFT = ("masked", "classifier", "T5", "own forward", "own loss", "own type", "trainer's own")
LEFT += ("class's own loss", "class's own property", "own loss, later", "compute_loss_func", "compute_loss_func, later")
LEFT += ("own compute_loss", "smoothing", "prompt tuning")
#: Rows of 5, 6, 7 and 8 labels that count.
COUNTED, PREDICTED = 26, 22
RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "test_the_model_is_only_read",
    "backward compatible": "test_all_others_stay",
    "known": "test_all_others_stay",
    "no new blocking": "because it reads the model's class: no lock, no collective",
    "bit for bit": "test_all_others_stay",
    "change nothing": "test_with_it_the_gradient_is_that_of_the_tokens_that_are_predicted",
    "as released": "test_all_others_stay",
}
#: float32 against float64.
TOLERANCE = 1e-5


CORE = ("GPT-2", "LoRA", "compiled before", "BERT", "not the first", "own count", "T5", "own forward", "smoothing")
CORE += ("own loss, later", "compute_loss_func, later", "own compute_loss", "prompt tuning")


def few(cases):
    return exhaustive_but(cases, *(case for case in cases if case in CORE))


@pytest.fixture(
    scope="module", params=[pytest.param(CORE, id="few"), pytest.param((), id="all", marks=pytest.mark.exhaustive)]
)
def report(request, run_ranks):
    """Of those cases; without any, of all."""
    (report,) = run_ranks(WORKER, *request.param, levels=beside(None, "trainer"), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("name", few(WRONG))
def test_without_it_the_first_token_is_counted(report, name):
    seen(report, name)
    assert report["before"][name]["times"] == pytest.approx(PREDICTED / COUNTED, rel=TOLERANCE)
    assert report["before"][name]["beside"] < TOLERANCE


def seen(report, name):
    if name not in report["before"]:
        pytest.skip("among all cases")


def test_after_revert_it_is_as_released(report):
    for name, found in report["reverted"].items():
        assert found == report["before"][name]


@pytest.mark.parametrize("name", few(WRONG))
def test_with_it_the_gradient_is_that_of_the_tokens_that_are_predicted(report, name):
    seen(report, name)
    assert report["after"][name]["times"] == pytest.approx(1, rel=TOLERANCE)
    assert report["after"][name]["beside"] < TOLERANCE


def test_the_model_is_only_read(report):
    for name in report["before"]:
        assert report["after"][name]["touched"] == report["before"][name]["touched"]


def test_all_others_stay(report):
    stay = [name for name in (*RIGHT, *LEFT) if name in report["before"]]
    assert len(stay) > 8
    for name in stay:
        assert report["after"][name] == report["before"][name]
    for name in {*RIGHT} & {*stay}:
        assert report["after"][name]["times"] == pytest.approx(1, rel=TOLERANCE)


def test_of_a_forward_of_somebody_else_nothing_is_told():
    """It may call GPT-2's, whose first token is counted and stays so: such a run is affected."""
    transformers = pytest.importorskip("transformers")
    default_loss = pytest.importorskip("rlhf_patches.patches.transformers._default_loss")

    class Own(transformers.GPT2LMHeadModel):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options)

    shape = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    own, its = (kind(transformers.GPT2Config(**shape)) for kind in (Own, transformers.GPT2LMHeadModel))
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=8, d_model=8, d_ff=8, num_layers=1))
    told = [default_loss.of_others(Has(model=model, _loss_shifts_labels=False)) for model in (own, its, t5)]
    assert told == [None, None, False]
    assert default_loss.of_others(Has(model=own, _loss_shifts_labels=True)) is False
