"""``trl-optional-packages`` and ``trl-warnings-issued``: older TRL trains beside transformers 5 as beside 4.

old_trl_ranks.py imports, makes and trains real trainers of each release beside both, with neither patch, with one, with
both, and with both taken off.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from rlhf_patches.patches.trl.optional_packages import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import TORCH, Level

RULE_COVERAGE = {
    "minimal scope": "test_beside_transformers_4_nothing_is_changed",
    "no side effects": "test_nothing_is_given_to_the_model",
    "backward compatible": ("test_what_is_no_tuple_is_passed_on", "test_beside_transformers_4_nothing_is_changed"),
    "no new blocking": "because it looks at one value; no lock, no collective",
    "any other answer as before": "test_what_is_no_tuple_is_passed_on",
    "transformers is left as it is": "test_transformers_is_left_as_it_is",
}
WORKER = "tests.patches.trl.old_trl_ranks"
#: Sums of some hundred float64 numbers; seen are 0 and 4e-19.
TOLERANCE = 1e-12
NO_PACKAGE = "No module named 'vllm'"
ALL = ("GRPO", "DPO", "SFT", "Reward")
#: By the release of TRL the trainers that both patches are enough for: not DPO before 0.23, which imports a name that
#: transformers 5 does not have, and not GRPO before 0.17, whose sampler takes no data set (transformers from 4.52 on).
RELEASES = {"0.17.0": ("GRPO", "SFT", "Reward"), "0.25.1": ALL, "0.27.1": ALL}


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.21.0", "trl==0.28.0", "trl==0.29.0")
    held = RULE_COVERAGE


@pytest.fixture
def ran(run_ranks):
    """The worker's report on a release of TRL, beside the environment's transformers or an older one."""

    def run(version: str, *cases: str, older: bool = False) -> dict[str, Any]:
        paths = [unpacked.folders(f"trl=={version}")]
        paths += [str(side_by_side.folder("transformers-4.57"))] if older else []
        levels = (*TORCH, Level("tests.harness.loading:transformers_alone", ":".join(paths)))
        (found,) = run_ranks(WORKER, *cases, levels=levels, ranks=1)
        assert found["trl"] == version
        assert found["transformers"].startswith("4.57" if older else "5.")
        return found

    return run


def is_repaired(found, reference, cases):
    """Wrong before, each patch for its part, and the numbers are those beside the older transformers."""
    for state in ("before", "reverted"):
        assert found[state]["asked"]["mergekit"] == [False, None]
    assert found["before"]["GRPO"] != "made"
    assert "No module named" in found["before"]["GRPO"]
    assert found["trl-optional-packages"]["asked"] == dict.fromkeys(found["before"]["asked"], False)
    assert "'Qwen2ForCausalLM' object has no attribute 'warnings_issued'" in found["trl-optional-packages"]["GRPO"]
    assert found["trl-warnings-issued"]["GRPO"] == "made"
    assert found["trl-warnings-issued"]["Reward"] == "made"
    assert found["reverted"]["GRPO"] == found["trl-optional-packages"]["GRPO"]
    is_the_same(found, reference, cases)


def is_the_same(found, reference, cases):
    for case in cases:
        one, other = found["trained"][case], reference["trained"][case]
        if case == "SFT":
            # transformers 4 divides by the first token of each sequence too, which nothing predicts.
            assert one["norms"][0] == pytest.approx(one["by the formula"], rel=1e-6)
            assert other["norms"][0] < 0.9 * other["by the formula"]
            continue
        assert len(one["norms"]) == 2
        assert one["norms"] == pytest.approx(other["norms"], rel=TOLERANCE)
        for name, sums in other["weights"].items():
            assert one["weights"][name] == pytest.approx(sums, rel=TOLERANCE, abs=TOLERANCE), name


def test_it_could_not_be_imported_and_trains_as_beside_transformers_4(ran):
    cases = ("GRPO", "SFT", "Reward")
    found = ran("0.21.0", *cases)
    is_repaired(found, ran("0.21.0", *cases, older=True), cases)
    assert NO_PACKAGE in found["before"]["GRPO"]
    assert found["before"]["Reward"] == found["trl-optional-packages"]["Reward"]
    assert "warnings_issued" in found["before"]["Reward"]


def test_transformers_is_left_as_it_is(ran):
    found = ran("0.21.0", "GRPO", "SFT", "Reward")
    for state in ("before", "trl-optional-packages", "trl-warnings-issued", "reverted"):
        assert found[state]["transformers"] == [False, None]


def test_nothing_is_given_to_the_model(ran):
    for case in ran("0.21.0", "GRPO", "SFT", "Reward")["trained"].values():
        assert not case["has the dictionary"]


def test_beside_transformers_4_nothing_is_changed(ran):
    found = ran("0.21.0", "GRPO", "SFT", "Reward", older=True)
    for name in ("trl-optional-packages", "trl-warnings-issued"):
        assert found["reasons"][name].startswith("unaffected: trl 0.21.0 is not affected with transformers 4.57.6")
        assert found[name] == found["before"]
    assert found["before"] == found["reverted"]
    assert found["before"]["GRPO"] == found["before"]["Reward"] == "made"
    assert found["trained"]["GRPO"]["has the dictionary"], "as transformers 4 has it"


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", RELEASES)
def test_other_releases(ran, version):
    cases = RELEASES[version]
    is_repaired(ran(version, *cases), ran(version, *cases, older=True), cases)


@pytest.mark.exhaustive
def test_a_release_whose_sampler_takes_no_data_set_trains_what_does_not_need_it(ran):
    cases = ("SFT", "Reward")
    found, reference = ran("0.15.2", *cases), ran("0.15.2", *cases, older=True)
    assert found["trl-warnings-issued"]["GRPO"] == "made"
    is_the_same(found, reference, cases)


def test_what_is_no_tuple_is_passed_on(apply_rewritten):
    """Whatever an older, or a newer, transformers answers."""
    for answer in (True, False, None, "0.1"):
        assert apply_rewritten(answer) == (answer, answer)
    assert apply_rewritten((False, None)) == (False, False)
    assert apply_rewritten((True, "0.1")) == (True, True)


@pytest.fixture
def apply_rewritten():
    """What both shapes of a function give after the patch, for an answer of transformers'."""

    def asked(answer: object) -> tuple[object, object]:
        kept, called = (PATCH.variants[number].changes[0] for number in (0, -1))
        space = {"_deepspeed_available": answer, "_is_package_available": lambda name: answer}
        given = []
        for change in (kept, called):
            exec(f"def asked():\n    {change.replacement}", space)
            given.append(space["asked"]())
        return given[0], given[1]

    return asked


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("version", "answer", "dictionary"),
    [
        ("4.57.6", False, True),
        ("5.0.0", False, True),
        ("5.1.0", False, False),
        ("5.2.0", False, False),
        ("5.3.0", (False, None), False),
    ],
)
def test_the_ranges_of_transformers(version, answer, dictionary):
    """The first releases with a tuple, and without the dictionary, by their own code."""
    import importlib.metadata
    import importlib.util
    import logging

    folder = Path(unpacked.folders(f"transformers=={version}")) / "transformers"
    text = (folder / "utils" / "import_utils.py").read_text()
    (node,) = [each for each in ast.parse(text).body if getattr(each, "name", "") == "_is_package_available"]
    space = {"importlib": importlib, "logger": logging.getLogger(), "PACKAGE_DISTRIBUTION_MAPPING": {}}
    exec("from __future__ import annotations\n" + ast.unparse(node), space)
    assert space["_is_package_available"]("no_such_package_anywhere") == answer
    assert ("self.warnings_issued = {}" in (folder / "modeling_utils.py").read_text()) == dictionary
