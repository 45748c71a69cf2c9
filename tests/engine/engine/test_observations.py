"""What a patch says it has done so far, in reports."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from rlhf_patches import DefinitionError, Rewrite, Status

FIX = """\
calls = {}

def fixed(x):
    calls["calls"] = calls.get("calls", 0) + 1
    return x + 1

def observed():
    return calls

def failing():
    raise KeyError("gone")
"""


def make(framework, function="observed", **fields):
    framework.write("mod", "def f(x):\n    return x - 1\n")
    framework.write("fix", FIX)
    change = Rewrite(framework.path("mod:f"), "$A - 1", "$FIX($A)", uses={"FIX": framework.path("fix:fixed")})
    return dataclasses.replace(framework.patch(change), observations=framework.path(f"fix:{function}"), **fields)


def test_an_applied_patch_tells(framework, engine):
    patch = make(framework)
    made = engine(patch)
    mod = framework.load()
    made.apply()
    row = made.report()[patch.name]
    assert (row.status, dict(row.observations)) == (Status.APPLIED, {})
    assert "observed" not in row.reason
    mod.f(1)
    mod.f(1)
    row = made.report()[patch.name]
    assert row.observations == {"calls": 2}
    assert row.reason.endswith("; observed: calls: 2")
    assert json.loads(made.report().to_json())["patches"][0]["observations"] == {"calls": 2}
    assert row == pickle.loads(pickle.dumps(row))
    assert hash(row)
    mod.f(1)
    assert row.observations == {"calls": 2}  # as it was then


def test_only_an_applied_one_does(framework, engine):
    patch = make(framework)
    made = engine(patch)
    mod = framework.load()
    made.apply()
    mod.f(1)
    made.revert()
    row = made.report()[patch.name]
    assert (row.status, dict(row.observations)) == (Status.DISABLED, {})
    assert "observed" not in row.reason


def test_nothing_is_imported_for_it(framework, engine):
    patch = make(framework)
    patch = dataclasses.replace(patch, observations="module_that_nobody_has_imported:f")
    made = engine(patch)
    framework.load()
    row = made.apply()[patch.name]
    assert (row.status, dict(row.observations)) == (Status.APPLIED, {})


@pytest.mark.parametrize(("function", "said"), [("failing", "KeyError: 'gone'"), ("missing", "AttributeError")])
def test_one_that_fails_breaks_no_report(framework, engine, function, said):
    patch = make(framework, function)
    made = engine(patch)
    framework.load()
    row = made.apply()[patch.name]
    assert (row.status, dict(row.observations)) == (Status.APPLIED, {})
    assert f"{patch.observations} failed: {said}" in row.reason


def test_a_wrong_name_is_an_error(framework):
    with pytest.raises(DefinitionError, match=r"observations is 'nowhere': expected 'module:qualified.name'"):
        dataclasses.replace(make(framework), observations="nowhere")
