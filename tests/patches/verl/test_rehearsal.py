"""Rehearsals of verl's real FSDP engines, of known bugs and of runs that are right (rehearsal_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.rehearsal.rollouts import ENGINE, SAMPLES
from rlhf_patches.rehearsal.verl_engine import COUNT
from rlhf_patches.rehearsal.verl_formula import NAME as FORMULA
from tests.harness.forkserver import Level, verl_workers
from tests.patches.verl import rehearsal_ranks

SIZES, RATIO, OPTIMIZER = "micro-batch size", "old log-probabilities", "optimizer parameters"


# The cases that have a bug, by release.
NEWEST = {"gmpo": "verl-gmpo-micro-batches", "dr-grpo": "verl-dr-grpo-length-bias"}
BUGS = {"0.9": NEWEST, "0.8": {**NEWEST, "critic": "verl-critic-loss-scale"}}


@pytest.fixture(scope="module", params=["0.9", pytest.param("0.8", marks=pytest.mark.exhaustive)])
def release(request):
    return request.param


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.exhaustive), 2], ids=["one rank", "two ranks"]
)
def reports(run_ranks, release, request):
    levels = verl_workers(None if release == "0.9" else release)
    reports = run_ranks(rehearsal_ranks.__name__, levels=levels, ranks=request.param, TORCHDYNAMO_DISABLE="1")
    assert len(reports) == request.param
    assert reports[0]["applied"] == list(BUGS[release].values())
    return reports


def of(reports, case, state):
    return reports[0][state][case]["relations"]


def test_a_known_bug_deviates_without_its_patch_and_holds_with_it(reports, release):
    for case in BUGS[release]:
        verdict, _, text = of(reports, case, "without")[SIZES]
        assert verdict == "deviates", case
        assert "the gradient in micro-batches of 1 row" in text
        assert of(reports, case, "with")[SIZES][0] == "holds"
    assert of(reports, "gmpo", "without")[SIZES][1:] == ["0.500", "0.500 x the gradient in micro-batches of 1 row"]


def test_the_critic_of_the_newest_release_holds(reports, release):
    for state in ("without", "with") if "critic" not in BUGS[release] else ("with",):
        for case in ("critic", "critic, seq-mean-token-sum"):
            assert of(reports, case, state)[SIZES][0] == "holds", of(reports, case, state)


@pytest.mark.parametrize("case", ["vanilla", "vanilla, rows of one", "vanilla, dynamic"])
def test_a_loss_of_the_whole_mini_batch_holds(reports, case):
    for state in ("without", "with"):
        found = of(reports, case, state)
        assert found[SIZES][0] == found[FORMULA][0] == "holds", found
        assert found["trainable parameters"][0] == found[OPTIMIZER][0] == "holds"


def test_ratios_are_one_before_the_first_update_only(reports):
    found = of(reports, "vanilla, before the first update", "with")
    assert found[RATIO][0] == found[FORMULA][0] == "holds"
    verdict, measured, _ = of(reports, "vanilla", "with")[RATIO]
    assert verdict == "note"
    assert 0.1 < float(measured) < 1.5  # the old ones have noise of 0.2


def test_the_engines_log_probabilities(reports):
    verdict, measured, _ = of(reports, "rollouts", "with")[ENGINE]
    assert verdict == "holds"
    assert 0.005 < float(measured) < 0.02
    verdict, _, text = of(reports, "rollouts, temperature", "with")[ENGINE]
    assert verdict == "deviates"
    assert "the engine's are of temperature 1" in text
    assert ENGINE not in of(reports, "vanilla", "with")


def test_dropout_is_not_checked(reports):
    verdict, _, text = of(reports, "dropout", "with")[SIZES]
    assert verdict == "not checked"
    assert "is random" in text


def test_a_parameter_that_the_optimizer_lacks_deviates(reports):
    assert of(reports, "replaced head", "with")[OPTIMIZER][0] == "deviates"


def test_the_engine_and_the_mini_batch_are_as_they_were(reports):
    for report in reports:
        assert all(found["as it was"] for state in ("without", "with") for found in report[state].values())


def test_all_ranks_have_the_same_relations(reports):
    assert all(report[state] == reports[0][state] for report in reports for state in ("without", "with"))


def test_the_size_and_the_loss_are_named(reports):
    found = reports[0]["with"]["gmpo"]
    ranks = f" on each of {len(reports)} ranks" if len(reports) > 1 else ""
    rows = 8 // len(reports)
    assert found["size"] == f"mini-batch of {rows} rows in {rows // 2} micro-batches{ranks}"
    assert found["name"] == "FSDPEngineWithLMHead, ppo_loss"


def test_a_critic_trains_and_the_actor_ends_the_run(reports):
    """A critic is updated before the actor: both are checked, and the actor's optimizer never steps."""
    for rank, report in enumerate(reports):
        assert report["command"]["stepped"] == ["critic", "critic", "status 0"]
        results = report["command"]["results"]
        if rank:
            assert results is None
            continue
        assert results["status"] == 0  # the patches are on
        sizes = {row["of"]: row["verdict"] for row in results["relations"] if row["relation"] == SIZES}
        assert sizes == {"FSDPEngineWithValueHead, value_loss": "holds", "FSDPEngineWithLMHead, ppo_loss": "holds"}
        assert "verl-gmpo-micro-batches" in (*results["repaired"], *results["ran"])


# Case, relation and patch.
BEFORE = {
    "samples": (SAMPLES, "verl-rollout-seed"),
    "rejected": (COUNT, "verl-rejected-loss-mask"),
    "bf16": ("rotary frequencies", "verl-rotary-precision"),
}


@pytest.mark.exhaustive
def test_bugs_before_the_loss_deviate_without_their_patches(run_ranks):
    """verl's own server draws samples, its trainer rejects tokens, and its engine builds the model."""
    levels = [Level(f"tests.harness.loading:{name}") for name in ("verl_engine", "verl_v1_trainer")]
    reports = run_ranks(
        rehearsal_ranks.__name__, "--before", levels=(*verl_workers(), *levels), ranks=1, TORCHDYNAMO_DISABLE="1"
    )
    assert reports[0]["applied"] == [patch for _, patch in BEFORE.values()]
    for case, (relation, _) in BEFORE.items():
        assert of(reports, case, "without")[relation][0] == "deviates", case
        found = of(reports, case, "with")
        assert found[relation][0] == "holds", case
        assert not [each for each in found.values() if each[0] == "deviates"], (case, found)
    assert of(reports, "samples", "without")[SAMPLES][1] == "1 of 1 prompts"
    assert of(reports, "rejected", "without")[FORMULA][2] == "0.961 x PPO's gradient (token-mean)"
    assert "0.961 x the mean over the trained tokens" in of(reports, "rejected", "without")[COUNT][2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
def test_losses_that_add_up_over_micro_batches_hold(run_ranks, ranks):
    """27 runs of ten losses; kl_cov selects tokens within a micro-batch, and gets a note."""
    reports = run_ranks(
        rehearsal_ranks.__name__, "--right", levels=verl_workers(), ranks=ranks, TORCHDYNAMO_DISABLE="1"
    )
    found = {name: of(reports, name, "with")[SIZES] for name in rehearsal_ranks.RIGHT}
    assert len(found) == 27
    wrong = {name: each for name, each in found.items() if each[0] != "holds" and not name.startswith("kl_cov")}
    assert not wrong
    assert {each[0] for name, each in found.items() if name.startswith("kl_cov")} <= {"holds", "note"}
    for name in rehearsal_ranks.RIGHT:
        relations = of(reports, name, "with")
        assert relations[ENGINE][0] == "holds", (name, relations)
        plain = any(name.startswith(each) for each in ("vanilla", "entropy", "KL", "k3", "dual clipping"))
        assert (relations.get(FORMULA, [""])[0] == "holds") == plain, (name, relations)
        assert not [each for each in relations.values() if each[0] == "deviates"], (name, relations)
