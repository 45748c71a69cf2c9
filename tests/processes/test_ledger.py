"""All or nothing and locks, where it takes a process: audit hooks and forks."""

from __future__ import annotations

import os
import subprocess
import sys

ROLLBACK = """
import sys
sys.path.insert(0, sys.argv[1])
import mod
from rlhf_patches import Guard, Patch, Rewrite, Variant
from rlhf_patches.engine.engine import Engine
from rlhf_patches.definitions.registry import Registered

swaps = 0
def refuse_the_third(event, args):
    global swaps
    if event == "object.__setattr__" and args[1] == "__code__":
        swaps += 1
        if swaps == 3:
            raise PermissionError("no more swaps")
sys.addaudithook(refuse_the_third)

functions = mod.f, mod.g, mod.h
codes = [one.__code__ for one in functions]
changes = tuple(Rewrite("mod:" + name, "'old'", "'new'") for name in "fgh")
patch = Patch("some-bug", *"sscr", ("r",), (Variant(Guard("no-such-distribution", ""), changes),), "r")
engine = Engine(load=lambda: ([Registered(patch, "t")], []))
row = engine.apply()["some-bug"]
print(row.status, "no more swaps" in row.reason, swaps, all(f.__code__ is c for f, c in zip(functions, codes)))
engine.revert()
print(engine.apply()["some-bug"].status, [f() for f in functions])
"""


def test_a_swap_that_fails_half_way_is_rolled_back(tmp_path):
    """CPython asks audit hooks before it sets ``__code__``: the third swap of three fails there, after two."""
    (tmp_path / "mod.py").write_text("".join(f"def {name}(): return 'old'\n" for name in "fgh"))
    done = subprocess.run([sys.executable, "-c", ROLLBACK, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["failed True 5 True", "applied ['new', 'new', 'new']"], done.stderr


# ------------------------------------------------------------------------------------------------ forks

RULE_COVERAGE = """
import faulthandler, os, threading
import rlhf_patches
from rlhf_patches.engine.engine import engine
from rlhf_patches.runs import report_file
from rlhf_patches.patches._vocab_parallel import counters

rlhf_patches.apply()
locks = [engine._lock, engine._loading, report_file._line._lock, counters._lock]
held = threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if not pid:
    faulthandler.dump_traceback_later(60, exit=True)
    counters.count(None)
    assert counters.observed()
    rlhf_patches.revert()
    rlhf_patches.report()
    report_file._line.end()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))  # at exit the report would wait for its lock
"""


def test_a_forked_child_gets_past_every_lock_that_another_thread_held(tmp_path):
    environment = {**os.environ, "RLHF_PATCHES_REPORT": str(tmp_path / "report.jsonl")}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", RULE_COVERAGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
