"""vLLM's own processes: the patches are in them, and the report names each by what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import vllm_on_cpu

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from pathlib import Path
from tests.harness import vllm_on_cpu

if __name__ == "__main__":
    import vllm
    model = vllm_on_cpu.checkpoint(Path(sys.argv[1]))
    engine = vllm.LLM(model, max_model_len=64, enforce_eager=True, gpu_memory_utilization=0.1)
    wanted = vllm.SamplingParams(max_tokens=4, ignore_eos=True)
    (found,) = engine.generate([{"prompt_token_ids": [4, 5]}], wanted, use_tqdm=False)
    print(len(found.outputs[0].token_ids))
"""


@pytest.mark.exhaustive
def test_they_are_patched_and_named(tmp_path):
    """vLLM's plugin group loads us in each; there is no .pth in an editable install."""
    (tmp_path / "train.py").write_text(SCRIPT)
    report = tmp_path / "run.jsonl"
    environment = {
        **os.environ,
        **vllm_on_cpu.SETTINGS,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": str(ROOT),
        "RANK": "0",
        "RLHF_PATCHES_AUTOLOAD": "1",
        "RLHF_PATCHES_REPORT": str(report),
    }
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "model")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["4"], done.stderr[-3000:]
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert sorted(str(line["name"]) for line in lines) == ["None", "VLLM::EngineCore", "VLLM::Worker"]
    for line in lines:
        assert (line["rank"], line["versions"]["vllm"]) == ("0", "0.32.0")
        states = {row["name"]: row["status"] for row in line["patches"]}
        assert states["torch-stale-build-lock"] == "applied"
