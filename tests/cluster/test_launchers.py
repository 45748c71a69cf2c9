"""The same patch on every rank, started by torchrun, DeepSpeed, accelerate, and multiprocessing."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ranks, toy_slime
from tests.harness.launched_ranks import PATCH

SUPPORT = Path(ranks.__file__).parent
WORKER = SUPPORT / "launched_ranks.py"
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RLHF_PATCHES_VERIFY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SITE_HOOK = {"RLHF_PATCHES_AUTOLOAD": "1"}
exhaustive = pytest.mark.exhaustive


def command(launcher: str) -> list[str]:
    """The launcher's command for two processes on this machine, up to the script."""
    port = str(ranks.free_port())
    return {
        "torch": ["torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
        + ["--master-port", port],
        "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_addr", "127.0.0.1"]
        + ["--master_port", port],
        "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        + ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port],
    }[launcher]


def launch(installed: Any, launcher: str, out: Path, *arguments: str, **settings: str) -> list[dict[str, Any]]:
    """What each rank writes."""
    worker = [str(WORKER), "--out", str(out), "--library", launcher, *arguments]
    done = installed.run(installed.python, "-m", *command(launcher), *worker, cwd=out, **ENVIRONMENT, **settings)
    files = sorted(out.glob("rank*.json"))
    assert len(files) == 2, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("launcher", "framework", "way"),
    [
        ("torch", "trl", "site hook"),
        pytest.param("deepspeed", "deepspeed", "site hook", marks=exhaustive),
        pytest.param("accelerate", "trl", "site hook", marks=exhaustive),
        *(pytest.param(name, "trl", "apply()", marks=exhaustive) for name in ("torch", "deepspeed", "accelerate")),
    ],
)
def test_every_rank_is_patched(installed, tmp_path, launcher, framework, way):
    arguments, settings = ((), SITE_HOOK) if way == "site hook" else (("--apply",), {})
    reports = launch(installed, launcher, tmp_path, "--look-at", framework, *arguments, **settings)
    assert [(report["rank"], report["world"]) for report in reports] == [("0", "2"), ("1", "2")]
    assert len({report["pid"] for report in reports}) == 2
    for report in reports:
        assert report["error"] is None
        assert report["status"] == "applied"
        assert report["version"] == importlib.metadata.version(framework)
        assert report["ours"]


@exhaustive  # without a launcher, and with torchrun: test_verify.py
@pytest.mark.parametrize("launcher", ["torch", "deepspeed", "accelerate"])
def test_a_difference_gets_out_of_each_library(installed, tmp_path, launcher):
    """RLHF_PATCHES_VERIFY raises within the library's own initialization; nobody may swallow that."""
    reports = launch(installed, launcher, tmp_path, "--disable-on", "1", **SITE_HOOK)
    (error,) = {report["error"] for report in reports}
    lines = error.splitlines()
    assert lines[:2] == ["VerifyError: the 2 ranks of this process group have different patches.", f"{PATCH}:"]
    assert lines[2].endswith(f"): pending (trl {importlib.metadata.version('trl')})")
    assert lines[3].endswith("): disabled (disabled by RLHF_PATCHES_DISABLE)")


@pytest.mark.parametrize(
    "settings",
    [SITE_HOOK, *(pytest.param({"APPLY": where}, marks=exhaustive) for where in ("top", "main"))],
    ids=["site hook", "apply()", "apply(children=True)"],
)
def test_children_of_a_process(installed, tmp_path, settings):
    """multiprocessing by spawn and fork, before and after the import, and DataLoader's workers."""
    script = str(SUPPORT / "launched_children.py")
    done = installed.run(installed.python, script, cwd=tmp_path, **ENVIRONMENT, **settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"parent", "fork before", "fork after", "spawn", "DataLoader fork", "DataLoader spawn"}
    assert len({report["pid"] for report in found.values()}) == len(found)
    for kind, report in found.items():
        assert (report["status"], report["ours"]) == ("applied", True), kind


def test_spawn_does_not_inherit_an_apply_under_the_main_guard(installed, tmp_path):
    """Why the site hook exists, and that the report of such a child does not claim anything."""
    toy_slime.write(tmp_path)
    (tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "def job():\n"
        f"    import rlhf_patches; {toy_slime.LOOK}; print(rlhf_patches.report()[{toy_slime.PATCH!r}].status.value)\n"
        "if __name__ == '__main__':\n"
        "    import rlhf_patches; rlhf_patches.apply()\n"
        "    child = multiprocessing.get_context('spawn').Process(target=job); child.start(); child.join()\n"
    )
    for settings, expected in (({}, ["untouched", "inactive"]), (SITE_HOOK, ["applied", "applied"])):
        done = installed.run(installed.python, "script.py", cwd=tmp_path, **ENVIRONMENT, **settings)
        assert done.stdout.split() == expected, done.stderr


@exhaustive
@pytest.mark.parametrize(
    "imports", ["from trl import GRPOConfig, GRPOTrainer", "from peft import LoraConfig\nfrom trl import GRPOTrainer"]
)
def test_a_start_says_nothing_of_what_is_merely_there(installed, tmp_path, imports):
    """But of DeepSpeed's bug that nothing repairs, where DeepSpeed is imported."""
    (tmp_path / "train.py").write_text(f"{imports}\n")
    settings = {**ENVIRONMENT, **SITE_HOOK, "RLHF_PATCHES_VERIFY": "0"}
    done = installed.run(installed.python, "train.py", cwd=tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "rlhf_patches" in line]
    assert all(" has a known bug without a repair" in line for line in said)
    assert len(said) <= 1
