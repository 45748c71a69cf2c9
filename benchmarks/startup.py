"""What the package adds to the start of an interpreter: ``python benchmarks/startup.py``.

Two virtual environments with the same path, one without and one with the wheel. Each round starts one
interpreter of every kind, in turn, so that drifts of the machine hit all alike; the figure is the median over
the rounds of the difference to the bare one in the same round, in CPU time. Torch's import is measured as a yardstick.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.harness.installed import Installed, build_wheel

APPLY = "import rlhf_patches; rlhf_patches.apply()"
AFTER_TORCH = f"import time, torch; start = time.process_time(); {APPLY}; print(time.process_time() - start)"
# Torch has all of these.
STANDS_ON = "import dataclasses, typing, fnmatch, pkgutil, threading"
GOALS = {"hook installed, off": 0.5, "hook on, no framework": 3.0, "apply(), all patches": 80.0}


def milliseconds(command: list[str], environment: dict[str, str], repeats: int) -> float:
    # Not in the repository: there `import rlhf_patches` would find the source tree instead of the wheel.
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(repeats):
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, cwd=tempfile.gettempdir())
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime) * 1000 / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--starts", type=int, default=4, help="interpreters of a kind in each round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bare = Installed.create(Path(folder, "bare"))
        ours = Installed.create(Path(folder, "ours"), build_wheel(Path(folder, "wheel")))
        kinds = {
            "bare": (bare, "pass", {}),
            "hook installed, off": (ours, "pass", {}),
            "hook on, no framework": (ours, "pass", {"RLHF_PATCHES_AUTOLOAD": "1"}),
            "apply(), all patches": (ours, APPLY, {}),
            "imports it stands on": (bare, STANDS_ON, {}),
        }
        if not subprocess.run([bare.python, "-c", "import torch"], capture_output=True).returncode:
            kinds["import torch (yardstick)"] = (bare, "import torch", {})
        runs = {
            name: ([where.python, "-c", code], where.environment(settings))
            for name, (where, code, settings) in kinds.items()
        }
        for command, environment in runs.values():  # bytecode is compiled, and files are in the page cache
            milliseconds(command, environment, 2)
        times: dict[str, list[float]] = {name: [] for name in runs}
        after_torch: list[float] = []
        for number in range(options.rounds):
            print(f"\rround {number + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
            for name, (command, environment) in runs.items():
                repeats = 1 if name.startswith(("apply", "import")) else options.starts
                times[name].append(milliseconds(command, environment, repeats))
            if "import torch (yardstick)" in runs:
                # Not as a difference: torch's own import varies by more than this.
                said = subprocess.run(
                    [ours.python, "-c", AFTER_TORCH], env=ours.environment({}), check=True, capture_output=True, cwd="/"
                )
                after_torch.append(float(said.stdout.split()[-1]) * 1000)
        print(file=sys.stderr)
    bare_times = times.pop("bare")
    print(f"bare interpreter: median {statistics.median(bare_times):.1f} ms; {options.rounds} rounds")
    yardstick = None
    rows = {}
    for name, measured in times.items():
        rows[name] = statistics.median(time - base for time, base in zip(measured, bare_times, strict=True))
        if name.startswith("import torch"):
            yardstick = rows[name]
    for name, added in rows.items():
        goal = f"goal: at most {GOALS[name]} ms" if name in GOALS else ""
        share = f"{added / yardstick:6.1%} of importing torch" if yardstick else ""
        print(f"{name:26} +{added:8.2f} ms  {share:28} {goal}")
    if after_torch:
        print(f"{'apply(), after torch':26} +{statistics.median(after_torch):8.2f} ms  by the process's own clock")


if __name__ == "__main__":
    main()
