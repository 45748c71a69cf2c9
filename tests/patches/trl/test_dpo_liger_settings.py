"""``trl-dpo-liger-settings``: DPO with Liger's own loss has the gradient of each loss's formula in float64.

dpo_liger_settings_ranks.py trains real trainers, with Liger and without.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from rlhf_patches.patches.trl._conditions import settings_of_liger
from rlhf_patches.patches.trl.dpo_liger_settings import PATCH, settings
from rlhf_patches.testing import PatchContract
from tests.harness import logs, unpacked
from tests.harness.forkserver import trl_with_liger

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same_bit_for_bit",
    "no side effects": "because a constructor gets two arguments more; nothing is written",
    "backward compatible": (
        "test_what_was_right_is_the_same_bit_for_bit",
        "test_only_liger_s_own_class_is_given_more",
    ),
    "known": "test_only_liger_s_own_class_is_given_more",
    "gets what TRL gives it": (
        "test_liger_s_class_with_an_init_of_the_user_s_gets_what_trl_gives_it",
        "test_only_liger_s_own_class_is_given_more",
        "test_what_was_right_is_the_same_bit_for_bit",
    ),
    "no new blocking": "because it is two arguments; no lock, no collective",
    "stay bit for bit": "test_what_was_right_is_the_same_bit_for_bit",
    "is left out as before": "test_what_was_right_is_the_same_bit_for_bit",
}
WORKER = "rlhf_patches.patches.trl.proofs.dpo_liger_settings_ranks"
#: Everything is in float64 but for one factor of Liger's; seen are 3e-7.
TOLERANCE = 1e-6
WRONG = ("robust", "discopop", "exo_pair")
RIGHT, MORE = ("robust, refused", "sigmoid"), ("robust, no smoothing", "apo_zero", "robust, without Liger")


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.29.0", "trl==1.8.0", "trl==1.12.0", "trl==1.13.0", "trl==0.28.0")
    held = RULE_COVERAGE


@pytest.fixture
def trained(run_ranks):
    def run(version, *cases):
        levels = trl_with_liger(unpacked.folders(f"trl=={version}"))
        (found,) = run_ranks(WORKER, *cases, levels=levels, ranks=1)
        assert found[PATCH.name] == [version, "unaffected" if version == "1.13.0" else "applied"]
        if "reached" in found:
            held, asked = found["reached"]["held"], found["reached"]["asked"]
            assert held == sum(case in WRONG for case in cases)  # not without Liger, nor of sigmoid
            assert asked == len(cases)
        return found

    return run


def is_repaired(found):
    assert found["before"]["discopop"]["error"] > 1
    for state in ("before", "reverted"):
        assert found[state]["robust"]["error"] > 0.3
        assert found[state]["robust"]["error of none"] < TOLERANCE, "of a label_smoothing of 0"
        assert "label_smoothing must be > 0" in found[state]["exo_pair"]["refused"]
    assert all(found["after"][case]["error"] < TOLERANCE for case in WRONG)


def test_the_loss_has_the_user_s_settings(trained):
    is_repaired(trained("1.12.0", *WRONG, *RIGHT))


@pytest.mark.parametrize("cases", [(*WRONG, *RIGHT), pytest.param(MORE, marks=pytest.mark.exhaustive)])
def test_what_was_right_is_the_same_bit_for_bit(trained, cases):
    found = trained("1.12.0", *cases)
    for case in {*RIGHT, *MORE} & {*cases}:
        of_none = case in ("sigmoid", "robust, refused")
        assert found["before"][case]["error of none" if of_none else "error"] < TOLERANCE
        assert found["after"][case] == found["before"][case]


def test_only_liger_s_own_class_is_given_more():
    """One of the user's in its place may take what TRL gives it, and nothing else."""
    args = SimpleNamespace(label_smoothing=0.2, discopop_tau=0.5, loss_type="robust")
    theirs: dict[str, Any] = {"__name__": "liger_kernel.chunked_loss.dpo_loss"}
    exec("class LigerFusedLinearDPOLoss:\n    def __init__(self, **_): ...", theirs)
    liger = theirs["LigerFusedLinearDPOLoss"]
    both = {"label_smoothing": 0.2, "discopop_tau": 0.5}
    assert settings(liger, args) == settings(partial(liger, compiled=False), args) == both
    assert settings(partial(liger, label_smoothing=0.1), args) == {"discopop_tau": 0.5}
    own = type("Own", (liger,), {"__module__": "losses"})
    assert settings(own, args) == settings(partial(own), args) == settings(lambda **_: None, args) == {}


def test_liger_s_class_with_an_init_of_the_user_s_gets_what_trl_gives_it(monkeypatch):
    """Which may be what gives it the setting, and would be given it twice."""
    args = SimpleNamespace(use_liger_kernel=True, label_smoothing=0.2, discopop_tau=0.5, loss_type="robust")
    theirs: dict[str, Any] = {"__name__": "liger_kernel.chunked_loss.dpo_loss"}
    exec("class LigerFusedLinearDPOLoss:\n    def __init__(self, label_smoothing=0.0): ...", theirs)
    liger = theirs["LigerFusedLinearDPOLoss"]
    made = liger.__init__
    monkeypatch.setattr(liger, "__init__", lambda self, **given: made(self, label_smoothing=0.2, **given))
    assert settings(liger, args) == settings(partial(liger), args) == {}
    liger(**settings(liger, args))
    monkeypatch.setitem(sys.modules, "trl.trainer.dpo_trainer", SimpleNamespace(LigerFusedLinearDPOLoss=liger))
    assert settings_of_liger(args) is None


@pytest.mark.parametrize(
    ("kind", "smoothing", "tau", "held"),
    [
        ("robust", 0.2, 0.05, True),
        ("robust", 0.0, 0.05, False),
        (["robust"], 0.6, 0.05, False),
        ("exo_pair", 0.6, 0.05, True),
        (["discopop"], 0.2, 0.5, True),
        ("discopop", 0.2, 0.05, False),
        ("sigmoid", 0.2, 0.5, False),
    ],
)
def test_the_condition_holds_where_the_settings_are_not_liger_s_defaults(kind, smoothing, tau, held):
    args = SimpleNamespace(use_liger_kernel=True, loss_type=kind, label_smoothing=smoothing, discopop_tau=tau)
    assert settings_of_liger(args) is held


def test_the_error_of_exo_pair_is_diagnosed(trained):
    assert logs.diagnosed(trained("1.12.0", *WRONG, *RIGHT)["before"]["exo_pair"]["log"]) == [(PATCH.name, True)]


def test_it_is_for_the_releases_of_liger_that_take_the_settings():
    """0.8.0's constructor would raise."""
    beside = PATCH.variants[0].guard.co_installed
    for version in ("0.8.0", "0.8.1"):
        loss = Path(unpacked.folders(f"liger-kernel=={version}"), "liger_kernel", "chunked_loss", "dpo_loss.py")
        assert ("label_smoothing" in loss.read_text()) == (version in SpecifierSet(beside.versions))


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["1.9.0", "1.13.0"])
def test_other_releases(trained, version):
    """1.13.0 has its own repair, and the same gradients."""
    found = trained(version, *WRONG)
    if version == "1.13.0":
        assert all(found["before"][case]["error"] < TOLERANCE for case in WRONG)
        assert found["before"] == found["after"]
    else:
        is_repaired(found)
