"""Rehearsals of SkyRL's real FSDP workers, of known bugs and of right runs (rehearsal_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.rehearsal.rollouts import ENGINE, SAMPLES
from tests.harness.forkserver import skyrl

WORKER = "tests.patches.skyrl.rehearsal_ranks"
SIZES, MASKED, RATIO, KL = "micro-batch size", "masked tokens", "old log-probabilities", "KL loss"
OPTIMIZER, ADVANTAGES, OUTPUTS = "optimizer parameters", "advantages", "outputs of samples"
TEMPERATURE = "skyrl-rollout-temperature"
APPLIED = {
    "0.1": ["skyrl-kl-no-grad", "skyrl-step-wise-advantages", TEMPERATURE],
    "0.3": ["skyrl-loss-outputs-packed", TEMPERATURE],
    "0.4": [TEMPERATURE],
}
# The case and the relation of each bug.
BUGS = {
    "0.1": [("kl", KL), ("step-wise", ADVANTAGES), ("sampled", ENGINE)],
    "0.3": [("outputs", OUTPUTS), ("sampled", ENGINE)],
    "0.4": [("sampled", ENGINE)],
}


def run(run_ranks, release, ranks, *arguments):
    more = ("0.3",) if release == "0.4" else ()
    levels = skyrl(release, *more)
    reports = run_ranks(WORKER, *arguments, levels=levels, ranks=ranks, TORCHDYNAMO_DISABLE="1")
    assert len(reports) == ranks
    imported = [name for name in APPLIED[release] if not arguments or name != TEMPERATURE]
    assert reports[0]["applied"] == imported
    return reports


@pytest.fixture(scope="module", params=["0.1", "0.3", "0.4"])
def release(request):
    return request.param


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def reports(run_ranks, release, request):
    return run(run_ranks, release, request.param)


def of(reports, case, state):
    return reports[0][state][case]["relations"]


@pytest.mark.exhaustive
class TestRehearsals:
    """All of a release and a number of ranks are one run."""

    def test_known_bugs_deviate_without_their_patches_and_hold_with_them(self, reports, release):
        for case, relation in BUGS[release]:
            assert of(reports, case, "without")[relation][0] == "deviates", case
            found = of(reports, case, "with")
            assert found[relation][0] == "holds", case
            assert not [each for each in found.values() if each[0] == "deviates"], (case, found)

    def test_a_mean_over_each_micro_batch_deviates(self, reports, release):
        """0.1 has a mean over the tokens of a micro-batch, and divides a sum by the number of micro-batches."""
        verdict, _, text = of(reports, "regular, micro 2", "with")[SIZES]
        assert verdict == ("deviates" if release == "0.1" else "holds"), text
        verdict, measured, _ = of(reports, "outputs", "with")[SIZES]
        assert (verdict, measured) == (("deviates", "2.000") if release == "0.1" else ("holds", "1.000"))

    def test_the_entropy_of_each_micro_batch_deviates(self, reports):
        assert of(reports, "entropy", "with")[SIZES][0] == "deviates"

    def test_ratios_are_one_before_the_first_update_only(self, reports):
        assert of(reports, "before the first update", "with")[RATIO][0] == "holds"
        assert of(reports, "regular, micro 2", "with")[RATIO][0] == "note"

    def test_the_temperature_of_the_engines_log_probabilities_is_named(self, reports):
        _, measured, text = of(reports, "sampled", "without")[ENGINE]
        assert 0.1 < float(measured) < 0.5
        assert "the engine's are of temperature 1" in text
        assert of(reports, "regular, micro 2", "with")[ENGINE][0] == "holds"

    def test_equal_samples_deviate(self, reports):
        assert of(reports, "same answers", "with")[SAMPLES][:2] == [
            "deviates",
            f"{len(reports)} of {len(reports)} prompts",
        ]

    @pytest.mark.parametrize(
        ("case", "why"),
        [
            ("dropout", "is random"),
            ("own worker", "OwnWorker or its forward_backward is not SkyRL's"),
            ("accumulated", "the gradients of another request"),
        ],
    )
    def test_what_cannot_be_checked_is_named(self, reports, case, why):
        verdict, _, text = of(reports, case, "with")[SIZES]
        assert verdict == "not checked"
        assert why in text

    def test_a_parameter_that_the_optimizer_lacks_deviates(self, reports):
        assert of(reports, "replaced head", "with")[OPTIMIZER][0] == "deviates"

    def test_the_worker_and_the_mini_batch_are_as_they_were(self, reports):
        states = [report[state] for report in reports for state in ("without", "with")]
        assert all(each["as it was"] for state in states for each in state.values())

    def test_all_ranks_have_the_same_relations(self, reports):
        for state in ("without", "with"):
            for case in reports[0][state]:
                assert all(of([report], case, state) == of(reports, case, state) for report in reports), case

    def test_a_critic_trains_and_the_policy_ends_the_run(self, reports, release):
        for rank, report in enumerate(reports):
            assert report["command"]["ended"] == ["critic", "status 0"]
            results = report["command"]["results"]
            assert (results is None) == bool(rank)
            if not rank:
                assert results["status"] == (1 if release == "0.1" else 0)
                names = {row["of"] for row in results["relations"]}
                assert names == {"CriticWorkerBase, value loss", "PolicyWorkerBase, regular"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["0.3", "0.4"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
def test_right_configurations_hold(run_ranks, release, ranks):
    reports = run(run_ranks, release, ranks, "--right")
    right = reports[0]["with"]
    assert len(right) == 30
    for name in right:
        found = of(reports, name, "with")
        assert found[SIZES][0] == found[MASKED][0] == "holds", (name, found)
        assert not [each for each in found.values() if each[0] == "deviates"], (name, found)
        assert (found.get(KL, [""])[0] == "holds") == name.startswith("kl"), (name, found)
        assert (found.get(ENGINE, [""])[0] == "holds") == (not name.startswith(("critic", "cross"))), (name, found)
