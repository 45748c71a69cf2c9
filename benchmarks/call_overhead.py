"""What a call of a patched function costs more than one of the original: ``python benchmarks/call_overhead.py``.

The same function unpatched, rewritten, rewritten with a condition that is told in each call, replaced and wrapped.
Timings alternate within each round; the figure is the median over the rounds. What a rewritten function costs more,
whose edit costs nothing in itself, is counting: how often it is entered, and how often the condition holds.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import timeit
from pathlib import Path

from rlhf_patches import Condition, Guard, Patch, Replace, Rewrite, Variant, Wrap, fingerprint
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.engine.engine import Engine

SOURCE = """\
class Model:
    def step(self, a, b=1, *, scale=1):
        return (a - b) * scale

def step(a, b=1, *, scale=1):
    return (a - b) * scale
"""
FIXES = """\
def step(a, b=1, *, scale=1):
    return (a + b) * scale

def method(self, a, b=1, *, scale=1):
    return (a + b) * scale

def around(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)

def tells(a):
    return a > 3
"""


def patched(folder: Path, kind: str, qualname: str) -> object:
    """A fresh copy of the module with one function patched in one way."""
    module = f"{kind}_{qualname.replace('.', '_')}_target".lower()
    (folder / f"{module}.py").write_text(SOURCE)
    importlib.invalidate_caches()
    target = f"{module}:{qualname}"
    prints = {fingerprint(SOURCE, qualname): "this one"}
    rewrite = Rewrite(target, "$A - $B", "$A + $B")
    changes = {
        "rewritten": rewrite,
        "conditioned": rewrite,
        "replaced": Replace(target, f"fixes:{'method' if '.' in qualname else 'step'}", prints),
        "wrapped": Wrap(target, "fixes:around", fingerprints=prints),
    }
    namespace = importlib.import_module(module)
    if kind in changes:
        text = dict.fromkeys(("summary", "symptom", "cause", "repair", "obsolete_when"), "benchmark")
        patch = Patch(
            name="call-overhead",
            references=("-",),
            variants=(Variant(Guard("none", ""), (changes[kind],)),),
            conditions=(Condition(target, "fixes:tells"),) if kind == "conditioned" else (),
            **text,
        )
        report = Engine(load=lambda: ([Registered(patch, "benchmark")], [])).apply()
        assert report["call-overhead"].status == "applied", report
    owner = namespace.Model() if "." in qualname else namespace
    return owner.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=50_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fixes.py").write_text(FIXES)
        sys.path.insert(0, name)
        print(
            f"Python {sys.version.split()[0]}, {options.rounds} rounds of {options.calls} calls; microseconds per call"
        )
        for qualname in ("step", "Model.step"):
            kinds = {
                kind: patched(folder, kind, qualname)
                for kind in ("original", "rewritten", "conditioned", "replaced", "wrapped")
            }
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(options.rounds):
                for kind, step in kinds.items():
                    taken = timeit.timeit("step(5, 2, scale=3)", globals={"step": step}, number=options.calls)
                    times[kind].append(taken / options.calls * 1e6)
            base = times.pop("original")
            print(f"{qualname:11} original    {statistics.median(base):.3f}")
            for kind, measured in times.items():
                added = statistics.median(one - other for one, other in zip(measured, base, strict=True))
                goal = "at most 0.3" if kind in ("rewritten", "conditioned") else "at most 0.5"
                print(f"{qualname:11} {kind:11} {statistics.median(measured):.3f}  added {added:+.3f}  (goal: {goal})")


if __name__ == "__main__":
    main()
