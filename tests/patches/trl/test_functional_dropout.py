"""``trl-functional-dropout``: DPO's first step with disable_dropout, against a model without dropout in float64."""

from __future__ import annotations

import os

import pytest

from rlhf_patches.patches.trl.functional_dropout import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, TRL, Level, beside
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_other_models_and_a_kept_dropout_are_the_same",
    "no side effects": ("test_the_config_stays", "test_modules_of_others_are_as_released"),
    "backward compatible": "test_modules_of_others_are_as_released",
    "no new blocking": "because it sets attributes of a rank's model; no lock, no collective",
    "known": "test_modules_of_others_are_as_released",
    "The model's config stays as it is": "test_the_config_stays",
    "bit for bit": "test_other_models_and_a_kept_dropout_are_the_same",
    "They stay as released": (
        "test_modules_of_others_are_as_released",
        "test_a_model_that_reads_its_config_is_no_repaired_one",
    ),
    "never changed": "test_modules_of_others_are_as_released",
}
WORKER = "rlhf_patches.patches.trl.proofs.functional_dropout_ranks"
USERS = "tests.patches.trl.functional_dropout_own_ranks"
WRONG = ("OPT", "Seed-OSS", "Llama, attention_dropout")
SAME = ("Llama", "OPT, dropout kept")
ROUNDING = 1e-5
"""Forward and backward of two layers in float32; seen are 4e-7."""
exhaustive = pytest.mark.exhaustive


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.5.0", "trl==0.7.11", "trl==0.12.0", "trl==0.22.2", "trl==1.16.0")
    held = RULE_COVERAGE


@pytest.fixture(scope="module", params=[pytest.param(None, id="1.14"), pytest.param("trl-1.16", marks=exhaustive)])
def report(request, run_ranks):
    levels = beside(request.param, "trl") if request.param else TRL
    (found,) = run_ranks(WORKER, levels=levels, ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


def is_repaired(report, case):
    before, after = (report[state][case] for state in ("before", "after"))
    assert before["error"] > 0.05
    assert abs(before["loss"]) > 1e-4
    assert after["error"] < ROUNDING
    assert abs(after["loss"]) < 1e-4, "transformers 4 logs four digits"
    assert (before["left"] > 0, after["left"]) == (True, 0)


@pytest.mark.parametrize("case", WRONG)
def test_the_first_step_has_no_dropout(report, case):
    is_repaired(report, case)


@pytest.mark.parametrize("case", SAME)
def test_other_models_and_a_kept_dropout_are_the_same(report, case):
    assert report["after"][case] == report["before"][case]


def test_the_config_stays(report):
    for case in WRONG:
        assert report["after"][case]["config"] == report["before"][case]["config"]
        assert max(report["after"][case]["config"].values()) == 0.1


def test_it_is_met_by_policy_and_reference(report):
    assert report["reached"]["held"] == 2 * len(WRONG)


def test_reverted_it_is_as_released(report):
    assert report["reverted"] == {case: report["before"][case] for case in report["reverted"]}


@pytest.fixture(scope="module")
def users(run_ranks):
    (found,) = run_ranks(USERS, levels=TRL, ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    assert found["reverted"] == found["before"]
    return found


def test_forwards_in_training_are_equal(users):
    """Of other models; two of them read their config at each call."""
    assert not any(users["before"]["repeats"].values())
    assert {name for name, same in users["after"]["repeats"].items() if not same} == {"Falcon", "Persimmon"}


def test_a_model_that_reads_its_config_is_no_repaired_one(users):
    met = users["before"]["met"]
    assert [name for name, is_met in met.items() if is_met is not True] == ["Falcon", "Persimmon"]
    assert met["Falcon"] is met["Persimmon"] is None
    assert "0.1" in users["before"]["Falcon"]


def test_modules_of_others_are_as_released(users):
    before, after = users["before"], users["after"]
    assert before["released"] == ["0.1", "0.1"]
    assert after["released"] == after["on several devices"] == ["0.0", "0.0"]
    for name in set(before) - {"released", "on several devices", "repeats", "met"}:
        assert after[name] == before[name], name
    assert before["own module"] == ["0.1", "0", "0.1"], "of which TRL sets the Dropout"


def test_a_users_module_with_such_an_attribute_is_not_decided():
    """Whether it uses it is not known."""
    torch = pytest.importorskip("torch")
    dropout = pytest.importorskip("rlhf_patches.patches.trl._functional_dropout")
    module = torch.nn.Linear(2, 2)
    assert dropout.is_left_on(module) is False
    module.attention_dropout = 0.1
    assert dropout.is_left_on(module) is None


@exhaustive
@pytest.mark.parametrize("version", ["0.22.0", "0.29.1"])
def test_other_releases(run_ranks, version):
    """With the newest transformers that they work with."""
    folders = [unpacked.folders(f"trl=={version}"), str(folder("transformers-4.57"))]
    level = Level("tests.harness.loading:transformers_alone", os.pathsep.join(folders))
    (found,) = run_ranks(WORKER, *WRONG[::2], "Llama", levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == (version, "applied")
    for case in WRONG[::2]:
        is_repaired(found, case)
    assert found["after"]["Llama"] == found["before"]["Llama"]
