"""`rehearse --against` by its command: a script on megatron-core under torchrun, in two layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import ranks

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("rehearsal_script.py")
LAYOUT = "gradient in another layout"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("against", "verdict"), [("TP=1", "holds"), ("TP=4", "not checked")])
def test_a_script_in_another_layout(installed, tmp_path, against, verdict):
    path = tmp_path / "path"  # the checkout without its rlhf_patches: the wheel's is used
    path.mkdir()
    for name in ("tests", "hunt"):
        (path / name).symlink_to(ROOT / name)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(ranks.free_port()))
    command = ("rehearse", "--against", against, "--json", "found.json", "--", "python", *torchrun)
    settings = {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = installed.run(installed.command, *command, str(SCRIPT), "TP, SP", cwd=tmp_path, **settings)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == (0 if verdict == "holds" else 2), done.stdout + done.stderr
    (row,) = [row for row in found["relations"] if row["relation"] == LAYOUT]
    assert row["verdict"] == verdict, row
    assert ("now in the other layout" in done.stdout) is (verdict == "holds")
    assert not [line for line in done.stdout.splitlines() if line.startswith("norm ")], "no step is made"
