"""slime-uneven-groups: advantages of slime's own `RolloutManager`, and of its Ray actor, against the definition.

slime computes in float32 on rewards up to 5, and divides by standard deviations down to 0.4: some 1e-6 absolute.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from tests.harness import slime_clone
from tests.harness.forkserver import TORCH, Level
from tests.harness.slime_clone import with_clone
from tests.patches.slime.uneven_groups_cases import CASES, ESTIMATORS, PER_PROMPT, REPAIRED

RULE_COVERAGE = {
    "minimal scope": "test_the_rest_is_as_released",
    "no side effects": "because it reads samples and arguments, and makes new tensors",
    "backward compatible": ("test_the_rest_is_as_released", "test_samples_without_a_group_or_with_several_rewards"),
    "no new blocking": "because it runs in the actor that has all rewards; no collective, no lock",
    "equal groups, bit for bit": "test_the_rest_is_as_released",
    "as released": "test_the_rest_is_as_released",
}
WORKER = "tests.patches.slime.uneven_groups_ranks"
FILES = ("slime/ray/rollout.py", "slime/utils/types.py")
RUNS = {"v0.3.1": "0.3.1"}
MORE = {"v0.2.0": "0.2.0", "v0.2.2": "0.2.2", "v0.2.4": "0.2.3", "v0.3.0": "0.3.0", "HEAD": "0.3.1"}
STANDINS = Path(__file__).parents[2] / "harness" / "standins"
EACH = [f"{name}, {estimator}" for name, estimator in itertools.product(CASES, ESTIMATORS)]


def expected(case, divided=True):
    """(r - mean) / (std + 1e-6) within each group; REINFORCE++-baseline only takes the mean off; 0 for a single one."""
    name, _, estimator = case.partition(", ")
    _, rewards, groups = CASES[name]
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [one for one, other in zip(rewards, groups, strict=True) if other == group]
        advantage = reward - statistics.fmean(own)
        if divided and estimator != "reinforce_plus_plus_baseline" and len(own) > 1:
            advantage /= statistics.stdev(own) + 1e-6
        result.append(advantage)
    return result


@pytest.fixture(scope="module")
def start(run_ranks, tmp_path_factory):
    def run(tag, *arguments):
        folder = STANDINS
        if tag is not None:
            folder = slime_clone.write(tmp_path_factory.mktemp("slime"), tag, {**RUNS, **MORE}[tag], FILES)
        levels = (*TORCH, Level("tests.harness.loading:torch", str(folder)))
        (report,) = run_ranks(WORKER, *arguments, levels=levels, ranks=1)
        return report

    return run


@pytest.fixture(scope="module", params=[*RUNS, *(pytest.param(tag, marks=pytest.mark.exhaustive) for tag in MORE)])
def report(request, start):
    found = start(request.param)
    assert found["status"] == "applied"
    return found


@with_clone
@pytest.mark.parametrize("case", [case for case in EACH if case.startswith(REPAIRED)])
def test_each_prompt_is_normalized_by_itself(report, case):
    assert report["after"][case] == pytest.approx(expected(case), abs=5e-6)
    for state in ("before", "reverted"):
        assert max(abs(one - other) for one, other in zip(report[state][case], expected(case), strict=True)) > 0.3


@with_clone
@pytest.mark.parametrize("case", [case for case in EACH if not case.startswith(REPAIRED)])
def test_the_rest_is_as_released(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]
    if case.startswith(("equal", "one prompt")):
        assert report["after"][case] == pytest.approx(expected(case), abs=5e-6)


@with_clone
def test_its_condition_holds_where_groups_are_uneven(report):
    """Not where slime's rows are the groups, nor without normalization; nothing is said without an index."""
    uneven = sum(case.startswith(REPAIRED) for case in EACH) + 1  # without a division too
    right = sum(case.startswith(("equal", "one prompt")) for case in EACH) + 1
    reached = report["reached"]
    assert (reached["held"], reached["asked"], reached["calls"]) == (uneven, uneven + right, len(EACH) + 3)


def test_what_the_condition_says():
    from types import SimpleNamespace as Has

    from rlhf_patches.patches.slime.uneven_groups import not_normalized

    for settings in ({"rewards_normalization": False}, {"advantage_estimator": "ppo"}):
        assert not_normalized(Has(args=Has(**settings))) is False
    for manager in (Has(args=Has(rewards_normalization=True, advantage_estimator="grpo")), Has(args=Has()), Has()):
        assert not_normalized(manager) is None


@with_clone
def test_settings(report):
    assert report["after"]["not divided"] == pytest.approx(expected("fewer, grpo", divided=False), abs=5e-6)
    for name in ("not normalized", "custom"):
        assert report["before"][name] == report["after"][name] == CASES["fewer"][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tag", [None, pytest.param("v0.3.1", marks=with_clone)], ids=["stand-in", "v0.3.1"])
def test_it_reaches_a_ray_actor(start, tag):
    """With the class that the driver sends; the patch itself is not in force in the actor's process."""
    found = start(tag, "--ray")
    assert found["rewards"] == pytest.approx(expected("fewer, grpo"), abs=5e-6)
    assert (found["another process"], found["in force there"]) == (True, False)


# ------------------------------------------------------------------------------------- what is put in


@pytest.mark.parametrize("name", CASES)
def test_what_is_put_in_for_the_statistics(name):
    """In one process, without slime."""
    torch = pytest.importorskip("torch")

    from types import SimpleNamespace

    from rlhf_patches.patches.slime import uneven_groups as ours

    prompts, values, groups = CASES[name]
    samples = [SimpleNamespace(group_index=group) for group in groups]
    args = SimpleNamespace(n_samples_per_prompt=PER_PROMPT, rollout_batch_size=prompts)
    rewards = torch.tensor(values).reshape(-1, PER_PROMPT if len(values) == prompts * PER_PROMPT else len(values))
    centered = rewards - ours.mean(rewards, samples, args)
    found = (centered / (ours.std(centered, samples, args) + 1e-6)).flatten().tolist()
    if name in (*REPAIRED, "equal", "one prompt"):
        assert found == pytest.approx(expected(f"{name}, grpo"), abs=5e-6)
    else:
        rows = rewards - rewards.mean(-1, keepdim=True)
        assert found == (rows / (rows.std(-1, keepdim=True) + 1e-6)).flatten().tolist()


def test_samples_without_a_group_or_with_several_rewards():
    """A class of somebody's own, and rewards that are lists: slime's rows, bit for bit."""
    torch = pytest.importorskip("torch")

    from types import SimpleNamespace

    from rlhf_patches.patches.slime import uneven_groups as ours

    args = SimpleNamespace(n_samples_per_prompt=2, rollout_batch_size=2)
    several = torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]])
    samples = [SimpleNamespace(group_index=0), SimpleNamespace(group_index=1)]
    for rewards, of in ((several, samples), (several.view(1, -1), [SimpleNamespace()] * 6)):
        assert torch.equal(ours.mean(rewards, of, args), rewards.mean(-1, keepdim=True))
        assert torch.equal(ours.std(rewards, of, args), rewards.std(-1, keepdim=True))
