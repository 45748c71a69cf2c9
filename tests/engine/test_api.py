"""What an implementation can ask within training: whether a patch is in force, and which fingerprint was matched."""

from __future__ import annotations

import builtins
import importlib
import sys
import threading

import pytest

import rlhf_patches
from rlhf_patches import PatchError, Replace, Rewrite, SettingsError, Status, Wrap, api, fingerprint
from rlhf_patches.engine import ledger

OLD = "def f():\n    return 'old'\n"
OLDER = "def f():\n    return 'older'\n"
UNREVIEWED = "def f():\n    return 'unreviewed'\n"
FIXES = """
def new():
    return 'new'

def around(wrapped, instance, args, kwargs):
    return 'around ' + wrapped()
"""


@pytest.fixture
def replace(framework):
    """A `Replace` of ``f`` in a module, and the patch of it."""
    framework.write("fixes", FIXES)
    prints = {fingerprint(text, "f"): releases for text, releases in ((OLD, "2.0"), (OLDER, "1.0"))}

    def make(*modules, name=None):
        changes = (Replace(framework.path(f"{module}:f"), framework.path("fixes:new"), prints) for module in modules)
        return framework.patch(*changes, name=name)

    return make


def test_follows_apply_and_revert(framework, engine, replace):
    framework.write("mod", OLD)
    patch, target = replace("mod"), framework.path("mod:f")
    made = engine(patch)
    assert not made.in_force(patch.name)
    with pytest.raises(PatchError, match="not been applied"):
        made.matched(patch.name, target)
    assert made.apply()[patch.name].status is Status.PENDING
    assert not made.in_force(patch.name)
    framework.load()
    assert made.in_force(patch.name)
    assert made.matched(patch.name, target) == fingerprint(OLD, "f")
    made.revert()
    assert not made.in_force(patch.name)
    assert made.matched(patch.name, target) == fingerprint(OLD, "f")  # a call may still be under way
    made.apply()
    assert made.in_force(patch.name)


def test_follows_a_reload(framework, engine, replace):
    framework.write("mod", OLD)
    patch, target = replace("mod"), framework.path("mod:f")
    module = framework.load()
    made = engine(patch)
    made.apply()
    first = module.f
    # While the module runs anew, its function is upstream's.
    sys.rlhf_patches_test_answers = []
    sys.rlhf_patches_test_ask = lambda: sys.rlhf_patches_test_answers.append(made.in_force(patch.name))
    try:
        framework.write("mod", OLDER + "import sys\nsys.rlhf_patches_test_ask()\n")
        importlib.reload(module)
        assert sys.rlhf_patches_test_answers == [False]
    finally:
        del sys.rlhf_patches_test_answers, sys.rlhf_patches_test_ask
    assert (module.f(), first()) == ("new", "new")
    assert made.in_force(patch.name)
    assert made.matched(patch.name, target) == fingerprint(OLDER, "f")
    framework.write("mod", UNREVIEWED)
    importlib.reload(module)
    assert made.report()[patch.name].status is Status.REFUSED
    assert not made.in_force(patch.name)
    assert made.matched(patch.name, target) == fingerprint(OLDER, "f")  # that of the functions that still have it


def test_a_reload_of_one_module_of_two(framework, engine, replace):
    framework.write("one", OLD)
    framework.write("two", OLDER)
    patch = replace("one", "two")
    made = engine(patch)
    one, two = framework.load("one"), framework.load("two")
    made.apply()
    importlib.reload(one)
    assert made.in_force(patch.name)
    two.f.__code__ = (lambda: "theirs").__code__
    assert not made.in_force(patch.name)
    assert made.matched(patch.name, framework.path("one:f")) == fingerprint(OLD, "f")
    assert made.matched(patch.name, framework.path("two:f")) == fingerprint(OLDER, "f")


def test_patches_on_one_function_do_not_disturb_each_other(framework, engine):
    framework.write("mod", "def f(a):\n    return a - 1, a - 2\n")
    target = framework.path("mod:f")
    one, two = (framework.patch(Rewrite(target, f"a - {n}", f"a + {n}"), name=f"bug-{n}") for n in (1, 2))
    module = framework.load()
    made = engine(one, two)
    for only, expected in ((["bug-1"], (True, False)), (None, (True, True))):
        made.apply(only=only)
        assert (made.in_force("bug-1"), made.in_force("bug-2")) == expected
    made.revert(only="bug-1")
    assert module.f(0) == (-1, 2)
    assert (made.in_force("bug-1"), made.in_force("bug-2")) == (False, True)


@pytest.mark.parametrize("what", ["code", "attribute", "module"])
def test_a_patch_that_was_undone_is_not_in_force(framework, engine, replace, what):
    framework.write("mod", OLD)
    patch = replace("mod")
    module = framework.load()
    made = engine(patch)
    upstream = module.f.__code__
    made.apply()
    assert made.in_force(patch.name)
    if what == "code":
        module.f.__code__ = upstream
    elif what == "attribute":
        module.f = lambda: "theirs"
    else:
        del sys.modules[module.__name__]
    assert not made.in_force(patch.name)


@pytest.mark.parametrize("what", ["apply", "revert"])
def test_while_a_patch_is_put_on_or_taken_off(framework, engine, replace, what):
    """Asked before every line of what changes functions: in force means all of them, and a match is known before one
    of them runs."""
    modules = "one", "two", "three"
    for name in modules:
        framework.write(name, OLD)
    patch = replace(*modules)
    loaded = [framework.load(name) for name in modules]
    made = engine(patch)
    if what == "revert":
        made.apply()
    answers = []

    def trace(frame, event, argument):
        if frame.f_code.co_filename != ledger.__file__ or frame.f_code.co_name not in watched:
            return None
        if event == "line":
            results = {module.f() for module in loaded}
            answers.append((made.in_force(patch.name), results == {"new"}))
            assert answers[-1] != (True, False)
            if "new" in results:
                for name in modules:
                    assert made.matched(patch.name, framework.path(f"{name}:f")) == fingerprint(OLD, "f")
        return trace

    watched = {"plan", "commit", "_all_or_nothing", "_give", "remove"}
    old = sys.gettrace()
    sys.settrace(trace)
    try:
        made.apply() if what == "apply" else made.revert()
    finally:
        sys.settrace(old)
    assert {answer for answer, _ in answers} == {True, False}
    assert made.in_force(patch.name) == (what == "apply")


def test_takes_no_lock_and_imports_nothing(framework, engine, replace, monkeypatch):
    framework.write("mod", OLD)
    patch, target = replace("mod"), framework.path("mod:f")
    framework.load()
    made = engine(patch)
    made.apply()
    answers = []

    def ask():
        answers.append((made.in_force(patch.name), made.matched(patch.name, target)))

    def refuse(*arguments, **keywords):
        raise AssertionError(f"imports {arguments}")

    thread = threading.Thread(target=ask, daemon=True)
    with made._lock, made._loading:
        monkeypatch.setattr(builtins, "__import__", refuse)
        thread.start()
        thread.join(60)
        monkeypatch.undo()
    assert answers == [(True, fingerprint(OLD, "f"))]


def test_an_implementation_asks_about_its_own_patch(framework, engine, monkeypatch):
    framework.write("mod", OLD)
    framework.write(
        "fixes",
        """
        import rlhf_patches

        def around(wrapped, instance, args, kwargs):
            name, target = "some-bug", f"{wrapped.__module__}:{wrapped.__qualname__}"
            return wrapped(), rlhf_patches.in_force(name), rlhf_patches.matched(name, target)
        """,
    )
    prints = {fingerprint(OLD, "f"): "1.0"}
    patch = framework.patch(Wrap(framework.path("mod:f"), framework.path("fixes:around"), prints), name="some-bug")
    made = engine(patch)
    monkeypatch.setattr(api, "engine", made)
    made.apply()
    assert framework.load().f() == ("old", True, fingerprint(OLD, "f"))


def test_names_that_are_none(framework, engine, replace):
    framework.write("mod", OLD)
    patch = replace("mod", name="some-bug")
    by_signature = framework.patch(
        Wrap(framework.path("mod:f"), framework.path("fixes:around"), signature="()", signature_suffices="it does"),
        name="other-bug",
    )
    made = engine(patch, by_signature)
    with pytest.raises(SettingsError, match=r"names 'some-bag', which is not a patch; did you mean 'some-bug'\?"):
        made.in_force("some-bag")
    with pytest.raises(SettingsError, match=r"in_force names 'some-\*', which is not a patch"):
        made.in_force("some-*")
    with pytest.raises(SettingsError, match="matched names 'some-bag', which is not a patch"):
        made.matched("some-bag", framework.path("mod:f"))
    with pytest.raises(SettingsError, match=r"matched: '.*:g' is not a target of some-bug.*did you mean '.*mod:f'\?"):
        made.matched("some-bug", framework.path("mod:g"))
    with pytest.raises(SettingsError, match="not a target of other-bug with fingerprints; there are none"):
        made.matched("other-bug", framework.path("mod:f"))


def test_of_the_built_in_patches():
    assert rlhf_patches.in_force("trl-chunked-nll-zero3") is False
    with pytest.raises(SettingsError, match="did you mean 'trl-chunked-nll-zero3'"):
        rlhf_patches.in_force("trl-chunked-nll-zero")


def test_a_typo_is_shown_without_our_frames(monkeypatch):
    monkeypatch.setenv("RLHF_PATCHES_STRICT", "perhaps")
    with pytest.raises(SettingsError, match="RLHF_PATCHES_STRICT is 'perhaps'") as raised:
        rlhf_patches.apply()
    assert [frame.name for frame in raised.traceback] == ["test_a_typo_is_shown_without_our_frames", "apply"]
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
