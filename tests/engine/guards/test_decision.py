"""The one decision: the table in docs/architecture.md, case by case, for the engine, for doctor and for check."""

from __future__ import annotations

import dataclasses
import importlib.util
import py_compile
import re
import sys
from pathlib import Path

import pytest

from rlhf_patches import CoInstalled, DefinitionError, Guard, Replace, Rewrite, Shape, Status, Variant, Wrap
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.guards.fingerprints import fingerprint
from rlhf_patches.offline import archive, evaluate
from rlhf_patches.testing.cases import write_metadata

ROOT = Path(__file__).parents[3]
BUG = "def add(a, b):\n    return a - b\n"
OTHER = "def add(a, b):\n    return a * b\n"


def table():
    """The rows of the page, as dictionaries by the first word of the heading."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## The decision\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0]: tuple(row[1:]) for row in rows[2:]}


TABLE = table()


class World:
    """A framework, the patches that are asked about (the last one counts), and whether its modules are imported."""

    def __init__(self, framework, monkeypatch):
        self.framework, self.monkeypatch = framework, monkeypatch
        self.loads = True
        self.guard = {}
        self.patches = []
        self.framework.write("mod", BUG)

    def version(self, text):
        """Make the metadata say so; None removes them, "" leaves the field out."""
        for folder in self.framework.site.glob("*.dist-info"):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        if text is not None:
            self.framework.metadata(text or None)
        importlib.invalidate_caches()

    def rewrite(self, target="mod:add", pattern="$A - $B", replacement="$A + $B", **options):
        return Rewrite(self.framework.path(target), pattern, replacement, **options)

    def replace(self, implementation):
        target = self.framework.path("mod:add")
        return Replace(target, self.framework.path(implementation), {fingerprint(BUG, "add"): "1.0"})

    def wrap(self, implementation):
        target = self.framework.path("mod:add")
        return Wrap(target, self.framework.path(implementation), {fingerprint(BUG, "add"): "1.0"})

    def variants(self, *variants, **options):
        """Register a patch; each variant is a range and its changes."""
        made = tuple(
            Variant(Guard(self.framework.distribution, versions, **self.guard), tuple(changes), **options)
            for versions, *changes in variants
        )
        name = f"{self.framework.name}-{'abc'[len(self.patches)]}"
        self.patches.append(dataclasses.replace(self.framework.patch(*made[0].changes, name=name), variants=made))

    def patch(self, *changes):
        self.variants((">=1,<2", *(changes or (self.rewrite(),))))

    def advice(self):
        self.patches.append(self.framework.advice(Shape(self.framework.path("mod:add"), "$A - $B"), versions=">=1,<2"))

    def without_source(self):
        file = self.framework.write("mod", BUG)
        py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")))
        file.unlink()
        importlib.invalidate_caches()

    def without(self, module):
        (self.framework.site / self.framework.name / f"{module}.py").unlink()
        importlib.invalidate_caches()

    def load(self):
        """Import every module that there is."""
        for module in ("mod", "old", "new"):
            try:
                self.framework.load(module)
            except ModuleNotFoundError:
                continue


def two_places(world):
    """The same bug in ``old`` up to 2, and in ``new`` from then on."""
    world.framework.write("old", BUG)
    world.framework.write("new", BUG)
    world.variants((">=1,<2", world.rewrite("old:add")), (">=2,<3", world.rewrite("new:add")))


def neighbor(version, installed=True):
    """Another package, beside some versions of which alone the defect shows; None for one without metadata."""

    def make(world):
        name = f"{world.framework.name}_neighbor"
        world.version("1.0")
        world.guard = {"co_installed": CoInstalled(name.replace("_", "-"), ">=3,<=5", package=name)}
        world.patch()
        if installed:
            (world.framework.site / name).mkdir()
            (world.framework.site / name / "__init__.py").touch()
        if version is not None:
            write_metadata(world.framework.site, name.replace("_", "-"), version)
        importlib.invalidate_caches()

    return make


def nothing(world):
    world.version(None)
    world.without("mod")
    world.patch()


def module_missing(world, version="1.0"):
    world.version(version)
    world.without("mod")
    world.patch()


def package_missing(world):
    world.variants((">=1,<2", Rewrite("no_such_package.mod:add", "$A - $B", "$A + $B")))


def allowed(world):
    world.guard = {"may_be_missing": "the package is in git only"}
    module_missing(world)


def text(version, content=BUG):
    def make(world):
        world.version(version)
        world.framework.write("mod", content)
        world.patch()

    return make


def not_imported(world):
    world.patch()
    world.loads = False


def no_source(version):
    def make(world):
        world.version(version)
        world.without_source()
        world.patch()

    return make


def of_variants(version, *files):
    def make(world):
        world.version(version)
        two_places(world)
        for module, content in files:
            if content is None:
                world.without(module)
            else:
                world.framework.write(module, content)

    return make


def part_of_another(world):
    world.version(None)
    world.framework.write("old", BUG)
    one, other = world.rewrite("mod:add"), world.rewrite("old:add")
    world.variants((">=1,<2", one), (">=2,<3", one, other))


def implementation(kind, fixes):
    def make(world):
        if fixes is not None:
            world.framework.write("fixes", fixes)
        if kind == "uses":
            uses = {"FIX": world.framework.path("fixes:add")}
            world.patch(world.rewrite(replacement="$FIX($A, $B)", uses=uses))
        else:
            world.patch(getattr(world, kind)("fixes:add"))

    return make


def undefined(world):
    world.patch(world.rewrite(replacement="torhc.add($A, $B)"))


def asynchronous(world):
    text = "async def add(a, b):\n    yield a - b\n"
    world.framework.write("mod", text)
    world.framework.write("fixes", "def add(*args): return 1\n")
    prints = {fingerprint(text, "add"): "1.0"}
    world.patch(Wrap(world.framework.path("mod:add"), world.framework.path("fixes:add"), prints))


def other_parameters(world):
    world.patch(world.rewrite(pattern="def add(a, b): $$$BODY", replacement="def add(a, c): return a"))


def beside(first, second):
    def make(world):
        world.framework.write("fixes", "def around(wrapped, instance, args, kwargs): return 1\n")
        kinds = {"rewrite": world.rewrite, "wrap": lambda: world.wrap("fixes:around")}
        world.patch(kinds[first]())
        world.patch(kinds[second]())

    return make


def switched_off(world):
    world.patch()
    world.monkeypatch.setenv("RLHF_PATCHES_DISABLE", world.patches[0].name)


def advised(version, content=BUG):
    """An advice, of a module with this text or, if None, without it."""

    def make(world):
        world.version(version)
        world.framework.write("mod", content or "")
        if content is None:
            world.without("mod")
        world.advice()

    return make


def contested(case, asked=False):
    """A patch that upstream contests, in a case; asked for by its name or not."""

    def make(world):
        case(world)
        world.patches[-1] = dataclasses.replace(world.patches[-1], contested="upstream says otherwise")
        if asked:
            world.monkeypatch.setenv("RLHF_PATCHES_ENABLE", world.patches[-1].name)

    return make


CASES = {
    "nothing of the framework is there": nothing,
    "version affected, code recognized": text("1.0"),
    "the same, module not imported yet": not_imported,
    "version affected, code different": text("1.0", OTHER),
    "version affected, no source": no_source("1.0"),
    "version affected, module missing": module_missing,
    "version affected, whole package missing": package_missing,
    "the same, which the guard allows": allowed,
    "version outside, code different": text("2.0", OTHER),
    "version outside, code recognized": text("2.0"),
    "version outside, module missing": lambda world: module_missing(world, "2.0"),
    "version unknown, code recognized": text(None),
    "version unknown, code different": text(None, OTHER),
    "version unknown, no source": no_source(None),
    "version unknown, module missing": lambda world: module_missing(world, ""),
    "version of one variant, and its code": of_variants("2.0", ("old", None)),
    "version of one variant, code of another": of_variants("2.0", ("new", OTHER)),
    "version of one variant, whose module is missing": of_variants("2.0", ("new", None)),
    "version of no variant, code of one": of_variants("3.0", ("new", OTHER)),
    "version unknown, code of one variant": of_variants(None, ("new", OTHER)),
    "version unknown, code of two variants": of_variants(None),
    "version unknown, one variant is part of another": part_of_another,
    "with another package, in its range": neighbor("3.0"),
    "with another package, outside its range": neighbor("2.0"),
    "with another package, newer than reviewed": neighbor("6.0"),
    "with another package, its version unknown": neighbor(None),
    "with another package that is not installed": neighbor(None, installed=False),
    "implementation: its module missing": implementation("replace", None),
    "implementation: not in its module": implementation("wrap", "def other(): pass\n"),
    "implementation: cannot be called": implementation("replace", "add = 5\n"),
    "implementation of a wrap: other parameters": implementation("wrap", "def add(wrapped, args): return 1\n"),
    "implementation of a replacement: other parameters": implementation("replace", "add = lambda a: a\n"),
    "what a rewrite uses: not in its module": implementation("uses", "def other(): pass\n"),
    "rewrite: a name that nothing defines": undefined,
    "rewrite: the function gets other parameters": other_parameters,
    "wrap or replacement of an asynchronous generator": asynchronous,
    "another patch rewrites the same code": beside("rewrite", "rewrite"),
    "another patch wraps the function": beside("wrap", "rewrite"),
    "another patch rewrites what this one wraps": beside("rewrite", "wrap"),
    "switched off by a variable": switched_off,
    "contested, and not asked for by name": contested(text("1.0")),
    "contested, asked for by name": contested(text("1.0"), asked=True),
    "contested, and outside its range": contested(text("2.0")),
    "contested, and nothing of the framework is there": contested(nothing),
    "advice: version affected, code recognized": advised("1.0"),
    "advice: version affected, code different": advised("1.0", OTHER),
    "advice: version affected, module missing": advised("1.0", None),
    "advice: version outside, code different": advised("2.0", OTHER),
    "advice: version outside, code recognized": advised("2.0"),
    "advice: version unknown, code recognized": advised(None),
    "advice: version unknown, code different": advised(None, OTHER),
}


def test_the_table_has_every_case():
    assert list(TABLE) == list(CASES)


@pytest.fixture
def world(framework, monkeypatch):
    return World(framework, monkeypatch)


@pytest.mark.parametrize("imported", ["first", "last"])
@pytest.mark.parametrize("case", CASES)
def test_engine_doctor_and_check(world, engine, case, imported):
    CASES[case](world)
    registered = [Registered(patch, "tests") for patch in world.patches]
    *_, doctor = evaluate.inspect(registered)
    *_, check = evaluate.check(archive.open_release(str(world.framework.site)), registered)
    made = engine(*world.patches)
    if world.loads and imported == "first":
        world.load()
    made.apply()
    if world.loads and imported == "last":
        world.load()
    *_, row = made.report()

    status, words = TABLE[case]
    applied, _, checked = status.rstrip(")").partition(" (check: ")
    judged = "applies" if applied in ("applied", "pending") else applied
    statuses = [applied, judged, checked or judged]
    assert [row.status, doctor.status, check.status] == statuses, (row.reason, doctor.reason, check.reason)
    assert row.unreviewed == doctor.unreviewed == check.unreviewed == ("but its code has the defect" in words)
    assert words in row.reason
    assert words in doctor.reason
    assert words in check.reason
    expected = doctor.reason.removesuffix(evaluate.SEARCHED).removesuffix(", and the code is recognized")
    assert re.sub("; (nothing was changed|waiting for .*)$", "", row.reason) == expected


# --------------------------------------------------------------------------------- several modules, several variants


@pytest.fixture
def trainers(world):
    """Two modules of one release; neither imports the other."""
    world.framework.write("old", BUG)
    world.framework.write("new", BUG)
    return world


def both_modules(world, **options):
    world.variants((">=1,<2", world.rewrite("old:add"), world.rewrite("new:add")), **options)


@pytest.mark.parametrize("first", ["old", "new"])
def test_independent_modules_are_patched_as_they_are_imported(trainers, engine, first):
    both_modules(trainers, independent=True)
    second = {"old": "new", "new": "old"}[first]
    made = engine(*trainers.patches)
    (row,) = made.apply()
    assert row.status is Status.PENDING
    one = trainers.framework.load(first)
    (row,) = made.report()
    assert (row.status, one.add(2, 1)) == (Status.APPLIED, 3)
    assert f"waiting for the import of {trainers.framework.path(second)}, which it also patches" in row.reason
    assert made.apply().patches == (row,)
    other = trainers.framework.load(second)
    (row,) = made.report()
    assert (row.status, one.add(2, 1), other.add(2, 1)) == (Status.APPLIED, 3, 3)
    assert "waiting" not in row.reason
    made.revert()
    assert (one.add(2, 1), other.add(2, 1)) == (1, 1)


def test_independent_modules_are_decided_together(trainers, engine):
    """The text of the module that is not imported counts."""
    both_modules(trainers, independent=True)
    trainers.framework.write("new", OTHER)
    made = engine(*trainers.patches)
    made.apply()
    old = trainers.framework.load("old")
    (row,) = made.report()
    assert (row.status, old.add(2, 1)) == (Status.REFUSED, 1)
    assert "nothing was changed" in row.reason


def test_an_independent_module_that_is_refused_later_says_what_stays(trainers, engine):
    both_modules(trainers, independent=True)
    made = engine(*trainers.patches)
    made.apply()
    old = trainers.framework.load("old")
    trainers.framework.write("new", OTHER)
    new = trainers.framework.load("new")
    (row,) = made.report()
    assert (row.status, old.add(2, 1), new.add(2, 1)) == (Status.REFUSED, 3, 2)
    assert "functions that were patched before stay patched" in row.reason


def test_an_independent_module_that_was_imported_past_the_hooks_shows(trainers, engine, monkeypatch):
    both_modules(trainers, independent=True)
    made = engine(*trainers.patches)
    made.apply()
    trainers.framework.load("old")
    name = trainers.framework.path("new")
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    source = Path(spec.origin).read_text()
    exec(compile(source, spec.origin, "exec", dont_inherit=True), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    (row,) = made.report()
    reason = f"{name} was imported without the import hooks; call apply() again"
    assert (row.status, row.reason) == (Status.FAILED, reason)
    (row,) = made.apply()
    assert (row.status, module.add(2, 1)) == (Status.APPLIED, 3)


def test_modules_that_are_not_independent_wait_for_each_other(trainers, engine):
    both_modules(trainers)
    made = engine(*trainers.patches)
    made.apply()
    old = trainers.framework.load("old")
    assert (made.report().patches[0].status, old.add(2, 1)) == (Status.PENDING, 1)


def test_only_the_variant_in_question_is_waited_for(world, engine):
    two_places(world)
    world.version("2.0")
    made = engine(*world.patches)
    (row,) = made.apply()
    assert (row.status, row.version) == (Status.PENDING, "2.0")
    assert row.reason.endswith(f"; waiting for the import of {world.framework.path('new')}")
    old = world.framework.load("old")
    assert (made.report().patches[0].status, old.add(2, 1)) == (Status.PENDING, 1)
    new = world.framework.load("new")
    assert (made.report().patches[0].status, old.add(2, 1), new.add(2, 1)) == (Status.APPLIED, 1, 3)


def test_an_unknown_version_waits_for_the_module_whose_code_it_is(world, engine):
    two_places(world)
    world.version(None)
    world.framework.write("new", OTHER)
    made = engine(*world.patches)
    (row,) = made.apply()
    old_name, new_name = world.framework.path("old"), world.framework.path("new")
    assert row.reason.endswith(f"; waiting for the import of {old_name} or {new_name}")
    world.framework.load("new")
    (row,) = made.report()
    assert (row.status, row.reason.endswith(f"; waiting for the import of {old_name}")) == (Status.PENDING, True)
    old = world.framework.load("old")
    assert (made.report().patches[0].status, old.add(2, 1)) == (Status.APPLIED, 3)


def test_the_implementations_of_another_variant_are_not_imported(world, engine):
    world.framework.write("fixes", "raise ZeroDivisionError('of another release')\n")
    one = world.rewrite()
    other = world.rewrite(pattern="$A * $B", replacement="$FIX", uses={"FIX": world.framework.path("fixes:add")})
    world.variants((">=1,<2", one), (">=2,<3", other))
    world.load()
    (row,) = engine(*world.patches).apply()
    assert row.status is Status.APPLIED
    assert world.framework.path("fixes") not in sys.modules


# --------------------------------------------------------------------------------------- what is put in


def test_doctor_reads_an_implementation_and_does_not_import_it(world):
    world.framework.write("fixes", "raise ZeroDivisionError\ndef add(a, b): return a + b\n")
    world.patch(world.replace("fixes:add"))
    (row,) = evaluate.inspect([Registered(world.patches[0], "tests")])
    assert row.status is Status.APPLIES
    assert not [name for name in sys.modules if name.startswith(world.framework.name)]


DECORATOR = "def some(decorator): return lambda *args: 1\n"


@pytest.mark.parametrize(
    "fixes",
    [
        f"{DECORATOR}@some\ndef add(a): return a\n",
        "class add:\n    def __init__(self, a): pass\n",
        "from fixes_elsewhere import *\n",
        "import functools\nadd = functools.partial(max, 1)\n",
        "def __getattr__(name): raise AttributeError(name)\n",
        "globals()['add'] = 1\n",
        "def set_up():\n    global add\n    add = 1\n",
        "if 1:\n    def add(a): return a\nelse:\n    def add(a, b): return a\n",
        "try:\n    from fixes_elsewhere import add\nexcept ImportError:\n    add = None\n",
        "with open(__file__) as add: pass\n",
        "for add in (): pass\n",
        "def add(:",
    ],
)
def test_where_the_text_cannot_tell_nothing_is_said(world, fixes):
    world.framework.write("fixes", fixes)
    world.patch(world.replace("fixes:add"))
    (row,) = evaluate.inspect([Registered(world.patches[0], "tests")])
    assert (row.status, row.reason.count(" but ")) == (Status.APPLIES, 0)


def test_apply_asks_the_object_where_the_text_cannot_tell(world, engine):
    world.framework.write("fixes", "import functools\nadd = functools.partial(lambda a, b: a, 1)\n")
    world.patch(world.replace("fixes:add"))
    mod = world.framework.load()
    (row,) = engine(*world.patches).apply()
    assert (row.status, mod.add(2, 1)) == (Status.FAILED, 1)
    assert "fixes:add takes (b), but is called with the parameters of" in row.reason


@pytest.mark.parametrize(
    ("target", "fits", "does_not"),
    [
        ("a, b", ["a, b", "x, y, z=1", "*args", "a, *rest, **more"], ["a", "a, *, b", "a, b, c", "a, b, *, c", ""]),
        ("a, b=1", ["a, b", "*args"], ["a"]),
        ("a, *args", ["a, *args", "*args"], ["a", "a, b=1, c=2"]),
        ("a, *, b", ["a, *, b", "a, b", "a, **kwargs", "a, *, b, c=1"], ["a", "a, *, c", "a, b, /", "*args"]),
        ("a, **kwargs", ["a, **kwargs", "*args, **kwargs"], ["a", "a, *, b=1"]),
        ("a, /, b", ["a, b", "b, a"], ["a"]),
    ],
)
def test_what_a_replacement_has_to_take(world, target, fits, does_not):
    text = f"def add({target}): return 1\n"
    world.framework.write("mod", text)
    prints = {fingerprint(text, "add"): "1.0"}
    world.patch(Replace(world.framework.path("mod:add"), world.framework.path("fixes:add"), prints))

    def status(parameters):
        world.framework.write("fixes", f"def add({parameters}): return 1\n")
        (row,) = evaluate.inspect([Registered(world.patches[0], "tests")])
        return row.status

    assert [status(parameters) for parameters in fits] == [Status.APPLIES] * len(fits)
    assert [status(parameters) for parameters in does_not] == [Status.FAILED] * len(does_not)


@pytest.mark.parametrize(
    ("before", "replacement"),
    [
        ("", "sum(($A, $B))"),
        ("import operator\n", "operator.add($A, $B)"),
        ("def helper(a, b): return a + b\n", "helper($A, $B)"),
        ("def set_up():\n    global helper\n    helper = max\n", "helper($A, $B)"),
        ("from operator import *\n", "add_($A, $B)"),
        ("globals()['helper'] = max\n", "helper($A, $B)"),
        ("", "$A + int(__name__ != '') * $B"),
        ("", "[one for one in ($A, $B)]"),
        ("", "(lambda c: $A + c)($B)"),
        ("", "(c := $A) + $B - c + c"),
    ],
)
def test_names_that_something_defines(world, engine, before, replacement):
    world.framework.write("mod", before + BUG)
    world.patch(world.rewrite(replacement=replacement))
    world.load()
    assert [row.status for row in engine(*world.patches).apply()] == [Status.APPLIED]


def test_a_name_that_was_undefined_before_is_not_the_patchs_fault(world, engine):
    """Upstream's own: the function may be one that nobody calls."""
    world.framework.write("mod", "def add(a, b):\n    return a - b if a else nowhere\n")
    world.patch(world.rewrite())
    mod = world.framework.load()
    (row,) = engine(*world.patches).apply()
    assert (row.status, mod.add(2, 1)) == (Status.APPLIED, 3)


@pytest.mark.parametrize(
    "replacement", ["mod.add", "$A.nowhere + nowhere", "[nowhere for _ in ($A, $B)]", "lambda: nowhere"]
)
def test_names_that_nothing_defines(world, engine, replacement):
    world.patch(world.rewrite(replacement=replacement))
    mod = world.framework.load()
    (row,) = engine(*world.patches).apply()
    assert (row.status, mod.add(2, 1)) == (Status.FAILED, 1)


# ------------------------------------------------------------------------------------- status and reason


def test_a_reason_never_belongs_to_another_status(world, engine):
    """`apply(A)`, other code changes A's function, `revert(A)`, `apply(only=B)`."""
    world.framework.write("old", BUG)
    world.patch()
    world.patch(world.rewrite("old:add"))
    a, b = (patch.name for patch in world.patches)
    mod, _ = world.framework.load(), world.framework.load("old")
    made = engine(*world.patches)
    made.apply(only=a)
    ours, theirs = mod.add.__code__, (lambda a, b: "theirs").__code__
    mod.add.__code__ = theirs
    assert made.revert(a)[a].status is Status.FAILED
    report = made.apply(only=b)
    assert report[b].status is Status.APPLIED
    assert report[a].status is Status.FAILED
    assert "but not reverted" in report[a].reason
    mod.add.__code__ = ours
    row = made.apply(only=b)[a]
    assert (row.status, row.reason) == (Status.DISABLED, "not chosen by apply(only=...)")


# ------------------------------------------------------------------------- what the code stands on is another


@pytest.mark.parametrize(
    ("field", "text", "applies"),
    [
        ("unless_defined", BUG, True),
        ("unless_defined", f"{BUG}def helper(): pass\n", False),
        ("where_defined", BUG, False),
        ("where_defined", f"{BUG}def helper(): pass\n", True),
        ("where_defined", f"{BUG}def helper_2(): pass\n", False),
    ],
)
@pytest.mark.parametrize(("version", "otherwise"), [("1.0", Status.REFUSED), (None, Status.UNAFFECTED)])
def test_functions_by_which_the_same_code_is_told_apart(world, engine, field, text, applies, version, otherwise):
    world.version(version)
    world.framework.write("mod", text)
    world.variants((">=1,<2", world.rewrite()), **{field: (world.framework.path("mod:helper"),)})
    world.load()
    (row,) = engine(*world.patches).apply()
    assert row.status is (Status.APPLIED if applies else otherwise), row.reason


def test_functions_elsewhere_are_refused():
    change = Rewrite("somelib.mod:add", "$A - $B", "$A + $B")
    for field in ("where_defined", "unless_defined"):
        with pytest.raises(
            DefinitionError, match=f"Variant.{field} names other:f: expected functions of the changed modules"
        ):
            Variant(Guard("somelib", ">=1,<2"), (change,), **{field: ("other:f",)})
