"""What patching adds to the import of a framework: ``python benchmarks/import_cost.py [--trl-python PYTHON]``.

Each round starts two fresh interpreters per framework in turn, one without us and one in which `apply()` was called
before, and takes the CPU time of the import alone (`apply()` itself is in ``benchmarks/startup.py``). The machine's
noise on an import of seconds is more than what is looked for, so the patched interpreter also counts the CPU time
from the announcement of a watched module to the end of its patches' turn. Not in that count, only in the difference:
our finder, which every import asks, and which looks up one name in a dictionary. Medians over the rounds.

The least that today's checks cost is measured beside it, in the same interpreters: of each patched module one parse,
and one compilation, which shows that the code in memory is the text's; where it is rewritten, ast-grep's parse and a
second compilation, which shows that nothing else changes. Where that alone is more than the goal, the goal cannot be
met without giving up one of them (docs/architecture.md, "Changing a function").
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
SKYRL = """
from warm_server import bind_tests; bind_tests()
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
def counted(name, module):
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
LEAST = """
import ast
from rlhf_patches import Rewrite
def least():
    import ast_grep_py
    from rlhf_patches.engine.engine import engine
    modules = {}
    for patch, _, texts in engine.carried():
        variants = patch.variants if texts else ()  # what is not applied may be listed only
        changes = [change for variant in variants for change in variant.changes]
        for module, text in texts.items():
            own = [change for change in changes if change.target.startswith(module + ":")]
            _, rewritten = modules.get(module, (text, False))
            modules[module] = text, rewritten or any(isinstance(change, Rewrite) for change in own)
    start = time.process_time()
    for text, rewritten in modules.values():
        tree = ast.parse(text)
        compile(text, "", "exec", dont_inherit=True)
        if rewritten:
            compile(text, "", "exec", dont_inherit=True)
            ast_grep_py.SgRoot(text, "python").root().find_all(kind="function_definition")
    return time.process_time() - start
"""
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
print(json.dumps([total, spent[0] if rows else 0.0, least() if rows else 0.0, applied]))
"""


def imported(python: str, code: str, apply: bool, path: str) -> tuple[float, float, float, list[str]]:
    """CPU seconds of the import, those within our hooks, the least of these, and the patches applied in it."""
    done = subprocess.run(
        [python, "-W", "ignore", "-c", MEASURED.format(apply=APPLY + LEAST if apply else "", code=code)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "RLHF_PATCHES_LOG": "off"},
        cwd=tempfile.gettempdir(),
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
    parser.add_argument("--only", nargs="*", choices=list(FRAMEWORKS), default=list(FRAMEWORKS))
    options = parser.parse_args()
    beside = Path(sys.executable).parents[1] / "side-by-side" / "skyrl-0.4"
    path = os.pathsep.join([str(ROOT / "tests" / "harness"), str(beside)])
    for name in options.only:
        python = options.trl_python if name == "trl" else sys.executable
        plain, patched, within, checks, applied = [], [], [], [], []
        for number in range(-1, options.rounds):
            print(f"\r{name}: round {number + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
            alone = imported(python, FRAMEWORKS[name], False, path)
            with_us = imported(python, FRAMEWORKS[name], True, path)
            applied = with_us[3]
            if number < 0:  # bytecode is compiled, and files are in the page cache
                continue
            plain.append(alone[0])
            patched.append(with_us[0])
            within.append(with_us[1])
            checks.append(with_us[2])
        print("\r", end="", file=sys.stderr)
        reference = statistics.median(plain)
        added = statistics.median(other - one for one, other in zip(plain, patched, strict=True))
        hooks, least = statistics.median(within), statistics.median(checks)
        print(f"{name:18} {reference:6.2f} s; patched {added * 1000:+7.0f} ms ({added / reference:+6.1%}); ", end="")
        print(f"within our hooks {hooks * 1000:6.1f} ms ({hooks / reference:5.2%}), goal: at most {GOAL:.0%}; ", end="")
        print(f"parses and compilations alone {least * 1000:6.1f} ms ({least / reference:5.2%}); ", end="")
        print(f"applied: {', '.join(applied)}")


if __name__ == "__main__":
    main()
