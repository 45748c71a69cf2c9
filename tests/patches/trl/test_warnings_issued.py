"""``trl-warnings-issued``: trainers of older TRL can be made beside transformers 5.1 and later.

What is trained with it, and the numbers, are in test_optional_packages.py: neither patch is of use without the other.
"""

from __future__ import annotations

from rlhf_patches.patches.trl.warnings_issued import PATCH
from rlhf_patches.testing import PatchContract

RULE_COVERAGE = {
    "minimal scope": "test_optional_packages.py::test_beside_transformers_4_nothing_is_changed",
    "no side effects": "test_optional_packages.py::test_nothing_is_given_to_the_model",
    "backward compatible": "test_a_model_that_has_the_dictionary_is_told_as_before",
    "no new blocking": "because it sets one item of a dictionary; no lock, no collective",
}


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.21.0", "trl==0.27.1", "trl==0.27.2")
    held = RULE_COVERAGE


class Model:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def test_a_model_that_has_the_dictionary_is_told_as_before():
    for variant in PATCH.variants:
        for change in variant.changes:
            model = Model(warnings_issued={})
            exec(change.replacement, {"model": model})
            assert model.warnings_issued == {"estimate_tokens": True}
            without = Model()
            exec(change.replacement, {"model": without})
            assert vars(without) == {}
