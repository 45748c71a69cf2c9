"""Several changes and several patches: all or nothing, any order, selection, threads."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import rlhf_patches
from rlhf_patches import Replace, Rewrite, SettingsError, Status, Wrap
from rlhf_patches.engine import ledger
from rlhf_patches.guards.fingerprints import fingerprint

SOURCE = """\
def f():
    a = "old a"
    b = "old b"
    c = "old c"
    return a, b, c

def g():
    return "old g"
"""
FIXES = """\
def f(): return "replaced"
def g(): return "new g"
def around(wrapped, instance, args, kwargs): return ("wrapped", wrapped())
"""
OLD = ("old a", "old b", "old c")


@pytest.fixture
def changes(framework):
    """``changes(kind)``: a rewrite of one letter, or a replacement or a wrapping of ``f``."""
    framework.write("mod", SOURCE)
    framework.write("fixes", FIXES)

    def make(kind, function="f"):
        target, prints = framework.path(f"mod:{function}"), {fingerprint(SOURCE, function): "1.0"}
        if kind == "replace":
            return Replace(target, framework.path(f"fixes:{function}"), prints)
        if kind == "wrap":
            return Wrap(target, framework.path("fixes:around"), prints)
        return Rewrite(target, f'"old {kind}"', f'"a new {kind}"')

    return make


def new(*letters):
    return tuple(f"a new {text[-1]}" if text[-1] in letters else text for text in OLD)


# ------------------------------------------------------------------------------- patches on one function


@pytest.mark.parametrize("off", list(itertools.permutations("abc")))
@pytest.mark.parametrize("on", list(itertools.permutations("abc")))
def test_disjoint_rewrites_compose_in_any_order(framework, engine, changes, on, off):
    made = engine(*(framework.patch(changes(letter), name=f"fw-{letter}") for letter in "abc"))
    f = framework.load().f
    original = f.__code__
    carried = []
    for letter in on:
        made.apply(only=f"fw-{letter}")
        carried.append(letter)
        assert f() == new(*carried)
    for letter in off:
        made.revert(only=f"fw-{letter}")
        carried.remove(letter)
        assert f() == new(*carried)
    assert f.__code__ is original


@pytest.mark.parametrize("second", ["overlapping", "replace", "wrap", "a"])
@pytest.mark.parametrize("first", ["a", "replace", "wrap"])
def test_what_does_not_compose_is_refused_naming_the_first(framework, engine, changes, first, second):
    if second == "overlapping":
        other = Rewrite(framework.path("mod:f"), 'a = "old a"', 'a = "theirs"')
    else:
        other = changes(second)
    made = engine(framework.patch(changes(first), name="fw-first"), framework.patch(other, name="fw-second"))
    f = framework.load().f
    report = made.apply()
    assert report["fw-first"].status is Status.APPLIED
    with_first = f()
    row = report["fw-second"]
    assert row.status is Status.REFUSED
    assert "fw-first" in row.reason
    # Once the first is gone, the second can have the function; and the first is then refused in its turn.
    made.revert(only="fw-first")
    assert made.apply(only="fw-second")["fw-second"].status is Status.APPLIED
    row = made.apply()["fw-first"]
    assert row.status is Status.REFUSED
    assert "fw-second" in row.reason
    made.revert()
    assert f() == OLD != with_first


def test_neighboring_rewrites_touch_but_do_not_overlap(framework, engine):
    framework.write("mod", "def f():\n    return 1+2\n")
    target = framework.path("mod:f")
    made = engine(
        framework.patch(Rewrite(target, "1", "10"), name="fw-one"),
        framework.patch(Rewrite(target, "2", "20"), name="fw-two"),
    )
    made.apply()
    assert framework.load().f() == 30


def test_two_rewrites_of_one_patch(framework, engine, changes):
    patch = framework.patch(changes("a"), changes("c"))
    made = engine(patch)
    f = framework.load().f
    assert made.apply()[patch.name].status is Status.APPLIED
    assert f() == new("a", "c")
    made.revert()
    assert f() == OLD


@pytest.mark.parametrize("second", ["a", "wrap", "replace"])
def test_changes_of_one_patch_that_exclude_each_other(framework, engine, changes, second):
    patch = framework.patch(changes("a"), changes(second))
    f = framework.load().f
    code = f.__code__
    row = engine(patch).apply()[patch.name]
    assert row.status is Status.REFUSED, row
    assert ("touch the same code" if second == "a" else "both rewrites and replaces or wraps") in row.reason
    assert f.__code__ is code


# ----------------------------------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("flaw", ["unrecognized", "no helper", "no implementation", "edits beyond"])
def test_all_changes_or_none(framework, engine, changes, flaw, order):
    target = framework.path("mod:g")
    bad = {
        "unrecognized": Rewrite(target, '"nowhere"', '"x"'),
        "no helper": Rewrite(target, '"old g"', "$HELP()", uses={"HELP": framework.path("fixes:absent")}),
        "no implementation": Replace(target, framework.path("absent:g"), {fingerprint(SOURCE, "g"): "1.0"}),
        "edits beyond": Rewrite(target, "def g(): $$$BODY", "def h(): pass"),
    }[flaw]
    patch = framework.patch(*[changes("a"), bad][::order])
    made = engine(patch)
    mod = framework.load()
    codes = mod.f.__code__, mod.g.__code__
    row = made.apply()[patch.name]
    assert row.status.is_problem
    assert "nothing was changed" in row.reason
    assert (mod.f.__code__, mod.g.__code__) == codes
    assert mod.f.__code__ is codes[0]
    assert mod.g.__code__ is codes[1]


@pytest.mark.parametrize("what", ["apply", "revert"])
def test_an_interrupt_leaves_all_or_nothing(framework, engine, what):
    """Ctrl-C at any line of what changes functions. The trace function stands for it: it raises before a line."""
    framework.write("mod", "".join(f"def {name}(): return 'old'\n" for name in "fgh"))
    module = framework.load()
    patch = framework.patch(*(Rewrite(framework.path(f"mod:{name}"), "'old'", "'new'") for name in "fgh"))
    watched = {"plan", "commit", "_all_or_nothing", "_give", "remove"}

    def interrupt(at):
        """Whether the interrupt came: there is a line of that number."""
        lines = itertools.count()

        def trace(frame, event, argument):
            if frame.f_code.co_name not in watched or frame.f_code.co_filename != ledger.__file__:
                return None
            if event == "line" and next(lines) == at:
                raise KeyboardInterrupt
            return trace

        made = engine(patch)
        if what == "revert":
            made.apply()
        old = sys.gettrace()
        sys.settrace(trace)
        try:
            made.apply() if what == "apply" else made.revert()
        except KeyboardInterrupt:
            came = True
        else:
            came = False
        finally:
            sys.settrace(old)
        results = {name: getattr(module, name)() for name in "fgh"}
        assert len(set(results.values())) == 1, (at, results)
        assert made.in_force(patch.name) == (results["f"] == "new"), (at, results)
        row = made.report()[patch.name]
        assert row.status is not Status.FAILED, (at, row.reason)
        assert made.apply()[patch.name].status is Status.APPLIED, (at, made.report()[patch.name].reason)
        assert {getattr(module, name)() for name in "fgh"} == {"new"}
        made.revert()
        assert {getattr(module, name)() for name in "fgh"} == {"old"}, at
        return came

    assert next(at for at in itertools.count() if not interrupt(at)) > 20


def test_waits_for_all_its_modules(framework, engine):
    for module in ("one", "two", "sub.three"):
        framework.write(module, "def f(): return 'old'\n")
    patch = framework.patch(*(Rewrite(framework.path(f"{m}:f"), "'old'", "'new'") for m in ("one", "two", "sub.three")))
    made = engine(patch)
    one = framework.load("one")
    assert made.apply()[patch.name].status is Status.PENDING
    three = framework.load("sub.three")
    row = made.report()[patch.name]
    assert row.status is Status.PENDING
    assert framework.path("two") in row.reason
    assert "three" not in row.reason
    assert (one.f(), three.f()) == ("old", "old")
    two = framework.load("two")
    assert (one.f(), two.f(), three.f()) == ("new", "new", "new")
    made.revert()
    assert (one.f(), two.f(), three.f()) == ("old", "old", "old")


def test_the_last_module_decides_for_all(framework, engine):
    """The module that comes last is not recognized: those that came before stay as they were."""
    framework.write("one", "def f(): return 'old'\n")
    framework.write("two", "def f(): return 'other'\n")
    patch = framework.patch(*(Rewrite(framework.path(f"{m}:f"), "'old'", "'new'") for m in ("one", "two")))
    made = engine(patch)
    made.apply()
    one, two = framework.load("one"), framework.load("two")
    assert made.report()[patch.name].status is Status.REFUSED
    assert (one.f(), two.f()) == ("old", "other")


# -------------------------------------------------------------------------------- idempotence, selection


@pytest.mark.parametrize("kind", ["a", "replace", "wrap"])
def test_apply_and_revert_are_idempotent(framework, engine, changes, kind):
    patch = framework.patch(changes(kind))
    made = engine(patch)
    f = framework.load().f
    original = f.__code__
    for _ in range(2):
        made.revert()  # reverting what was never applied, or twice, changes nothing
        assert f.__code__ is original
        first = made.apply()
        once, result = f.__code__, f()
        assert made.apply() == first == made.report()
        assert f.__code__ is once
        assert f() == result != OLD
        reverted = made.revert()
        assert made.revert() == reverted
        assert f() == OLD


def test_only_then_all_then_disable(framework, engine, changes):
    made = engine(*(framework.patch(changes(letter), name=f"fw-{letter}") for letter in "abc"))
    f = framework.load().f

    def statuses(report):
        return [row.status.value for row in report]

    report = made.apply(only="fw-b")
    assert (statuses(report), f()) == (["disabled", "applied", "disabled"], new("b"))
    assert report["fw-a"].reason == "not chosen by apply(only=...)"
    report = made.apply(disable=["fw-[ac]"])
    assert (statuses(report), f()) == (["disabled", "applied", "disabled"], new("b"))
    assert "disable" in report["fw-a"].reason
    assert (statuses(made.apply(only=["fw-*"], disable="fw-c")), f()) == (
        ["applied", "applied", "disabled"],
        new("a", "b"),
    )
    # A selection adds patches and takes none off.
    assert (statuses(made.apply(only="fw-c")), f()) == (["applied"] * 3, new("a", "b", "c"))
    assert (statuses(made.revert(keep=["fw-a", "fw-c"])), f()) == (["applied", "disabled", "applied"], new("a", "c"))
    assert (statuses(made.revert(only="fw-?")), f()) == (["disabled"] * 3, OLD)
    assert (statuses(made.apply()), f()) == (["applied"] * 3, new("a", "b", "c"))


def test_what_cannot_be_taken_off_is_failed_and_says_so_until_it_is_off(framework, engine, changes, monkeypatch):
    made = engine(framework.patch(changes("a"), name="fw-a"), framework.patch(changes("g", "g"), name="fw-b"))
    f = framework.load().f
    made.apply(only="fw-a")
    patched, theirs = f.__code__, (lambda: "theirs").__code__
    f.__code__ = theirs
    stuck = f"but not reverted: other code has changed {framework.path('mod:f')} after it was patched"

    def row(report):
        return report["fw-a"].status.value, report["fw-a"].reason

    with monkeypatch.context() as switched:
        switched.setenv("RLHF_PATCHES_DISABLE", "fw-a")
        assert row(made.apply()) == ("failed", f"disabled by RLHF_PATCHES_DISABLE, {stuck}")
    assert row(made.revert()) == ("failed", f"reverted by revert(), {stuck}")
    assert row(made.apply(only="fw-b")) == ("failed", f"not chosen by apply(only=...), {stuck}")
    assert row(made.apply(disable="fw-a")) == ("failed", f"disabled by apply(disable=...), {stuck}")
    assert f.__code__ is theirs
    f.__code__ = patched
    assert row(made.revert()) == ("disabled", "reverted by revert()")
    assert f() == OLD


def test_nothing_is_put_on_code_that_others_have_changed_since(framework, engine, changes):
    made = engine(framework.patch(changes("a"), name="fw-a"), framework.patch(changes("b"), name="fw-b"))
    f = framework.load().f
    made.apply(only="fw-a")
    f.__code__ = theirs = (lambda: "theirs").__code__
    row = made.apply(only="fw-b")["fw-b"]
    assert row.status is Status.REFUSED
    assert f"other code has changed {framework.path('mod:f')} after fw-a patched it" in row.reason
    assert f.__code__ is theirs


def test_two_targets_that_are_one_function(framework, engine, changes, monkeypatch):
    """A module under two names: the second change would undo the first."""
    first = changes("a")
    module = framework.load()
    monkeypatch.setitem(sys.modules, framework.path("again"), module)
    patch = framework.patch(first, Rewrite(framework.path("again:f"), '"old b"', '"a new b"'))
    row = engine(patch).apply()[patch.name]
    assert row.status is Status.REFUSED
    assert f"is also the target of another change of {patch.name}" in row.reason
    assert module.f() == OLD


@pytest.mark.parametrize("method", ["apply", "revert"])
@pytest.mark.parametrize("argument", ["only", "other"])
@pytest.mark.parametrize("wrong", ["fw-aa", ["fw-a", "nothing-*"], [None]])
def test_a_wrong_name_is_an_error_and_changes_nothing(framework, engine, changes, method, argument, wrong):
    made = engine(framework.patch(changes("a"), name="fw-a"), framework.patch(changes("b"), name="fw-b"))
    f = framework.load().f
    if method == "revert":
        made.apply()
    code = f.__code__
    if argument == "other":
        argument = {"apply": "disable", "revert": "keep"}[method]
    with pytest.raises(SettingsError) as caught:
        getattr(made, method)(**{argument: wrong})
    assert argument in str(caught.value)
    if wrong == "fw-aa":
        assert "did you mean 'fw-a'?" in str(caught.value)
    assert f.__code__ is code


def test_no_names_mean_no_patch(framework, engine, changes):
    """An empty list is a list: it must not read as "all"."""
    made = engine(framework.patch(changes("a")))
    f = framework.load().f
    made.apply(only=[])
    assert f() == OLD
    made.apply()
    made.revert(only=[])
    assert f() == new("a")


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("DISABLE", "fw-a", "disabled by RLHF_PATCHES_DISABLE"),
        ("DISABLE", " x*, fw-a ", "disabled by RLHF_PATCHES_DISABLE"),
        ("ONLY", "fw-[bc]", "not among RLHF_PATCHES_ONLY"),
    ],
)
@pytest.mark.parametrize("when", ["before apply", "between apply and import"])
def test_the_environment_is_read_when_a_patch_is_due(
    framework, engine, changes, monkeypatch, variable, value, reason, when
):
    """A launcher may set the variable after the engine was loaded, but before the framework is."""
    names = ["fw-a", "fw-b", "fw-c", "x-other"]
    framework.write("never", "")
    other = Rewrite(framework.path("never:f"), "1", "2")
    made = engine(*(framework.patch(other if n == "x-other" else changes(n[-1]), name=n) for n in names))
    if when == "before apply":
        monkeypatch.setenv(f"RLHF_PATCHES_{variable}", value)
    made.apply()
    monkeypatch.setenv(f"RLHF_PATCHES_{variable}", value)
    f = framework.load().f
    assert f() == new("b", "c")
    assert made.report()["fw-a"].status is Status.DISABLED
    assert made.report()["fw-a"].reason == reason
    monkeypatch.delenv(f"RLHF_PATCHES_{variable}")
    assert made.apply()["fw-a"].status is Status.APPLIED
    assert f() == new("a", "b", "c")
    monkeypatch.setenv(f"RLHF_PATCHES_{variable}", value)
    made.apply()
    assert f() == new("b", "c"), "switched off by the user after it was applied"


@pytest.mark.parametrize(
    ("variable", "value"), [("DISABLE", "fw-z*"), ("ONLY", "nothing"), ("STRICT", "perhaps"), ("DISABEL", "fw-a")]
)
def test_a_wrong_variable_is_an_error(framework, engine, changes, monkeypatch, variable, value):
    """Raised by apply(); within a framework's import it becomes the patch's reason, and the import goes on."""
    made = engine(framework.patch(changes("a"), name="fw-a"))
    made.apply()
    monkeypatch.setenv(f"RLHF_PATCHES_{variable}", value)
    with pytest.raises(SettingsError, match=variable):
        made.apply()
    f = framework.load().f
    row = made.report()["fw-a"]
    assert row.status is Status.FAILED
    assert variable in row.reason
    assert f() == OLD


# ---------------------------------------------------------------------------------------------- reload


def test_reload_patches_the_new_function_and_revert_gives_both_back(framework, engine, changes):
    patch = framework.patch(changes("a"))
    made = engine(patch)
    mod = framework.load()
    before = mod.f
    made.apply()
    importlib.reload(mod)
    assert mod.f is not before
    assert before() == mod.f() == new("a")
    assert made.report()[patch.name].status is Status.APPLIED
    made.revert()
    assert before() == mod.f() == OLD


# ---------------------------------------------------------------------------------------------- threads


# An import that began in another thread just before the hook was armed, or ends just now, may be reported so. That is
# honest (nothing is called applied), and the next apply() settles it.
MISSED = "was imported without the import hooks; call apply() again"


def test_threads_apply_revert_import_and_call(framework, engine, changes):
    """Every call sees a whole state: some set of patches, never an exception, never half a patch."""
    framework.write("late", SOURCE)
    both = (
        Rewrite(framework.path("mod:f"), '"old c"', '"a new c"'),
        Rewrite(framework.path("mod:g"), '"old g"', '"a new g"'),
    )
    made = engine(
        framework.patch(changes("a"), name="fw-a"),
        framework.patch(changes("b"), name="fw-b"),
        framework.patch(*both, name="fw-c"),
        framework.patch(Rewrite(framework.path("late:f"), '"old a"', '"a new a"'), name="fw-late"),
    )
    mod = framework.load()
    original = mod.f.__code__, mod.g.__code__
    possible = {new(*chosen) for n in range(4) for chosen in itertools.combinations("abc", n)}
    problems: list[object] = []
    done = threading.Event()
    start = threading.Barrier(7)

    def work(action, rounds=60):
        start.wait()
        try:
            for _ in range(rounds):
                action()
        except BaseException as error:
            problems.append(error)

    def call():
        start.wait()
        while not done.is_set():
            try:
                if mod.f() not in possible:
                    problems.append(mod.f())
            except BaseException as error:
                problems.append(error)

    def check(report):
        problems.extend(row for row in report if row.status.is_problem and not row.reason.endswith(MISSED))

    workers = [
        threading.Thread(target=work, args=(action,))
        for action in (
            lambda: check(made.apply(only=["fw-a", "fw-late"])),
            lambda: check(made.revert(only="fw-a")),
            lambda: check(made.apply(only=["fw-b", "fw-c"])),
            lambda: check(made.revert(only=["fw-b", "fw-c"])),
        )
    ]
    workers.append(threading.Thread(target=work, args=(lambda: framework.load("late"), 1)))
    callers = [threading.Thread(target=call) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in workers + callers:
            thread.start()
        for thread in workers:
            thread.join(60)
        done.set()
        for thread in callers:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in workers + callers)
    assert not problems
    made.apply()
    assert mod.f() == new("a", "b", "c")
    assert (mod.g(), framework.load("late").f()) == ("a new g", new("a"))
    made.revert()
    assert (mod.f(), mod.g()) == (OLD, "old g")
    assert mod.f.__code__ is original[0]
    assert mod.g.__code__ is original[1]


def test_threads_import_while_others_apply(framework, engine):
    """An import that runs while another thread arms the hooks is patched, or said to have been missed."""
    modules = [f"m{n}" for n in range(12)]
    for module in modules:
        framework.write(
            module,
            textwrap.dedent("""
            import time
            time.sleep(0.002)
            def f(): return 'old'
        """),
        )
    patches = [framework.patch(Rewrite(framework.path(f"{m}:f"), "'old'", "'new'"), name=f"fw-{m}") for m in modules]
    made = engine(*patches)
    start = threading.Barrier(3)
    problems: list[BaseException] = []

    def guarded(action):
        start.wait()
        try:
            action()
        except BaseException as error:
            problems.append(error)

    threads = [
        threading.Thread(target=guarded, args=(lambda: [framework.load(m) for m in modules],)),
        threading.Thread(target=guarded, args=(lambda: [framework.load(m) for m in reversed(modules)],)),
        threading.Thread(target=guarded, args=(lambda: [made.apply(only=p.name) for p in patches],)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not problems
    for row, module in zip(made.report(), modules, strict=True):
        assert row.status is Status.APPLIED or row.reason.endswith(MISSED), row
        assert framework.load(module).f() == ("new" if row.status is Status.APPLIED else "old")
    assert {row.status for row in made.apply()} == {Status.APPLIED}
    assert [framework.load(m).f() for m in modules] == ["new"] * len(modules)


def test_every_lock_is_renewed_after_a_fork():
    """Where one is added: renew it, and hold it in the test above or in one that has its framework."""
    root = Path(rlhf_patches.__file__).parents[1]
    every = [*(root / "rlhf_patches").rglob("*.py"), *(root / "patches").rglob("*.py")]
    files = [file for file in every if file.parent.name != "proofs"]  # those run in processes of their own
    texts = {file.name: file.read_text() for file in files if "Lock()" in file.read_text()}
    with_their_own_tests = {"site_hook.py", "_reference_pass.py"}
    assert texts.keys() - with_their_own_tests == {
        *("state.py", "report_file.py", "counters.py", "_deadline.py"),
    }
    assert all("os.register_at_fork(after_in_child=" in texts[name] for name in texts.keys() - with_their_own_tests)
