"""`patches/_released.py`: which code is a release's own, whatever decorates it."""

from __future__ import annotations

import functools
from types import FunctionType, SimpleNamespace

import pytest

from rlhf_patches.patches import _released

torch = pytest.importorskip("torch")
PACKAGES = ("framework", "torch")


def written_in(module, source, **names):
    """The function `f` of a text, as that of a module."""
    namespace = {"__name__": module, "functools": functools, **names}
    exec(source, namespace)
    return namespace["f"]


def released():
    return written_in("framework.trainer", "def f(self, x):\n    return x")


def users(self, x):
    return 2 * x


WRAPS = """
def f(inner):
    @functools.wraps(inner)
    def wrapper(*given):
        return inner(*given)
    return wrapper
"""
BARE = WRAPS.replace("    @functools.wraps(inner)\n", "")
IN_A_MANAGER = """
def f(inner):
    def enter(*given):
        return inner(*given)
    def wrapper(*given):
        return enter(*given)
    return wrapper
"""
DECORATORS = {
    "of the release": written_in("framework.profiling", WRAPS),
    "of the release, without wraps": written_in("framework.profiling", BARE),
    "two functions deep": written_in("framework.profiling", IN_A_MANAGER),
    "torch.no_grad": torch.no_grad(),
    "twice": lambda inner: torch.no_grad()(written_in("framework.profiling", WRAPS)(inner)),
}


@pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)
def test_a_decorator_of_the_release_makes_nothing_its_own(decorate):
    assert _released.is_released(decorate(released()), PACKAGES)
    assert not _released.is_released(decorate(users), PACKAGES)
    owner = SimpleNamespace(step=decorate(users), other=decorate(released()))
    assert _released.others(owner, "other", "step", packages=PACKAGES) == "SimpleNamespace.step"


def test_a_decorator_of_the_users_is_not_released():
    decorate = written_in("my_code", WRAPS)
    assert not _released.is_released(decorate(released()), PACKAGES)
    assert not _released.is_released(functools.partial(released(), 1), PACKAGES)


def test_torch_s_decorators_stand_for_a_release_only_around_its_function():
    inner = torch.no_grad()(released())
    assert not _released.is_released(inner, ("framework",)), "the outermost function is torch's"
    assert _released.is_released(DECORATORS["of the release"](inner), ("framework",))


def test_a_function_that_refers_to_itself_and_an_empty_cell():
    both = written_in(
        "framework.a",
        """
def f():
    def calls_itself():
        return calls_itself
    def has_an_empty_cell():
        return unset
    if 0:
        unset = 1
    return calls_itself, has_an_empty_cell
""",
    )
    for function in both():
        assert isinstance(function, FunctionType)
        assert _released.is_released(function, PACKAGES)


def test_what_rehearse_wraps_is_whose_it_was():
    wrap = written_in("rlhf_patches.rehearsal.trainer", WRAPS.replace("inner(*given)", "self"), self=None)
    assert _released.is_released(wrap(released()), PACKAGES)
    assert not _released.is_released(wrap(users), PACKAGES)
