"""nemo-rl-logprob-backward on NeMo-RL's real functions, two tensor-parallel ranks: before, after, and after a revert.

NeMo-RL is not on PyPI. ``NEMO_RL_CLONE`` names a clone of github.com/NVIDIA-NeMo/RL; without one these tests are
skipped, and what is left is the record of its tags (tests/record), by which the patch recognizes the functions.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.harness import look_alikes
from tests.harness.forkserver import MEGATRON, TORCH, Level

RULE_COVERAGE = {
    "minimal scope": "test_what_computes_in_the_dtype_of_the_logits_is_left_alone",
    "no side effects": "test_numbers_memory_and_collectives",
    "backward compatible": "test_within_torch_compile",
    "no new blocking": "because every rank makes one all-reduce of maxima and one of sums; no lock is held",
    "The patch does not change": "test_what_computes_in_the_dtype_of_the_logits_is_left_alone",
}

CLONE = os.environ.get("NEMO_RL_CLONE", "")
pytestmark = pytest.mark.skipif(not CLONE, reason="NEMO_RL_CLONE names no clone of NeMo-RL: its functions were NOT run")
FILES = ("nemo_rl/distributed/model_utils.py", "nemo_rl/algorithms/logits_sampling_utils.py")
TAGS = {"v0.3.1": "0.3.1", "v0.4.0": "0.4.0", "v0.6.0": "0.6.0", "v0.7.0": "0.7.0", "HEAD": "0.6.0"}


def checked_out(tag, folder):
    """The folder, with NeMo-RL's own files of that tag."""
    for file in FILES:
        shown = subprocess.run(["git", "-C", CLONE, "show", f"{tag}:{file}"], capture_output=True, text=True)
        if shown.returncode == 0:  # older tags have the first one only
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(shown.stdout)
    assert (folder / FILES[0]).exists(), f"{CLONE} has no {tag}"
    look_alikes.write_metadata(folder, "nemo-rl", TAGS[tag])
    return folder


def levels(folder):
    return (*MEGATRON, Level("tests.harness.loading:torch", str(folder)))


@pytest.fixture(scope="session")
def reports(run_ranks, tmp_path_factory):
    """Each rank's report on a tag."""
    done = {}

    def run(tag):
        if tag not in done:
            folder = checked_out(tag, tmp_path_factory.mktemp("nemo-rl"))
            worker = "tests.patches.nemo_rl.logprob_backward_ranks"
            done[tag] = run_ranks(worker, levels=levels(folder), TORCHDYNAMO_DISABLE="1")
        return done[tag]

    return run


@pytest.mark.parametrize("tag", ["v0.4.0", "v0.6.0", "v0.7.0", "HEAD"])
def test_numbers_memory_and_collectives(reports, tag):
    for report in reports(tag):
        assert report["row"]["status"] == "applied"
        found = report["functions"]
        assert {"chunked", "whole", "class-unknown", "chunked-class-unknown", "held"} <= set(found["after"])
        for name, after in found["after"].items():
            before = found["before"][name]
            last_place = 2**-8 if name.endswith("bfloat16") else 2**-23
            assert after["same_log_probs"], name
            assert after["collectives"] == [2, 0], name
            assert before["collectives"][0] >= 3
            if name == "inference":
                assert after["observed"] == {}
                continue
            assert after["failed"] is None
            assert after["error_of_gradient"] <= max(before["error_of_gradient"], last_place), name
            assert after["distance_of_gradient"] <= 4 * last_place, name
            assert ("backward in place" in after["observed"]) == (name != "held"), name
        assert found["after"]["chunked"]["extra_memory"][1] < 0.2 < 0.9 < found["before"]["chunked"]["extra_memory"][1]
        assert found["after"]["held"]["held_unchanged"]
        for name, reverted in found["reverted"].items():
            assert reverted["collectives"] == found["before"][name]["collectives"]


@pytest.mark.parametrize("tag", ["v0.4.0", "v0.7.0"])
def test_within_torch_compile(run_ranks, tmp_path, tag):
    """NeMo-RL calls the autograd functions themselves."""
    worker = "tests.harness.compiled_regions_ranks"
    # Not on top of megatron-core, whose import leaves Dynamo unable to trace an all_reduce.
    compiled = (*TORCH, Level("tests.harness.loading:torch", str(checked_out(tag, tmp_path))))
    (found,) = run_ranks(worker, "nemo-rl", levels=compiled, ranks=1)
    assert found["cases"] == ["chunked: ok", "whole: ok"]
    # v0.7.0 cannot be traced as a whole in such a process, with or without the patch.
    outcome = "ok" if tag == "v0.4.0" else found["whole graph"]["whole"][0]
    assert found["whole graph"] == {"chunked": [outcome] * 2, "whole": [outcome] * 2}


def test_what_computes_in_the_dtype_of_the_logits_is_left_alone(reports):
    """v0.3.1 has one function of this name, with other numbers."""
    for report in reports("v0.3.1"):
        assert report["row"]["status"] == "unaffected"
        for state in ("before", "after"):
            assert report["functions"][state]["class-bfloat16"]["log_probs_dtype"] == "torch.bfloat16"
            assert report["functions"][state]["class-bfloat16"]["collectives"] == [3, 0]
