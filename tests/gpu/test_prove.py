"""``prove --gpu`` on what is installed here, and conditions, which must not wait for the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_patches.definitions import registry
from rlhf_patches.definitions.status import Status
from rlhf_patches.offline import evaluate
from rlhf_patches.patches import plugin
from rlhf_patches.proving import children, lookup

STRICT = Path(__file__).with_name("rank_without_synchronization.py")
PROOFS = {
    patch.name: proof
    for patch in plugin.rlhf_patches()
    if (proof := lookup.proof_of(patch)) is not None and proof.proof.gpu
}
CONDITIONS = [patch.name for patch in plugin.rlhf_patches() if patch.name in PROOFS and patch.conditions]


@pytest.fixture(autouse=True)
def _applies(request):
    name = request.node.callspec.params["name"]
    report = evaluate.inspect([item for item in registry.load()[0] if item.patch.name == name])
    if report[name].status is not Status.APPLIES:
        pytest.skip(f"{name}: {report[name].why}")


@pytest.mark.parametrize("name", PROOFS)
def test_it_is_repaired_on_the_gpu(name):
    command = [sys.executable, "-m", "rlhf_patches", "prove", "--gpu", "--json", name]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert {(row["verdict"], row["on"]) for row in rows} == {("repaired", "gpu")}, rows


@pytest.mark.parametrize("name", CONDITIONS)
def test_its_condition_does_not_wait_for_the_gpu(name, monkeypatch):
    """Told within the framework's own calls: what synchronizes raises there (torch.cuda.set_sync_debug_mode)."""
    monkeypatch.setattr(children, "RANK", STRICT)
    children.run(PROOFS[name], gpu=True)
