"""nemo-rl-async-prefix-cache: by which weights a prompt was computed that is asked for after each weight update.

NeMo-RL is not on PyPI. ``NEMO_RL_CLONE`` names a clone of github.com/NVIDIA-NeMo/RL; without one these tests are
skipped, and what is left is the record of its tags (tests/record), by which the patch recognizes the functions.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.harness import look_alikes
from tests.harness.forkserver import PACKAGES, Level

RULE_COVERAGE = {
    "minimal scope": "test_the_rest_is_as_released",
    "no side effects": "because it calls what NeMo-RL calls there itself, and writes nothing",
    "backward compatible": ("test_the_rest_is_as_released", "test_a_reset_that_fails_stops_nothing"),
    "no new blocking": "because it is NeMo-RL's own call, within its own try, once no generation is running",
    "The following stay as released": "test_the_rest_is_as_released",
}
CLONE = os.environ.get("NEMO_RL_CLONE", "")
pytestmark = pytest.mark.skipif(not CLONE, reason="NEMO_RL_CLONE names no clone of NeMo-RL: its functions were NOT run")
UPDATES = 3
OLD, NEW = "nemo_rl/algorithms/async_utils.py", "nemo_rl/algorithms/async_utils/trajectory_collector.py"
TAGS = {"v0.4.0": ("0.4.0", OLD), "v0.5.0": ("0.5.0rc0", OLD), "v0.6.0": ("0.6.0", OLD), "v0.7.0": ("0.7.0", NEW)}


def start(run_ranks, folder, tag):
    version, file = TAGS.get(tag, ("0.6.0", NEW))
    shown = subprocess.run(
        ["git", "-C", CLONE, "show", f"{tag}:{file}"], capture_output=True, text=True, check=True
    ).stdout
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text(shown)
    look_alikes.write_metadata(folder, "nemo-rl", version)
    levels = (*PACKAGES, Level("tests.harness.loading:torch", str(folder)))
    (found,) = run_ranks("tests.patches.nemo_rl.async_prefix_cache_ranks", levels=levels, ranks=1)
    return found


@pytest.fixture(
    scope="module",
    params=["v0.4.0", "v0.7.0", *(pytest.param(tag, marks=pytest.mark.exhaustive) for tag in ("v0.5.0", "v0.6.0"))],
)
def report(request, run_ranks, tmp_path_factory):
    found = start(run_ranks, tmp_path_factory.mktemp("nemo-rl"), request.param)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", ["waits", "waits, with the flag"])
def test_a_prompt_is_computed_by_the_newest_weights(report, case):
    assert report["after"][case] == {"computed by": [0, 1, 2, 3], "resets": ["idle"] * UPDATES}
    for state in ("before", "reverted"):
        assert report[state][case] == {"computed by": [0, 0, 0, 0], "resets": []}


@pytest.mark.parametrize("case", ["in flight", "in flight, with the flag", "megatron"])
def test_the_rest_is_as_released(report, case):
    if case == "megatron" and report["version"] != "0.7.0":
        return  # has vLLM only
    assert report["before"][case] == report["after"][case] == report["reverted"][case]


def test_a_reset_that_fails_stops_nothing(report):
    """The worker asserts that generation goes on."""
    assert report["after"]["fails"] == report["before"]["fails"]


def test_what_ray_sends_needs_nothing_of_ours(report):
    """NeMo-RL's actors have environments of their own."""
    assert not report["after"]["what is sent names us"]


def test_main_is_left_alone(run_ranks, tmp_path):
    found = start(run_ranks, tmp_path, "HEAD")
    assert found["status"] == "refused"
    assert found["before"] == found["after"]
