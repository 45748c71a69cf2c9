"""``trl-kto-liger-reference``: KTO with Liger's own loss and PEFT has the gradient of KTO's formula in float64.

kto_liger_reference_ranks.py trains real trainers, with PEFT and without, with Liger and without.
"""

from __future__ import annotations

from types import SimpleNamespace as Has

import pytest

from rlhf_patches.patches.trl.kto_liger_reference import PATCH, ignores_the_reference
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import trl_with_liger

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same_bit_for_bit",
    "no side effects": "because one argument of a constructor is another one; nothing is read or written",
    "backward compatible": "test_what_was_right_is_the_same_bit_for_bit",
    "no new blocking": "because it is one argument; no lock, no collective",
    "With a reference model of its own nothing": "test_what_was_right_is_the_same_bit_for_bit",
}
WORKER = "rlhf_patches.patches.trl.proofs.kto_liger_reference_ranks"
#: Everything is in float64 but for one factor of Liger's; seen are 8e-8.
TOLERANCE = 1e-6
WRONG = ("PEFT", "PEFT, its own adapter as reference")
RIGHT = ("PEFT, without Liger", "a reference model")


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==1.8.0", "trl==1.12.0", "trl==1.13.0", "trl==1.7.1")
    held = RULE_COVERAGE


@pytest.fixture
def trained(run_ranks):
    def run(version):
        levels = trl_with_liger(unpacked.folders(f"trl=={version}"))
        (found,) = run_ranks(WORKER, levels=levels, ranks=1)
        assert (found["version"], found["status"]) == (version, "applied")
        return found

    return run


def is_repaired(found):
    for case in WRONG:
        for state in ("before", "reverted"):
            assert found[state][case]["factor"] < 0.2, "of its size"
        assert found["after"][case]["error"] < TOLERANCE


def test_the_reference_did_not_count_and_counts(trained):
    is_repaired(trained("1.12.0"))


def test_its_condition_holds_with_peft_and_liger(trained):
    reached = trained("1.12.0")["reached"]
    assert (reached["held"], reached["asked"]) == (len(WRONG), len(WRONG) + len(RIGHT))


def test_what_the_condition_says():
    from peft import PeftModel

    liger, adapted, config = Has(use_liger_kernel=True), object.__new__(PeftModel), Has()
    assert ignores_the_reference(Has(), None, liger, config) is True
    assert ignores_the_reference(adapted, None, liger, None) is True
    for arguments in (
        (Has(), None, liger, None),
        ("a path", None, liger, None),
        (Has(), Has(), liger, config),
        (adapted, None, Has(use_liger_kernel=False), None),
        (adapted, None, None, None),
    ):
        assert ignores_the_reference(*arguments) is False
    assert ignores_the_reference(adapted, None, Has(), config) is None


def test_what_was_right_is_the_same_bit_for_bit(trained):
    found = trained("1.12.0")
    for case in RIGHT:
        assert found["before"][case]["error"] < TOLERANCE
        assert found["after"][case] == found["before"][case] == found["reverted"][case]


@pytest.mark.exhaustive
# Not 1.8.0, whose loss looks for the model within DistributedDataParallel, which a rank has here.
@pytest.mark.parametrize("version", ["1.9.0", "1.10.0"])
def test_other_releases(trained, version):
    is_repaired(trained(version))
