"""How often a repaired place was reached, and whether the bug's condition held there; and counting alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading

import pytest

from rlhf_patches import Condition, DefinitionError, Replace, Rewrite, Status, Wrap, fingerprint
from rlhf_patches.engine.reached import decided

SOURCE = """\
class Model:
    def step(self, tokens, *, scale=1):
        if not tokens:
            return 0
        return sum(tokens) - scale

def step(tokens, scale=1):
    '''One step.'''
    return sum(tokens) - scale

def parts(tokens, scale=1):
    yield sum(tokens) - scale

async def later(tokens, scale=1):
    return sum(tokens) - scale

async def stream(tokens, scale=1):
    yield sum(tokens) - scale
"""
FIXES = """\
def step(tokens, scale=1):
    return sum(tokens) + scale

def method(self, tokens, *, scale=1):
    return sum(tokens) + scale

def around(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) + 2 * (args[-1] if len(args) > 1 else kwargs.get("scale", 1))

def uneven(tokens):
    if tokens == [0]:
        raise KeyError("broken")
    if tokens == [1]:
        return None
    return len(tokens) / 2 if len(tokens) > 2 else False

def of_nothing(there_is_none):
    return True
"""
KINDS = ("rewrite", "replace", "wrap")


@pytest.fixture
def make(framework, engine):
    """Make an engine with one patch of a function, and import the module; gives engine, module and patch."""

    def run(kind="rewrite", qualname="step", condition=None, loaded=True, **fields):
        framework.write("mod", SOURCE)
        framework.write("fixes", FIXES)
        target = framework.path(f"mod:{qualname}")
        prints = {fingerprint(SOURCE, qualname): "1.0"}
        own = "method" if "." in qualname else "step"
        change = {
            "rewrite": Rewrite(target, "$A - scale", "$A + scale"),
            "replace": Replace(target, framework.path(f"fixes:{own}"), prints),
            "wrap": Wrap(target, framework.path("fixes:around"), prints),
        }[kind]
        if condition:
            fields["conditions"] = (Condition(target, framework.path(f"fixes:{condition}"), "divisor x"),)
        patch = dataclasses.replace(framework.patch(change), **fields)
        made = engine(patch)
        if loaded:
            made.apply()
        return made, framework.load(), patch

    return run


def reached(made, patch):
    return made.report()[patch.name].reached


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qualname", ["step", "Model.step"])
def test_calls_are_counted(make, kind, qualname):
    made, module, patch = make(kind, qualname)
    step = module.step if qualname == "step" else module.Model().step
    assert str(reached(made, patch)) == "never called"
    assert [step([2, 3]), step([4], scale=2)] == [6, 6]
    row = made.report()[patch.name]
    assert (row.status, row.reached.calls, str(row.reached)) == (Status.APPLIED, 2, "called 2 times")
    assert row.to_dict()["reached"] == {"calls": 2}
    assert "called 2 times" in str(made.report())
    made.revert()
    step([1])
    assert reached(made, patch) is None
    made.apply()
    step([1])
    assert reached(made, patch).calls == 1, "since it was applied"


@pytest.mark.parametrize("qualname", ["parts", "later", "stream"])
def test_generators_and_coroutines(make, qualname):
    made, module, patch = make("rewrite", qualname)
    found = getattr(module, qualname)([2])
    if qualname == "parts":
        assert [*found] == [3]
    else:
        step = found if qualname == "later" else found.__anext__()
        with pytest.raises(StopIteration, match="3"):
            step.__await__().__next__() if qualname == "later" else step.send(None)
    assert reached(made, patch).calls == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_condition_is_told(make, kind):
    made, module, patch = make(kind, condition="uneven")
    for tokens in ([2], [2, 3]):
        module.step(tokens)
    assert str(reached(made, patch)) == "called 2 times; bug condition true in 0: not affected so far"
    module.step([1, 2, 3])
    assert str(reached(made, patch)) == "called 3 times; bug condition true in 1 (divisor x 1.5)"
    module.step([1, 2, 3, 4])
    for _ in range(2):
        assert module.step([0]) == 1, "a condition that fails is not the run's business"
    module.step([1])
    found = reached(made, patch)
    assert str(found).endswith("in 2 of 4 known (divisor x 1.5 to 2)")
    assert found.to_dict() == {
        **{"calls": 7, "asked": 4, "held": 2},
        **{"least": 1.5, "most": 2.0, "measure": "divisor x"},
    }


def test_where_it_cannot_be_told(make):
    made, module, patch = make(condition="uneven")
    module.step([1])
    assert str(reached(made, patch)) == "called 1 time; bug condition unknown"


@pytest.mark.parametrize("condition", ["of_nothing", "not_there"])
def test_a_condition_that_cannot_be_asked_leaves_the_patch(make, condition):
    made, module, patch = make(condition=condition)
    assert module.step([2]) == 3
    assert str(reached(made, patch)) == "called 1 time"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loaded", [True, False])
def test_observing_changes_nothing(make, monkeypatch, kind, loaded):
    monkeypatch.setenv("RLHF_PATCHES_OBSERVE", "1")
    made, module, patch = make(kind, "Model.step", condition=None, loaded=loaded)
    made.apply()
    assert module.Model().step([5], scale=2) == 3, "as released"
    row = made.report()[patch.name]
    assert (row.status, row.reached.calls) == (Status.OBSERVED, 1)
    assert row.reason.endswith("; only counted, not repaired (RLHF_PATCHES_OBSERVE)")
    assert not made.in_force(patch.name)
    assert made.apply()[patch.name].status is Status.OBSERVED
    monkeypatch.delenv("RLHF_PATCHES_OBSERVE")
    assert made.apply()[patch.name].status is Status.APPLIED
    assert module.Model().step([5], scale=2) == 7
    assert made.in_force(patch.name)
    made.revert()
    assert module.Model().step([5], scale=2) == 3


def test_what_is_observed_is_said_once_and_kept(make, monkeypatch, caplog):
    monkeypatch.setenv("RLHF_PATCHES_OBSERVE", "1")
    made, module, patch = make(condition="uneven")
    changed = []
    made.on_change = lambda: changed.append(str(reached(made, patch)))
    module.step([1, 2])
    assert changed == []
    for _ in range(3):
        assert module.step([1, 2, 3]) == 5
    assert changed == ["called 2 times; bug condition true in 1 (divisor x 1.5)"]
    (said,) = (record.getMessage() for record in caplog.records if "the bug occurs in this run" in record.getMessage())
    met = "the bug occurs in this run (divisor x 1.5), not repaired (RLHF_PATCHES_OBSERVE)"
    assert said.startswith(f"{patch.name}: {met}; ")


def test_a_repair_decides_where_the_arguments_could_not_tell(make):
    made, module, patch = make(condition="uneven")
    module.step([1])
    for found in (False, 4.0, True):
        decided(patch.name, found)
        module.step([1])
    assert str(reached(made, patch)).endswith("in 2 of 3 known (divisor x 4)")
    decided("no-such-patch", True)


def test_the_repair_alone_may_tell(framework, engine):
    framework.write("mod", "def f(a):\n    return a - 1\n")
    path = framework.path("mod:f")
    patch = dataclasses.replace(framework.patch(Rewrite(path, "a - 1", "a + 1")), conditions=(Condition(path),))
    made = engine(patch)
    made.apply()
    function = framework.load().f
    function(1)
    assert str(reached(made, patch)) == "called 1 time; bug condition unknown"
    decided(patch.name, True)
    assert str(reached(made, patch)) == "called 1 time; bug condition true in 1"


def test_a_handler_that_raises_does_not_end_a_run_that_meets_a_bug(make, monkeypatch):
    made, module, patch = make(condition="uneven")
    monkeypatch.setattr("rlhf_patches.engine.turn.acted", lambda row: 1 / 0)
    module.step([1])
    decided(patch.name, 4.0)
    assert "in 1 " in str(reached(made, patch))


def test_several_of_one_function(framework, engine, monkeypatch):
    framework.write("mod", "def f(a, b):\n    return (a - 1, b - 2)\n")
    path = framework.path("mod:f")
    patches = [
        framework.patch(Rewrite(path, f"{a} - {n}", f"{a} + {n}"), name=f"bug-{n}") for a, n in (("a", 1), ("b", 2))
    ]
    module, made = framework.load(), engine(*patches)
    made.apply("bug-1")
    assert module.f(0, 0) == (1, -2)
    monkeypatch.setenv("RLHF_PATCHES_OBSERVE", "1")
    made.apply()
    assert [made.report()[f"bug-{n}"].status for n in (1, 2)] == [Status.APPLIED, Status.OBSERVED]
    assert module.f(0, 0) == (1, -2)
    assert [made.report()[f"bug-{n}"].reached.calls for n in (1, 2)] == [2, 2], "it is the function that is entered"
    made.revert("bug-1")
    assert module.f(0, 0) == (-1, -2)
    assert made.report()["bug-2"].reached.calls == 3
    original = made.revert() and module.f.__code__
    assert not [name for name in original.co_names if "rlhf_patches" in name]


def test_observing_leaves_a_replacement_that_is_there(framework, engine, monkeypatch):
    """Of another patch, which was applied before counting alone was asked for."""
    text = "def f(a):\n    return a - 1\n"
    framework.write("mod", text)
    framework.write("fixes", "def f(a):\n    return a + 1\n")
    path = framework.path("mod:f")
    first = framework.patch(Replace(path, framework.path("fixes:f"), {fingerprint(text, "f"): "1.0"}), name="bug-1")
    second = framework.patch(Rewrite(path, "a - 1", "a + 2"), name="bug-2")
    module, made = framework.load(), engine(first, second)
    made.apply("bug-1")
    monkeypatch.setenv("RLHF_PATCHES_OBSERVE", "1")
    made.apply()
    assert [made.report()[f"bug-{n}"].status for n in (1, 2)] == [Status.APPLIED, Status.OBSERVED]
    assert module.f(0) == 1
    assert made.in_force("bug-1")
    assert [made.report()[f"bug-{n}"].reached.calls for n in (1, 2)] == [1, 1]
    made.revert("bug-2")
    assert module.f(0) == 1
    made.revert("bug-1")
    assert module.f(0) == -1


def test_threads_are_all_counted(make):
    made, module, patch = make(condition="uneven")
    threads = [threading.Thread(target=lambda: [module.step([1, 2, 3]) for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = reached(made, patch)
    assert (found.calls, found.asked, found.held) == (20000, 20000, 20000)


def test_a_forked_child_counts_its_own(make):
    made, module, patch = make(condition="uneven")
    module.step([1, 2, 3])
    read, write = os.pipe()
    if not (pid := os.fork()):
        module.step([1, 2, 3, 4])
        os.write(write, json.dumps(made.report()[patch.name].to_dict()["reached"]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert json.loads(os.read(read, 1000)) == {
        **{"calls": 1, "asked": 1, "held": 1},
        **{"least": 2.0, "most": 2.0, "measure": "divisor x"},
    }
    assert reached(made, patch).calls == 1


ELSEWHERE = """
import sys, cloudpickle
model, step = cloudpickle.loads(cloudpickle.dumps(cloudpickle.load(sys.stdin.buffer)))
print([step([1, 2, 3]), step([4], scale=2), model().step([1, 2, 3])], "rlhf_patches" in sys.modules)
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("condition", [None, "uneven"])
@pytest.mark.parametrize(("qualname", "found"), [("step", [7, 6, 5]), ("Model.step", [5, 2, 7])])
def test_what_is_pickled_by_value(make, kind, condition, qualname, found):
    """As Ray's actors are: they run elsewhere, without us and uncounted, and are handed on from there."""
    cloudpickle = pytest.importorskip("cloudpickle")
    _, module, _ = make(kind, qualname, condition)
    calls = [module.step([1, 2, 3]), module.step([4], scale=2), module.Model().step([1, 2, 3])]
    cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.dumps((module.Model, module.step))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # for what a replacement calls
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=sent, env=os.environ | path, capture_output=True)
    assert (done.stdout.decode().strip(), calls) == (f"{found} False", found), done.stderr.decode()


def test_a_condition_is_of_a_target(framework):
    change = Rewrite(framework.path("mod:step"), "$A - scale", "$A + scale")
    condition = Condition("elsewhere:step", framework.path("fixes:uneven"))
    with pytest.raises(DefinitionError, match=r"a condition has the target elsewhere:step; expected one of .*mod:step"):
        dataclasses.replace(framework.patch(change), conditions=(condition,))
    with pytest.raises(DefinitionError, match=r"Condition.predicate is 'nowhere'"):
        Condition("mod:step", "nowhere")
    with pytest.raises(DefinitionError, match=r"conditions is .*expected a tuple of one or more Condition"):
        dataclasses.replace(framework.patch(change), conditions=[condition])
