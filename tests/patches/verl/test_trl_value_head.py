"""``verl-trl-value-head`` on verl's real functions beside real releases of TRL (trl_value_head_ranks.py)."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from rlhf_patches.patches.verl import _value_head_class
from tests.harness import unpacked
from tests.harness.forkserver import Level, verl
from tests.harness.logs import diagnosed

RULE_COVERAGE = {
    "minimal scope": "test_beside_an_older_trl_nothing_is_changed",
    "no side effects": "test_nothing_is_put_into_trl",
    "backward compatible": (
        "test_beside_an_older_trl_nothing_is_changed",
        "test_a_class_that_somebody_has_put_into_trl_comes_first",
    ),
    "no new blocking": "because it imports what upstream imports; no lock, no collective",
    "the patch uses that class, as before": "test_a_class_that_somebody_has_put_into_trl_comes_first",
    "with the same error as before": "test_where_trl_has_removed_it_every_model_is_prepared",
    "The patch adds nothing to TRL": "test_nothing_is_put_into_trl",
}
WORKER, PATCH = "rlhf_patches.patches.verl.proofs.trl_value_head_ranks", "verl-trl-value-head"
#: Of values around 1, float64: TRL's head, and the formula's product.
TOLERANCE = 1e-12
ERROR = "ImportError: cannot import name 'AutoModelForCausalLMWithValueHead' from 'trl'"
THE_ENVIRONMENTS = "0.29.1"


@pytest.fixture
def ran(run_ranks):
    """The worker's report on a release of verl beside one of TRL."""

    def run(release: str, trl: str) -> dict[str, Any]:
        folder = None if trl == THE_ENVIRONMENTS else unpacked.folders(f"trl=={trl}")
        levels = (*verl(None if release == "0.9" else release), Level("tests.harness.loading:torch", folder))
        (found,) = run_ranks(WORKER, levels=levels, ranks=1, TRL_EXPERIMENTAL_SILENCE="1")
        assert found["version"].startswith(release)
        assert found["trl"] == trl
        return found

    return run


def fails(log: Any) -> bool:
    """Whether it ended in the bug's error, and `diagnose` says so."""
    return isinstance(log, str) and ERROR in log.splitlines()[-1] and diagnosed(log) == [(PATCH, True)]


def is_as_beside_an_older_trl(found, reference):
    critic, other = found["after"]["critic"], reference["before"]["critic"]
    assert critic["class"] == "trl.experimental.ppo.modeling_value_head.AutoModelForCausalLMWithValueHead"
    assert other["class"] == "trl.models.modeling_value_head.AutoModelForCausalLMWithValueHead"
    for values, right in zip(critic["values"], critic["by the formula"], strict=True):
        assert values == pytest.approx(right, rel=TOLERANCE)
    assert {**critic, "class": ""} == {**other, "class": ""}, "bit for bit"
    assert found["after"]["every model"] == reference["before"]["every model"]


@pytest.mark.parametrize("release", ["0.7", pytest.param("0.6", marks=pytest.mark.exhaustive)])
def test_the_last_trl_that_it_worked_with_gives_the_same_numbers(ran, release):
    found, reference = ran(release, THE_ENVIRONMENTS), ran(release, "0.28.0")
    assert found["row"].startswith("applied")
    for state in ("before", "reverted"):
        assert fails(found[state]["critic"]), found[state]["critic"]
        assert fails(found[state]["every model"])
    is_as_beside_an_older_trl(found, reference)


def test_beside_an_older_trl_nothing_is_changed(ran):
    found = ran("0.7", "0.28.0")
    assert found["row"].startswith("unaffected: verl 0.7.1 is not affected with trl 0.28.0")
    assert found["before"] == found["after"] == found["reverted"]


@pytest.mark.exhaustive
def test_the_release_that_finds_it_for_every_model_and_not_for_a_critic(ran):
    found, reference = ran("0.8", THE_ENVIRONMENTS), ran("0.8", "0.28.0")
    for state in ("before", "reverted"):
        assert fails(found[state]["critic"])
        assert found[state]["every model"] == found["after"]["every model"]
    assert found["after"]["critic"]["values"] == reference["before"]["critic"]["values"]


@pytest.mark.parametrize(
    "release", ["0.9", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("0.8", "0.7"))]
)
def test_where_trl_has_removed_it_every_model_is_prepared(ran, release):
    found = ran(release, "1.13.0")
    assert found["row"].startswith("applied")
    for state in ("before", "reverted"):
        assert fails(found[state]["every model"])
    assert found["after"]["every model"] == {
        "the rest": "verl.models.transformers.monkey_patch",
        "given a state_dict": False,
    }
    for state in ("before", "after", "reverted"):
        assert ERROR in found[state]["critic"]


@pytest.mark.exhaustive
def test_the_release_that_finds_it_itself_is_left_alone(ran):
    found = ran("0.9", THE_ENVIRONMENTS)
    assert found["row"].startswith("unaffected: verl 0.9.1 is not affected with trl 0.29.1")
    assert found["before"] == found["after"] == found["reverted"]


def test_nothing_is_put_into_trl(ran):
    """What asks TRL for the name finds it missing afterwards too; its class is given what verl gives it."""
    found = ran("0.7", THE_ENVIRONMENTS)
    assert fails(found["reverted"]["critic"])
    assert found["after"]["every model"]["given a state_dict"]


def test_a_class_that_somebody_has_put_into_trl_comes_first(monkeypatch):
    """As the released line asks; the experimental class where there is none; the error as released where neither is."""
    own, new = types.SimpleNamespace(), types.SimpleNamespace()
    top, experimental, ppo = (types.ModuleType(name) for name in ("trl", "trl.experimental", "trl.experimental.ppo"))
    for module in (top, experimental, ppo):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not _value_head_class.has_value_head_class()
    with pytest.raises(ImportError, match="cannot import name 'AutoModelForCausalLMWithValueHead' from 'trl'"):
        _value_head_class.value_head_class()
    ppo.AutoModelForCausalLMWithValueHead = new
    assert _value_head_class.value_head_class() is new
    top.AutoModelForCausalLMWithValueHead = own
    assert _value_head_class.value_head_class() is own
    del ppo.AutoModelForCausalLMWithValueHead
    assert _value_head_class.value_head_class() is own
    assert _value_head_class.has_value_head_class()
