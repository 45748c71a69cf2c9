"""What patching adds to the import of a framework: ``python benchmarks/import_cost.py [--trl-python PYTHON]``.

Each round starts two fresh interpreters per framework in turn, one without us and one in which `apply()` was called
before, and takes the CPU time of the import alone (`apply()` itself is in ``benchmarks/startup.py``). The machine's
noise on an import of seconds is more than what is looked for, so the patched interpreter also counts the CPU time
from the announcement of a watched module to the end of its patches' turn. Not in that count, only in the difference:
our finder, which every import asks, and which looks up one name in a dictionary. Nor is torch._dynamo in it where the
framework imports that as well: some implementations do so first, which moves its second and adds none. Medians over the
rounds.

Nothing is kept from one process to the next, so the figure is that of every process; but Python's bytecode of framework
and patches, which the first process of each framework writes before the rounds. `--searched` measures texts that are
not among those that come with the package, a nightly build's, say. A garbage collection that falls due within our hooks
is the framework's, which has made the objects: it falls due without us as well, and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOAL = 0.01
SETTINGS = {"PYTHONDONTWRITEBYTECODE": "", "CUDA_VISIBLE_DEVICES": "", "RLHF_PATCHES_LOG": "off"}
SKYRL = """
from warm_server import bind; bind("tests")
from tests.harness import skyrl_on_cpu; skyrl_on_cpu.install(); import torch; skyrl_on_cpu.model_utils()
"""
FRAMEWORKS = {
    "megatron-core": "import megatron.core.distributed.distributed_data_parallel",
    "trl": "from trl import SFTTrainer",
    "ms-swift": "import swift.rlhf_trainers.rlhf_mixin",
    "verl": "import verl.utils.megatron_utils",
    "skyrl model_utils": SKYRL,
}
APPLY = """
from rlhf_patches.engine.engine import engine
imported, spent, depth = engine._imported, [0.0], [0]
import gc
def collecting(phase, info):
    if depth[0]:  # the time of the end less that of the beginning
        spent[0] += time.process_time() if phase == "start" else -time.process_time()
gc.callbacks.append(collecting)
def counted(name, module):
    if DYNAMO:
        import torch._dynamo
    depth[0] += 1
    start = time.process_time()
    try:
        imported(name, module)
    finally:
        depth[0] -= 1
        if not depth[0]:
            spent[0] += time.process_time() - start
engine._imported = counted
import rlhf_patches
rlhf_patches.apply()
"""
SEARCHED = "from rlhf_patches.guards import known; known._read = lambda package: b''\n"
MEASURED = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
{apply}
start = time.process_time()
{code}
total = time.process_time() - start
report = rlhf_patches.report() if "rlhf_patches.api" in sys.modules else []
rows = [(row.name, row.status.value) for row in report]
applied = [name for name, status in rows if status == "applied"]
dynamo = "torch._dynamo.convert_frame" in sys.modules
print(json.dumps([total, spent[0] if rows else 0.0, applied, dynamo]))
"""


def imported(
    python: str, code: str, before: str, path: str, folder: str, dynamo: bool = False
) -> tuple[float, float, list[str], bool]:
    """CPU seconds of the import, those within our hooks, and the patches applied in it.

    And whether torch._dynamo was imported, which ``dynamo`` keeps out of the second.
    """
    before = f"DYNAMO = {dynamo}\n{before}" if before else ""
    done = subprocess.run(
        [python, "-W", "ignore", "-c", MEASURED.format(apply=before, code=code)],
        env={**os.environ, **SETTINGS, "PYTHONPATH": path},
        cwd=folder,  # not among thousands of other files: with -c it is on sys.path, where metadata are looked for
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{code} failed:\n{done.stderr[-2000:]}")
    return tuple(json.loads(done.stdout.splitlines()[-1]))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trl-python", default=str(ROOT / ".nox" / "environment-trl" / "bin" / "python"))
    parser.add_argument("--searched", action="store_true", help="as if no text were known")
    parser.add_argument("--only", nargs="*", choices=list(FRAMEWORKS), default=list(FRAMEWORKS))
    options = parser.parse_args()
    beside = Path(sys.executable).parents[1] / "side-by-side" / "skyrl-0.4"
    # Every folder on the path is one in which metadata are looked for: each framework gets its own alone.
    paths = {"skyrl model_utils": os.pathsep.join([str(ROOT / "tests" / "harness"), str(beside)])}
    before = SEARCHED + APPLY if options.searched else APPLY
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            python = options.trl_python if name == "trl" else sys.executable
            measure(name, python, options.rounds, paths.get(name, ""), folder, before)


def measure(name: str, python: str, rounds: int, path: str, folder: str, before: str) -> None:
    """Print the line of a framework."""
    plain, patched, within, applied = [], [], [], []
    for number in range(-1, rounds):
        print(f"\r{name}: round {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        alone = imported(python, FRAMEWORKS[name], "", path, folder)
        with_us = imported(python, FRAMEWORKS[name], before, path, folder, dynamo=alone[3])
        if number < 0:  # bytecode is compiled, and files are in the page cache
            applied = with_us[2]
            continue
        plain.append(alone[0])
        patched.append(with_us[0])
        within.append(with_us[1])
    print("\r", end="", file=sys.stderr)
    reference = statistics.median(plain)
    added = statistics.median(other - one for one, other in zip(plain, patched, strict=True))
    hooks = statistics.median(within)
    print(f"{name:18} {reference:6.2f} s; patched {added * 1000:+7.0f} ms ({added / reference:+6.1%}); ", end="")
    print(f"within our hooks {hooks * 1000:6.1f} ms ({hooks / reference:5.2%}), goal: at most {GOAL:.0%}; ", end="")
    print(f"applied: {', '.join(applied)}")


if __name__ == "__main__":
    main()
