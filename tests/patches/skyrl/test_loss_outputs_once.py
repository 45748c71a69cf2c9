"""SkyRL's loss outputs: each sample once, on its real `WorkerDispatch`; before, after, and after a revert.

loss_outputs_once_ranks.py runs it with a real group of Ray actors, and for many meshes with plain objects.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import PACKAGES, Level
from tests.harness.look_alikes import doctor_row
from tests.harness.side_by_side import folder

NAME = "skyrl-loss-outputs-once"
MODULE = "skyrl/backends/skyrl_train/workers/worker_dispatch.py"
PER_RANK = 3
RULE_COVERAGE = {
    "minimal scope": "test_every_mesh",  # data parallelism alone included, where it takes all statuses in their order
    "no side effects": "because it reads ranks, and chooses among the statuses that the driver has got",
    "backward compatible": ("test_every_mesh", "test_a_mesh_of_which_nobody_collects_is_left_as_released"),
    "no new blocking": "because it runs in the driver, after all actors have answered",
    "as before": "test_a_group_of_ray_actors",
    "The patch does not change": "test_a_group_of_ray_actors",
    "as released, with a warning": "test_a_mesh_of_which_nobody_collects_is_left_as_released",
    "Only the actor that SkyRL collects from": "test_every_mesh",
}


@pytest.fixture(scope="session")
def run(run_ranks):
    """What the worker reports of a release."""

    def of_release(release, part, **settings):
        levels = (*PACKAGES, Level("tests.harness.loading:skyrl_dispatch", str(folder(f"skyrl-{release}"))))
        (found,) = run_ranks("tests.patches.skyrl.loss_outputs_once_ranks", part, levels=levels, ranks=1, **settings)
        return found

    return of_release


@pytest.fixture(scope="module")
def report(run):
    return run("0.2", "all")


def each_once(dp):
    return list(range(PER_RANK * dp))


def test_a_group_of_ray_actors(report):
    """Two data-parallel ranks of two tensor-parallel ones, in four processes."""
    found = report["ray"]
    assert found["processes"] == 4
    assert found["before"]["samples"] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert found["after"]["samples"] == found["after"]["losses"] == each_once(2)
    assert found["after"]["metrics"] == found["before"]["metrics"] == {"policy_loss": 0.25, "of_rank": 0}
    assert found["reverted"] == found["before"]
    assert found["staged"] == [0, 1, 2], "of one data-parallel rank, as the patch's page says"


def test_every_mesh(report):
    """Data, sequence or context, tensor and pipeline parallelism; Megatron's order of ranks, FSDP's, and none."""
    assert len(report["after"]) == 3 * 2 * 2 * 2 * 3
    wrong = set()
    for name, after in report["after"].items():
        dp, sp, tp, pp, order = name.split("-")
        samples = each_once(int(dp))
        assert after["samples"] == after["losses"] == samples, name
        before = report["before"][name]
        assert after["metrics"] == before["metrics"]
        assert len(before["samples"]) == len(samples) * int(sp) * int(tp) * int(pp)
        if before["samples"][: len(samples)] != samples:
            wrong.add((dp, sp, tp, pp, order))
    assert ("2", "1", "2", "1", "tsdp") in wrong, "what is looked up by position is another sample's"
    assert ("2", "2", "1", "1", "tsdp") in wrong
    assert ("2", "1", "1", "2", "tsdp") not in wrong, "there are too many, and the first ones are right"
    assert report["reverted"] == report["before"]


def test_a_client_of_the_tinker_api_gets_its_own_samples(report):
    """Five samples, which SkyRL pads to six: the first three are one client's, the others another's."""
    assert report["tinker_before"]["dp 2, tp 2"] == {"first": [0, 1, 2], "second": [0, 1]}
    for name in ("dp 2, tp 2", "dp 2, pp 2", "dp 2"):
        assert report["tinker_after"][name] == {"first": [0, 1, 2], "second": [3, 4]}, name


def test_the_same_as_0_3(report, run):
    """Its `WorkerOutput.cat`; it takes the metrics, which are the same on all ranks, from another one."""
    theirs = run("0.3", "meshes")
    assert theirs["report"][0]["status"] == "unaffected"
    for name, found in theirs["before"].items():
        assert (found["samples"], found["losses"]) == (
            report["after"][name]["samples"],
            report["after"][name]["losses"],
        )
        assert found["metrics"]["policy_loss"] == report["after"][name]["metrics"]["policy_loss"]
    assert theirs["after"] == theirs["before"]


def test_0_1_0(report, run):
    found = run("0.1", "meshes")
    assert found["report"][0]["status"] == "applied"
    assert (found["before"], found["after"]) == (report["before"], report["after"])


def test_a_mesh_of_which_nobody_collects_is_left_as_released(report):
    """Rather than outputs that are missing, or an error where there was none."""
    found = report["without_a_collecting_rank"]
    assert found["after"] == found["again"] == found["before"]
    (said,) = found["said"]
    assert "have data-parallel ranks [], expected each of [0, 1] once" in said
    assert "MeshRank(dp=1, sp=0, tp=1, pp=0" in said


@pytest.mark.exhaustive
def test_disabled_it_stays_away(report, run):
    found = run("0.2", "meshes", RLHF_PATCHES_DISABLE=NAME)
    assert found["report"][0]["status"] == "disabled"
    assert found["after"] == found["before"] == report["before"]


def filtered(text):
    """As somebody might have repaired it."""
    old = '                all_loss_fn_outputs.extend(status.pop("loss_fn_outputs", []))'
    assert text.count(old) == 1
    return text.replace("for status in statuses:", "for info, status in zip(infos, statuses):").replace(
        old, f"                if info.rank.is_collection_dp_rank():\n    {old}"
    )


def filtered_within(text):
    """With the loop as it was."""
    old = '                all_loss_fn_outputs.extend(status.pop("loss_fn_outputs", []))'
    assert text.count(old) == 1
    return text.replace(old, f"                if infos[status].rank.is_collection_dp_rank():\n    {old}")


def other_statuses(text):
    assert text.count('"mesh", "forward_backward", data, **kwargs)') == 1
    return text.replace('"mesh", "forward_backward", data, **kwargs)', '"primary", "forward_backward", data, **kwargs)')


@pytest.mark.parametrize("edit", [filtered, filtered_within, other_statuses])
@pytest.mark.parametrize(("version", "status"), [("0.2.0", "refused"), ("unknown", "unaffected")])
def test_look_alikes(tmp_path, version, edit, status):
    row = doctor_row(tmp_path, NAME, version=version, edit=edit, source=folder("skyrl-0.2") / MODULE)
    assert row["status"] == status
