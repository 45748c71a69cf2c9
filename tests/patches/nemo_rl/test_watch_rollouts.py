"""``nemo-rl-watch-rollouts``: NeMo-RL's own functions, on rollouts of the policy that is trained, and of another.

NeMo-RL is not on PyPI. ``NEMO_RL_CLONE`` names a clone of github.com/NVIDIA-NeMo/RL; without one its functions are not
run, and what is left is the contract and the record of its tags.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from rlhf_patches.patches.nemo_rl.watch_rollouts import WATCH
from rlhf_patches.testing import PatchContract
from tests.harness import look_alikes
from tests.harness.forkserver import PACKAGES, Level
from tests.patches.nemo_rl.watch_rollouts_cases import CASES

RULE_COVERAGE = {
    "minimal scope": "test_nothing_is_said_of_a_right_run",
    "no side effects": "test_results_are_the_same",
    "backward compatible": ("test_results_are_the_same", "test_nothing_is_said_of_a_right_run"),
    "no new blocking": "because it reads tensors that are in the host's memory, and asks where they are first",
}
CLONE = os.environ.get("NEMO_RL_CLONE", "")
FILES = ("nemo_rl/algorithms/grpo.py", "nemo_rl/utils/logger.py")
WRONG = ("lost weights", "sequences masked")
RIGHT = [name for name, case in CASES.items() if name not in WRONG and case.get("watched", True)]


class TestContract(PatchContract):
    patch = WATCH
    open_range = "it looks at whatever takes the same arguments, and says nothing where it finds something else"
    held = RULE_COVERAGE


@pytest.fixture(
    scope="module",
    params=[
        ("v0.7.0", "0.7.0"),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (("v0.6.0", "0.6.0"), ("HEAD", "0.6.0"))),
    ],
    ids=lambda each: each[0],
)
def report(request, run_ranks, tmp_path_factory):
    if not CLONE:
        pytest.skip("NEMO_RL_CLONE names no clone of NeMo-RL: its functions were NOT run")
    tag, version = request.param
    folder = tmp_path_factory.mktemp("nemo-rl")
    for file in FILES:
        shown = subprocess.run(
            ["git", "-C", CLONE, "show", f"{tag}:{file}"], capture_output=True, text=True, check=True
        )
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(shown.stdout)
    look_alikes.write_metadata(folder, "nemo-rl", version)
    levels = (*PACKAGES, Level("tests.harness.loading:torch", str(folder)))
    (found,) = run_ranks("tests.patches.nemo_rl.watch_rollouts_ranks", levels=levels, ranks=1)
    return found


@pytest.mark.parametrize("case", WRONG)
def test_it_says_once_what_is_wrong(report, case):
    """By the tokens that were sampled, before sequences are taken out."""
    assert report[case]["status"] == "applied", report[case]["reason"]
    (line,) = report[case]["said"]
    second = report[case]["differences"][1]
    assert line.startswith(f"nemo-rl-watch-rollouts: trainer and engine differ by {second:.3g} nats per sampled token ")
    assert "at step 2 (limit 0.1)" in line
    worst = max(report[case]["differences"])
    found = report[case]["observed"]["log-probabilities"]
    assert (found["worst"], found["at"], found["values"]) == (pytest.approx(worst), "step 3", 3)
    assert found["warning"]


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_said_of_a_right_run(report, case):
    assert report[case]["status"] == "applied", report[case]["reason"]
    assert report[case]["said"] == []
    seen = {"right", "limit set"}
    assert bool(report[case]["observed"]) is (case in seen)


def test_results_are_the_same(report):
    """To the bit."""
    assert report["right"]["kept"] == report["not watched"]["kept"]
    assert report["lost weights"]["kept"] == report["lost, not watched"]["kept"]
    assert report["not watched"]["status"] != "applied"
