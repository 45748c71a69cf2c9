"""Random sequences of operations, and random upstream text."""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_patches import Replace, Rewrite, Status, Wrap
from rlhf_patches.guards.fingerprints import fingerprint
from tests.harness.effort import SHARE
from tests.harness.random_tests import COMMON, numbers

pytestmark = pytest.mark.usefixtures("quiet")


# ----------------------------------------------------------------------- sequences of operations, and a model

ONE = """
def f():
    return ["a0", "b0"]
class C:
    def g(self): return "g0"
def h(): return "h0"
"""
TWO = """
def h(): return "h0"
def k(): return "k0"
"""
FIXES = """
def around(wrapped, instance, args, kwargs): return ["wrapped", wrapped()]
def k(): return "k1"
"""
# What each patch holds: (module, function). The order is that of registration, in which apply() works.
HOLDS = {
    "fw-a": [("one", "f")],
    "fw-b": [("one", "f")],
    "fw-around-f": [("one", "f")],
    "fw-g": [("one", "C.g")],
    "fw-h": [("one", "h"), ("two", "h")],
    "fw-k": [("two", "k")],
}
EXCLUSIVE = {("fw-a", "fw-around-f"), ("fw-b", "fw-around-f"), ("fw-around-f", "fw-a"), ("fw-around-f", "fw-b")}


def patches_for(framework, one, two, fixes):
    path, implementation = {"one": framework.path(one), "two": framework.path(two)}, framework.path(f"{fixes}:around")

    def prints(source, name):
        return {fingerprint(source, name): "1.0"}

    changes = {
        "fw-a": [Rewrite(f"{path['one']}:f", '"a0"', '"the new a"')],
        "fw-b": [Rewrite(f"{path['one']}:f", '"b0"', '"the new b"')],
        "fw-around-f": [Wrap(f"{path['one']}:f", implementation, prints(ONE, "f"))],
        "fw-g": [Wrap(f"{path['one']}:C.g", implementation, prints(ONE, "C.g"))],
        "fw-h": [Rewrite(f"{path['one']}:h", '"h0"', '"new h"'), Rewrite(f"{path['two']}:h", '"h0"', '"new h"')],
        "fw-k": [Replace(f"{path['two']}:k", framework.path(f"{fixes}:k"), prints(TWO, "k"))],
    }
    return [framework.patch(*some, name=name) for name, some in changes.items()]


def value(name, holders):
    """What a function returns with these patches on it."""
    if name == "f":
        inner = ["the new a" if "fw-a" in holders else "a0", "the new b" if "fw-b" in holders else "b0"]
        return ["wrapped", inner] if "fw-around-f" in holders else inner
    if name == "C.g":
        return ["wrapped", "g0"] if holders else "g0"
    if name == "h":
        return "new h" if holders else "h0"
    return "k1" if holders else "k0"


class Model:
    """What should be patched, in sets and lists. A reload makes new functions; the old ones keep what they have."""

    def __init__(self):
        self.requested, self.status = set(), dict.fromkeys(HOLDS, Status.INACTIVE)
        self.generations = {"one": [], "two": []}  # of each module: one dict a load, function -> holders

    def attempt(self, patch, announced=False):
        if patch not in self.requested or (self.status[patch] is Status.APPLIED and not announced):
            return
        if not all(self.generations[module] for module, _ in HOLDS[patch]):
            self.status[patch] = Status.PENDING
            return
        held = [self.generations[module][-1][name] for module, name in HOLDS[patch]]
        if any((patch, other) in EXCLUSIVE for holders in held for other in holders):
            self.status[patch] = Status.REFUSED
            return
        for holders in held:
            holders.add(patch)
        self.status[patch] = Status.APPLIED

    def apply(self, names):
        self.requested |= set(names)
        self.status |= {name: Status.DISABLED for name, status in self.status.items() if status is Status.INACTIVE}
        for patch in HOLDS:
            self.attempt(patch)

    def revert(self, names):
        for patch in set(names) & self.requested:
            self.status[patch] = Status.DISABLED
            for generation in itertools.chain(*self.generations.values()):
                for holders in generation.values():
                    holders.discard(patch)
        self.requested -= set(names)

    def load(self, module):
        names = ("f", "C.g", "h") if module == "one" else ("h", "k")
        self.generations[module].append({name: set() for name in names})
        for patch, held in HOLDS.items():
            if any(where == module for where, _ in held):
                self.attempt(patch, announced=True)


subsets = st.lists(st.sampled_from(list(HOLDS)), unique=True)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), subsets),
        st.tuples(st.just("revert"), subsets),
        st.tuples(st.sampled_from(["import", "reload"]), st.sampled_from(["one", "two"])),
    ),
    max_size=14,
)


def functions_of(module, which):
    functions = {name: getattr(module, name, None) for name in ("f", "h", "k")}
    if which == "one":
        functions["C.g"] = module.C.__dict__["g"]
    return {name: function for name, function in functions.items() if function is not None}


@settings(max_examples=150 // SHARE, **COMMON)
@given(steps=operations)
def test_any_sequence_of_operations(framework, engine, steps):
    """Behavior and statuses are the model's after each step; after the last revert every code object is back."""
    number = next(numbers)
    names = {"one": f"one{number}", "two": f"two{number}"}
    framework.write(names["one"], ONE)
    framework.write(names["two"], TWO)
    framework.write(f"fixes{number}", FIXES)
    made = engine(*patches_for(framework, names["one"], names["two"], f"fixes{number}"))
    model, modules = Model(), {}
    seen = {"one": [], "two": []}  # every generation's functions, kept as a user's references would
    for operation, what in steps:
        if operation == "apply":
            made.apply(only=what)
            model.apply(what)
        elif operation == "revert":
            made.revert(only=what)
            model.revert(what)
        elif (operation == "import" and what not in modules) or (operation == "reload" and what in modules):
            if operation == "import":
                modules[what] = framework.load(names[what])
            else:
                importlib.reload(modules[what])
            seen[what].append(functions_of(modules[what], what))
            model.load(what)
        assert {row.name: row.status for row in made.report()} == model.status
        for which, generations in seen.items():
            for functions, holders in zip(generations, model.generations[which], strict=True):
                for name, function in functions.items():
                    result = function(None) if name == "C.g" else function()
                    assert result == value(name, holders[name])
    made.revert()
    for which, text in (("one", ONE), ("two", TWO)):
        for functions in seen[which]:
            witness = ModuleType("witness")
            exec(compile(text, modules[which].__file__, "exec", dont_inherit=True), witness.__dict__)
            unpatched = functions_of(witness, which)
            assert {n: f.__code__ for n, f in functions.items()} == {n: f.__code__ for n, f in unpatched.items()}


@settings(max_examples=60 // SHARE, **COMMON)
@given(steps=operations)
def test_the_original_code_object_comes_back(framework, engine, steps):
    """``is``, not ``==``: the modules are imported before anything is applied, so their code can be remembered."""
    number = next(numbers)
    framework.write(f"one{number}", ONE)
    framework.write(f"two{number}", TWO)
    framework.write(f"fixes{number}", FIXES)
    made = engine(*patches_for(framework, f"one{number}", f"two{number}", f"fixes{number}"))
    functions = [
        function
        for which in ("one", "two")
        for function in functions_of(framework.load(f"{which}{number}"), which).values()
    ]
    codes = [function.__code__ for function in functions]
    for operation, what in steps:
        if operation in ("apply", "revert"):
            getattr(made, operation)(only=what)
    made.revert()
    assert all(function.__code__ is code for function, code in zip(functions, codes, strict=True))
