"""Rehearsals of OpenRLHF's real trainers of actor and critic, of known bugs and of right runs (rehearsal_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.rehearsal.rollouts import ENGINE, SAMPLES
from tests.harness.forkserver import Level, beside

WORKER = "tests.patches.openrlhf.rehearsal_ranks"
SIZES, MASKED, RATIO = "micro-batch size", "masked tokens", "old log-probabilities"
OPTIMIZER, REFERENCE, KL = "optimizer parameters", "reference log-probabilities", "KL loss"
ACCUMULATED = "accumulated gradient"
BUGS = {"0.11.2": ["openrlhf-masked-nan"], "0.10.2": ["openrlhf-masked-nan", "openrlhf-k3-gradient"]}


def run(run_ranks, release, ranks, *arguments):
    levels = (*beside(f"openrlhf-{release}", "openrlhf"), Level("tests.harness.loading:openrlhf_trainers"))
    reports = run_ranks(WORKER, *arguments, levels=levels, ranks=ranks)
    assert len(reports) == ranks
    assert reports[0]["applied"] == BUGS[release]
    return reports


@pytest.fixture(scope="module", params=["0.11.2", pytest.param("0.10.2", marks=pytest.mark.exhaustive)])
def release(request):
    return request.param


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)], ids=["one rank", "two ranks"]
)
def reports(run_ranks, release, request):
    return run(run_ranks, release, request.param)


def of(reports, case, state):
    return reports[0][state][case]["relations"]


def test_masked_nan_deviates_without_its_patch_and_holds_with_it(reports):
    found = of(reports, "masked nan", "without")
    assert found[SIZES][:2] == found[MASKED][:2] == ["deviates", "nan"]
    assert "what masked tokens hold: it is finite with zeros there" in found[MASKED][2]
    assert of(reports, "masked nan", "with")[MASKED][0] == "holds"


def test_the_gradient_of_k3_deviates_without_its_patch(reports, release):
    bug = "openrlhf-k3-gradient" in BUGS[release]
    found = of(reports, "k3", "without")
    assert (found[SIZES][0], found[SIZES][1]) == ("deviates", "nan") if bug else ("holds", "1.000")
    assert (found[MASKED][0] == "deviates") == bug
    assert of(reports, "k3", "with")[MASKED][0] == "holds"
    assert of(reports, "k3", "with")[SIZES][1] != "nan"


def test_a_mean_over_each_micro_batch_deviates(reports, release):
    """Until 0.11 OpenRLHF's loss is a mean over the tokens of a micro-batch, as its documentation says."""
    verdict, _, text = of(reports, "ppo, micro 2", "with")[SIZES]
    assert verdict == ("holds" if release == "0.11.2" else "deviates"), text


def test_before_the_first_update(reports):
    found = of(reports, "ppo, before the first update", "with")
    assert found[RATIO][0] == found[REFERENCE][0] == "holds"
    found = of(reports, "ppo, micro 2", "with")
    assert found[RATIO][0] == found[REFERENCE][0] == "note"


def test_the_engines_log_probabilities(reports):
    assert of(reports, "ppo, micro 2", "with")[ENGINE][0] == "holds"
    for case, why in (("another temperature", "are of temperature 1"), ("another policy", "another policy")):
        verdict, measured, text = of(reports, case, "with")[ENGINE]
        assert verdict == "deviates"
        assert 0.1 < float(measured) < 1
        assert why in text


def test_equal_samples_deviate(reports):
    assert of(reports, "same answers", "with")[SAMPLES][:2] == ["deviates", f"{len(reports)} of {len(reports)} prompts"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("dropout", "is random"),
        ("router", "the router's loss"),
        ("own step", "OwnTrainer or its ppo_train is not OpenRLHF's"),
        ("too few rows", "and a step 64"),
    ],
)
def test_what_cannot_be_checked_is_named(reports, case, why):
    if case == "too few rows" and len(reports) > 1:
        why = "and a step 3"
    verdict, _, text = of(reports, case, "with")[SIZES]
    assert verdict == "not checked"
    assert why in text


def test_a_parameter_that_the_optimizer_lacks_deviates(reports):
    assert of(reports, "replaced head", "with")[OPTIMIZER][0] == "deviates"


def test_the_trainer_and_its_buffer_are_as_they_were(reports):
    assert all(
        each["as it was"] for report in reports for state in ("without", "with") for each in report[state].values()
    )


def test_all_ranks_have_the_same_relations(reports):
    for state in ("without", "with"):
        for case in reports[0][state]:
            assert all(of([report], case, state) == of(reports, case, state) for report in reports), case


def test_a_critic_trains_and_the_actor_ends_the_run(reports, release):
    """Both are checked."""
    status = "status 0" if release == "0.11.2" else "status 1"
    for rank, report in enumerate(reports):
        assert report["command"]["ended"][0] == "critic, micro 2"
        assert report["command"]["ended"][1].startswith("status 0")
        results = report["command"]["results"]
        assert (results is None) == bool(rank)
        if not rank:
            assert f"status {results['status']}" == status
            assert {row["of"] for row in results["relations"]} == {
                "CriticPPOTrainer, ValueLoss",
                "ActorPPOTrainer, PolicyLoss (ppo)",
            }


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
def test_right_configurations_hold(run_ranks, ranks):
    reports = run(run_ranks, "0.11.2", ranks, "--right")
    right = reports[0]["with"]
    assert len(right) == 29
    for name in right:
        found = of(reports, name, "with")
        assert found[SIZES][0] == found[MASKED][0] == "holds", (name, found)
        assert not [each for each in found.values() if each[0] == "deviates"], (name, found)
        assert (found.get(KL, [""])[0] == "holds") == name.startswith("kl "), (name, found)
        assert (found.get(ENGINE, [""])[0] == "holds") == ("critic" not in name), (name, found)
        assert (found.get(ACCUMULATED, [""])[0] == "holds") == ("ZeRO" in name), (name, found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
def test_micro_batches_that_deepspeed_loses_deviate(run_ranks, ranks):
    levels = (
        *beside("openrlhf-0.11.2", "openrlhf", "deepspeed-0.18.2"),
        Level("tests.harness.loading:openrlhf_trainers"),
    )
    reports = run_ranks(WORKER, "--deepspeed", levels=levels, ranks=ranks)
    assert reports[0]["applied"] == ["deepspeed-zero2-accumulation"]
    assert of(reports, "ppo, ZeRO-2", "without")[ACCUMULATED][0] == "deviates"
    for state, case in (("with", "ppo, ZeRO-2"), ("without", "ppo, ZeRO-1"), ("with", "ppo, ZeRO-1")):
        found = of(reports, case, state)
        assert found[ACCUMULATED][0] == found[SIZES][0] == "holds", (state, case, found)
