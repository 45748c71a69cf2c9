"""peft-layers-to-transform: which modules of real mixtures the real PEFT adapts (layers_to_transform_ranks.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.peft._conditions import taken_for_another_layer
from rlhf_patches.patches.peft.proofs import layers_to_transform_ranks as ranks
from tests.harness.forkserver import beside

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same",
    "no side effects": "because it is another regular expression; nothing is read or written",
    "backward compatible": "test_what_was_right_is_the_same",
    "no new blocking": "because it matches one name; no lock, no collective",
    "Names without experts keep the number": "test_what_was_right_is_the_same",
    "Load it with the patch off": "test_an_adapter_that_was_trained_with_the_bug_is_told_apart",
}


@pytest.fixture(scope="module")
def found(run_ranks):
    (report,) = run_ranks(ranks.__name__, levels=beside("peft-0.18", "peft", "transformers-4.57"), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("case", ranks.WRONG)
def test_the_number_of_an_expert_counted_and_that_of_the_layer_does(found, case):
    for state in ("before", "reverted"):
        assert found[state][case]["adapted"] != found[state][case]["right"]
        assert any(".experts." in name for name in found[state][case]["adapted"])
    assert found["after"][case]["adapted"] == found["after"][case]["right"]


@pytest.mark.parametrize("case", [case for case in ranks.CASES if case not in ranks.WRONG])
def test_what_was_right_is_the_same(found, case):
    assert found["before"][case]["adapted"] == found["before"][case]["right"]
    assert found["after"][case] == found["before"][case]


def test_a_run_is_told_whether_it_was_affected(found):
    """Once for each module that is wrong, and for no other; one case's modules are adapted again to load them."""
    of = {case: found["before"][case] for case in (*ranks.WRONG, ranks.WRONG[0])}
    wrong = [{*each["adapted"]} ^ {*each["right"]} for each in (*of.values(), of[ranks.WRONG[0]])]
    reached = found["reached"]
    assert reached["asked"] == reached["calls"] > reached["held"] == sum(map(len, wrong))


def test_an_adapter_that_was_trained_with_the_bug_is_told_apart(found):
    """Of the weights of one expert in three layers, those of two layers have no place any more."""
    assert found["before"]["loaded"] == {"unexpected": 0}
    assert found["after"]["loaded"] == {"unexpected": 12}


@pytest.mark.parametrize(
    ("key", "settings", "told"),
    [
        ("model.layers.0.mlp.experts.1.up_proj", {}, True),
        ("model.layers.1.mlp.experts.0.up_proj", {}, True),
        ("model.layers.1.mlp.experts.1.up_proj", {}, False),
        ("model.layers.0.mlp.experts.1.up_proj", {"layers_to_transform": [0, 1]}, False),
        ("model.layers.0.mlp.experts.1.up_proj", {"layers_to_transform": 0}, True),
        ("model.layers.0.mlp.experts.1.up_proj", {"layers_to_transform": None}, False),
        ("model.layers.0.mlp.experts.1.up_proj", {"layers_to_transform": []}, False),
        ("model.layers.0.mlp.experts.1.up_proj", {"layers_pattern": "layers"}, False),
        ("model.layers.0.mlp.experts.1.up_proj", {"target_modules": r".*up_proj"}, False),
        ("model.layers.0.mlp.experts.1.up_proj", {"target_modules": ["q_proj"]}, False),
        ("model.layers.0.mlp.experts.1.up_proj", {"exclude_modules": ["up_proj"]}, None),
        ("model.layers.0.mlp.experts.1.up_proj", {"exclude_modules": r".*\.0\..*"}, None),
        ("model.layers.0.mlp.experts.1.up_proj", {"modules_to_save": ["experts"]}, None),
        ("model.layers.0.mlp.experts.1.up_proj", {"modules_to_save": ["lm_head"]}, True),
        ("model.layers.0.mlp.up_proj", {}, False),
        ("layers.0.mlp.experts.1.up_proj", {}, None),
        ("layers.1.block_sparse_moe.experts.0.up_proj", {}, None),
        ("layers.1.experts.0.up_proj", {}, None),
        ("layers.1.mlp.experts.1.up_proj", {}, False),
        ("layers.0.mlp.experts.2.up_proj", {}, False),
        ("layers.0.blocks.1.up_proj", {}, False),
        ("up_proj", {}, False),
    ],
)
def test_what_is_told_of_a_module(key, settings, told):
    config = {"layers_to_transform": [1], "layers_pattern": None, "target_modules": ["up_proj"], **settings}
    assert taken_for_another_layer(SimpleNamespace(**config), key) is told


@pytest.mark.parametrize("name", ["layers_to_transform", "layers_pattern", "target_modules"])
def test_what_is_not_known_of_a_configuration(name):
    config = {"layers_to_transform": [1], "layers_pattern": None, "target_modules": ["up_proj"]}
    del config[name]
    assert taken_for_another_layer(SimpleNamespace(**config), "model.layers.0.mlp.experts.1.up_proj") is None
    assert taken_for_another_layer(SimpleNamespace(), "") is None
