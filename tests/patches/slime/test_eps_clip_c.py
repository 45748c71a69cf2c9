"""slime-eps-clip-c: slime's own policy loss against dual-clip PPO in float64, before, after and after a revert.

eps_clip_c_ranks.py has both. The loss is a sum of 21 tokens in float32, so 1e-5; the gradient of tags before 0.3.1
comes from a fused cross entropy that rounds it to bfloat16, so 2**-8 of the largest.
"""

from __future__ import annotations

import functools
import itertools
import types
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.slime import eps_clip_c
from tests.harness import slime_clone
from tests.harness.forkserver import MEGATRON, Level
from tests.harness.slime_clone import with_clone
from tests.patches.slime.test_logprob_entropy import FILES

# Tag and what its metadata say.
RUNS = {"v0.1.0": "0.0.1", "v0.3.1": "0.3.1"}
MORE = {"v0.2.0": "0.2.0", "v0.2.4": "0.2.3", "v0.3.0": "0.3.0"}
RULE_COVERAGE = {
    "minimal scope": "test_the_bound_is_the_one_that_was_asked_for",  # no bound included
    "no side effects": "because it reads one argument",
    "backward compatible": (
        "test_a_bound_that_slime_refuses_is_ignored_as_released",
        "test_a_function_of_one_s_own_is_called_as_released",
    ),
    # An error would be one of the last pipeline stage alone.
    "no new blocking": "test_a_bound_that_slime_refuses_is_ignored_as_released",
    "known": "test_a_bound_is_given_to_what_takes_one",
    "does not change your own `compute_policy_loss`": "test_a_function_of_one_s_own_is_called_as_released",
    "nothing changes": "test_the_bound_is_the_one_that_was_asked_for",
    "ignores such a c, as released": "test_a_bound_that_slime_refuses_is_ignored_as_released",
    "To keep the loss without the bound": "test_unpatched_there_is_none",
}
BOUNDS = ("no bound", "3", "1.5")
LOSS = 1e-5


@pytest.fixture(scope="module")
def run(run_ranks, tmp_path_factory):
    def of_tag(tag, version):
        folder = slime_clone.write(tmp_path_factory.mktemp("slime"), tag, version, FILES)
        levels = (*MEGATRON, Level("tests.harness.loading:torch", str(folder)))
        worker = "tests.patches.slime.eps_clip_c_ranks"
        (report,) = run_ranks(worker, levels=levels, ranks=1)
        return report

    return of_tag


@pytest.fixture(scope="module", params=[*RUNS, *(pytest.param(tag, marks=pytest.mark.exhaustive) for tag in MORE)])
def tag_and_report(request, run):
    return request.param, run(request.param, {**RUNS, **MORE}[request.param])


def check(found, bound, tag):
    """The loss and its gradient are those with ``bound``, and with no other one."""
    for other in BOUNDS:
        distance = found[f"distance from {other}"]
        if other == bound:
            assert distance["loss"] <= LOSS
            assert distance["gradient"] <= (1e-5 if tag in ("v0.3.1", "HEAD") else 2**-8)
        else:
            assert distance["loss"] > 0.05
            assert distance["gradient"] > 0.05


@with_clone
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_bound_is_the_one_that_was_asked_for(tag_and_report, bound):
    tag, report = tag_and_report
    assert report["status"] == "applied"
    check(report["after"][bound], bound, tag)


@with_clone
def test_unpatched_there_is_none(tag_and_report):
    tag, report = tag_and_report
    for state, bound in itertools.product(("before", "reverted"), BOUNDS):
        check(report[state][bound], "no bound", tag)


@with_clone
def test_a_function_of_one_s_own_is_called_as_released(tag_and_report):
    """In slime's place, with the bound of 3 in it: with the option as well."""
    tag, report = tag_and_report
    for state in ("before", "after", "reverted"):
        assert report[state]["own"] == report["before"]["own"]
    for bounds in (report["after"]["own"][name] for name in ("four", "partial")):
        for found in bounds.values():
            check(found, "3", tag)


@with_clone
def test_main_has_it_already(run):
    report = run("HEAD", "0.3.1")
    assert report["status"] == "refused"
    for state, bound in itertools.product(("before", "after"), BOUNDS):
        check(report[state][bound], bound, "HEAD")


def own(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c=3.0):
    """By somebody who has met the bug, whose --eps-clip-c is still what it was when it had no effect."""


released = types.FunctionType(own.__code__, {"__name__": "slime.utils.ppo_utils"})
before_it = types.FunctionType((lambda kl, advantages, low, high: None).__code__, released.__globals__)


def decorated(function):
    """By somebody who has met the bug: it has the attributes of what is within, and gives it the bound."""

    @functools.wraps(function)
    def four(ppo_kl, advantages, eps_clip, eps_clip_high):
        return function(ppo_kl, advantages, eps_clip, eps_clip_high, 3.0)

    return four


def decorated_by_name(function):
    @functools.wraps(function)
    def any_number(*given, **named):
        return function(*given, eps_clip_c=3.0, **named)

    return any_number


def test_a_bound_that_slime_refuses_is_ignored_as_released(caplog):
    """In words, once; arguments without the option have none."""
    assert eps_clip_c.bound(SimpleNamespace(eps_clip_c=1.5), released) == (1.5,)
    assert eps_clip_c.bound(SimpleNamespace(eps_clip_c=None), released) == ()
    assert eps_clip_c.bound(SimpleNamespace(), released) == ()
    assert eps_clip_c.bound(SimpleNamespace(eps_clip_c=1.0), own) == ()  # which may not ignore it
    assert caplog.messages == []
    eps_clip_c._ignored.cache_clear()
    assert [eps_clip_c.bound(SimpleNamespace(eps_clip_c=1.0), released) for _ in range(2)] == [(), ()]
    (said,) = caplog.messages
    assert said.startswith("--eps-clip-c 1.0 is ignored")
    for refused in (float("nan"), "1e1"):  # what YAML says is a text
        assert eps_clip_c.bound(SimpleNamespace(eps_clip_c=refused), released) == ()
        assert caplog.messages[-1].startswith(f"--eps-clip-c {refused} is ignored")


@pytest.mark.xdist_group("torch.compile")  # what it imports takes seconds
@pytest.mark.parametrize(
    ("make", "takes"),
    [
        (lambda: released, True),
        (lambda: torch.compile(released, dynamic=True), True),
        (lambda: torch.compile(torch.compile(released)), True),
        (lambda: own, False),
        (lambda: torch.compile(own), False),
        (lambda: before_it, False),
        (lambda: torch.autocast("cpu")(torch.compile(released)), True),
        (lambda: torch.autocast("cpu")(released), True),
        (lambda: torch.autocast("cpu")(decorated(torch.compile(released))), False),
        (lambda: torch.enable_grad()(decorated(torch.compile(released))), False),
        (lambda: torch.enable_grad()(functools.wraps(torch.compile(released))(own)), False),
        (lambda: decorated(torch.compile(released)), False),
        (lambda: decorated(released), False),
        (lambda: torch.compile(decorated(released)), False),
        (lambda: decorated_by_name(torch.compile(released)), False),
        (lambda: functools.partial(released, eps_clip_c=3.0), False),
        (lambda: lambda kl, advantages, low, high: None, False),
        (lambda: lambda kl, advantages, low, high, scale: None, False),
        (lambda: lambda kl, advantages, low, high, *, eps_clip_c: None, False),
        (lambda: lambda *args: None, False),
        (lambda: SimpleNamespace(), False),
    ],
)
def test_a_bound_is_given_to_what_takes_one(make, takes):
    assert eps_clip_c.bound(SimpleNamespace(eps_clip_c=3.0), make()) == ((3.0,) if takes else ())
