"""transformers-router-loss-reentrant: tiny mixtures under reentrant checkpointing, against float64 without it."""

from __future__ import annotations

import functools
from unittest import mock

import pytest

from tests.harness.forkserver import beside

WORKER = "tests.patches.transformers.router_loss_reentrant_own_ranks"
ZERO3 = "tests.patches.transformers.router_loss_reentrant_zero3_ranks"
NOW, OLD = beside(None, "trainer"), beside("transformers-4.57", "trainer", "peft-0.18")
FAMILIES = (
    "Mixtral",
    "Qwen3Moe",
    "Qwen2Moe",
    "GptOss",
    "Olmoe",
    "FlexOlmo",
    "Phimoe",
    "GraniteMoe",
    "GraniteMoeShared",
)
FAMILIES += ("GraniteMoeHybrid", "Qwen3Next", "Qwen3_5Moe", "MiniMax", "MiniMaxM2", "Ernie4_5_Moe", "Jamba", "Laguna")
FAMILIES += ("Mellum",)
#: In 4.57 layers return the logits of these, or the release does not have them.
RETURNED_THEN = {"Qwen2Moe", "Olmoe", "Phimoe", "GraniteMoe", "GraniteMoeShared", "Jamba"}
NEW = {"GraniteMoeHybrid", "Qwen3_5Moe", "MiniMaxM2", "Laguna", "Mellum"}
WRONG = ("Mixtral", "LoRA", "Trainer", "vision", "dense first", "two losses", "accumulated", "two passes")
WRONG += ("with outputs", "thread", "copied", "bfloat16", "autocast", "torch's default")
RIGHT = ("Mixtral, not reentrant", "Mixtral, without checkpointing")
LEFT = ("evaluation", "no gradients", "generated", "not asked", "Qwen3", "own function", "own in place", "offload")
LEFT += ("pickled",)
RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "test_the_model_is_only_read",
    "backward compatible": ("test_all_others_stay", "test_it_raises_what_it_raised"),
    "known": "test_all_others_stay",
    "no new blocking": "because it computes on this rank's tensors: no lock, no collective",
    "bit for bit": "test_all_others_stay",
    "stays reentrant": "test_it_stays_reentrant",
    "Only mixtures": "test_all_others_stay",
    "as they were before": "test_with_it_the_gradient_is_that_without_checkpointing",
    "Hidden states": "test_what_else_a_call_returns_stays",
}
#: float32 against float64; 3e-6 without checkpointing.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reports(run_ranks):
    """Of the environment's release and of 4.57, when first asked for."""

    @functools.cache
    def report(release):
        cases = (*WRONG, *RIGHT, *LEFT, "touched", "modes", "outputs", "kept", "fails")
        (found,) = run_ranks(WORKER, *cases, levels=OLD if release == "4.57" else NOW, ranks=1)
        assert found["status"] == "applied"
        return found

    return report


RELEASES = pytest.mark.parametrize("release", ["now", pytest.param("4.57", marks=pytest.mark.exhaustive)])


@RELEASES
@pytest.mark.parametrize("case", WRONG)
def test_without_it_the_routers_loss_has_no_gradient(reports, release, case):
    assert reports(release)["before"][case]["gradient"] > 0.05


@RELEASES
@pytest.mark.parametrize("case", WRONG)
def test_with_it_the_gradient_is_that_without_checkpointing(reports, release, case):
    assert reports(release)["after"][case]["gradient"] < TOLERANCE
    assert reports(release)["after"][case]["parameters"] > 10


def test_in_4_57_checkpointing_as_trainer_enables_it_is_reentrant(run_ranks):
    (report,) = run_ranks(WORKER, "Trainer", "modes", levels=OLD, ranks=1)
    assert report["after"]["modes"] == {"runs": [False] * 2 + [True] * 2, "left": True}
    assert report["before"]["Trainer"]["gradient"] > 0.05
    assert report["after"]["Trainer"]["gradient"] < TOLERANCE


@RELEASES
def test_the_loss_was_right_and_the_gradient_is_that_of_the_other_checkpointing(reports, release):
    report = reports(release)
    assert report["after"]["Mixtral"]["loss"] == report["before"]["Mixtral"]["loss"]
    assert report["after"]["Mixtral"]["bits"] == report["before"]["Mixtral, not reentrant"]["bits"]


@RELEASES
@pytest.mark.parametrize("case", [*RIGHT, *LEFT])
def test_all_others_stay(reports, release, case):
    before, after = (reports(release)[state][case] for state in ("before", "after"))
    assert {**after, "kinds": None} == {**before, "kinds": None}
    if case in ("Qwen3", "own function", "own in place"):
        assert after["kinds"] == ["partial"]
    assert after.get("gradient", 0) < TOLERANCE


@RELEASES
def test_what_else_a_call_returns_stays(reports, release):
    before, after = (reports(release)[state]["outputs"] for state in ("before", "after"))
    assert (before.pop("graph"), after.pop("graph")) == ([False, False], [True, True])
    assert after == before


@RELEASES
def test_the_model_is_only_read(reports, release):
    for state in ("before", "after"):
        assert reports(release)[state]["touched"]["touched"] == ""


@RELEASES
def test_it_keeps_nothing_alive(reports, release):
    for state in ("before", "after"):
        assert reports(release)[state]["kept"] == {"kept": [0, 0]}


@RELEASES
def test_it_stays_reentrant(reports, release):
    """Each layer runs without a graph, then with one; no hook is left."""
    wanted = {"runs": [False] * 2 + [True] * 2, "left": True}
    assert reports(release)["after"]["modes"] == reports(release)["before"]["modes"] == wanted


@RELEASES
def test_it_raises_what_it_raised(reports, release):
    """In the backward pass. The next step is right, and no hook is left."""
    found = reports(release)["after"]["fails"]
    assert (found["raised"], found["left"]) == ("'own'", True)
    assert found["bits"] == reports(release)["after"]["Mixtral"]["bits"]


@RELEASES
def test_after_revert_it_is_as_released(reports, release):
    for case, found in reports(release)["reverted"].items():
        assert found == reports(release)["before"][case]


@RELEASES
def test_reports_say_whether_it_acted(reports, release):
    reached = reports(release)["reached"]
    assert 0 < reached["held"] < reached["asked"] <= reached["calls"]


def test_a_function_that_was_made_before_revert_acts_no_more(apply_patch):
    ranks = pytest.importorskip("rlhf_patches.patches.transformers.proofs.router_loss_reentrant_ranks")
    logits = pytest.importorskip("rlhf_patches.patches.transformers._router_logits")
    apply_patch("transformers-router-loss-reentrant")
    model = ranks.made("Mixtral")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=ranks.REENTRANT)
    with mock.patch.object(logits.rlhf_patches, "in_force", return_value=False):
        graphs = [each.requires_grad for each in model(input_ids=ranks.tokens()).router_logits]
    assert graphs == [False, False]
    assert all(each.requires_grad for each in model(input_ids=ranks.tokens()).router_logits)


def test_only_a_loss_that_has_the_routers_logits_is_said_to_be_wrong(apply_patch):
    """A loss of one's own has none, and the gradient is as released."""
    ranks = pytest.importorskip("rlhf_patches.patches.transformers.proofs.router_loss_reentrant_ranks")
    logits = pytest.importorskip("rlhf_patches.patches.transformers._router_logits")
    apply_patch("transformers-router-loss-reentrant")
    model = ranks.made("Mixtral")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=ranks.REENTRANT)
    with mock.patch.object(logits.rlhf_patches, "decided") as decided:
        model(input_ids=ranks.tokens()).logits.sum().backward()
        loss = ranks.loss_of(model)
        assert decided.mock_calls == []
        loss.backward()
        ranks.loss_of(model).backward()
    assert decided.mock_calls == [mock.call("transformers-router-loss-reentrant", True)]


def test_a_value_that_torch_takes_for_false_is_not_reentrant(apply_patch):
    ranks = pytest.importorskip("rlhf_patches.patches.transformers.proofs.router_loss_reentrant_ranks")
    logits = pytest.importorskip("rlhf_patches.patches.transformers._router_logits")
    apply_patch("transformers-router-loss-reentrant")
    model = ranks.made("Mixtral")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": 0})
    with mock.patch.object(logits.rlhf_patches, "decided") as decided:
        (loss := ranks.loss_of(model)).backward()
    assert decided.mock_calls == []
    (wanted := ranks.made("Mixtral")).gradient_checkpointing_enable({"use_reentrant": False})
    (other := ranks.loss_of(wanted)).backward()
    assert ranks.shared_kv_gradient_ranks.bits(model, loss) == ranks.shared_kv_gradient_ranks.bits(wanted, other)


def test_compiled_code_calls_the_releases_function(apply_patch):
    logits = pytest.importorskip("rlhf_patches.patches.transformers._router_logits")
    calls = []
    made = functools.partial(lambda *args: calls.append(args))
    found = logits._of(made)
    with mock.patch.object(logits.torch.compiler, "is_compiling", return_value=True):
        found("layer", "states")
    assert calls == [("layer", "states")]


@pytest.mark.exhaustive
@RELEASES
def test_every_family_is_right(run_ranks, release):
    levels, others = (OLD, RETURNED_THEN) if release == "4.57" else (NOW, set())
    cases = [each for each in FAMILIES if release == "now" or each not in NEW]
    (report,) = run_ranks(WORKER, *cases, levels=levels, ranks=1)
    for case in cases:
        before, after = (report[state][case]["gradient"] for state in ("before", "after"))
        assert after < TOLERANCE, case
        assert before < TOLERANCE if case in others else before > 0.02, case


@pytest.mark.exhaustive
@RELEASES
def test_compiled_it_is_right_with_breaks_and_what_cannot_be_one_graph_stays_so(run_ranks, release):
    levels = OLD if release == "4.57" else NOW
    (report,) = run_ranks(WORKER, "compiled", "compiled whole", levels=levels, ranks=1)
    assert report["before"]["compiled"]["gradient"] > 0.1
    assert report["after"]["compiled"]["gradient"] < TOLERANCE
    assert report["after"]["compiled whole"] == report["before"]["compiled whole"]


@pytest.mark.exhaustive
def test_under_zero_3_it_is_right(run_ranks):
    for report in run_ranks(ZERO3, levels=beside(None, "deepspeed"), ranks=2):
        assert report["before"]["Mixtral"]["gradient"] > 0.1
        assert report["after"]["Mixtral"]["gradient"] < TOLERANCE
        assert report["after"]["Mixtral"]["parameters"] > 10
