"""A module is patched whatever the order and manner of its import, and no code can tell that it was watched."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.machinery
import importlib.resources
import importlib.util
import inspect
import os
import pickle
import pkgutil
import sys
import threading
import warnings
import zipfile
from types import ModuleType, SimpleNamespace

import pytest
import wrapt

import rlhf_patches
from rlhf_patches import PatchError, Replace, Rewrite, Status, import_system
from rlhf_patches.engine import import_hooks
from rlhf_patches.guards.fingerprints import fingerprint

BUG = "def add(a, b):\n    return a - b\n"
FIXED, BROKEN = 3, 1  # add(2, 1)
_TIMEOUT = 30  # seconds, until a test that hangs fails


@pytest.fixture
def repair(framework, engine):
    """Makes an engine that repairs ``add`` in each of the modules, one patch a module."""

    def make(*modules):
        return engine(
            *(
                framework.patch(
                    Rewrite(f"{_full(framework, module)}:add", "$A - $B", "$A + $B"),
                    name=f"{framework.name}-bug{number}",
                )
                for number, module in enumerate(modules or ("mod",))
            )
        )

    return make


@pytest.fixture
def call(monkeypatch):
    """What a module calls in the middle of its body: ``import rlhf_test_call; rlhf_test_call.now()``."""
    made = SimpleNamespace(now=lambda: None)
    monkeypatch.setitem(sys.modules, "rlhf_test_call", made)
    return made


@pytest.fixture
def meta_path(monkeypatch):
    """A copy of sys.meta_path that a test may change."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return sys.meta_path


def _full(framework, module):
    return f"{framework.name}.{module}" if module else framework.name


def _statuses(engine):
    return {patch.status for patch in engine.report()}


def _in_thread(function):
    """The result of a function in another thread; what it raises is raised here."""
    box = []

    def run():
        try:
            box.append((function(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    assert box, "the thread hangs"
    result, error = box[0]
    if error is not None:
        raise error
    return result


def _here(function):
    return function()


def _lazily(name):
    """The recipe of importlib's documentation."""
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------ the plain cases


@pytest.mark.parametrize("module", ["", "mod", "sub.deep.mod"])
@pytest.mark.parametrize("imported_first", [True, False])
@pytest.mark.parametrize("run", [_here, _in_thread])
def test_before_or_after_the_import(framework, repair, module, imported_first, run):
    framework.write(module, BUG)
    made = repair(module)
    if imported_first:
        run(lambda: framework.load(module))
        run(made.apply)
    else:
        run(made.apply)
        assert _statuses(made) == {Status.PENDING}
        run(lambda: framework.load(module))
    assert framework.load(module).add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


def test_not_after_revert(framework, repair):
    framework.write("mod", BUG)
    made = repair()
    made.apply()
    made.revert()
    assert framework.load().add(2, 1) == BROKEN
    made.apply()
    assert framework.load().add(2, 1) == FIXED


def test_two_threads_import_at_once(framework, repair, call):
    framework.write("mod", f"import rlhf_test_call; rlhf_test_call.now()\n{BUG}")
    made = repair()
    made.apply()
    begun, go_on = threading.Event(), threading.Event()
    call.now = lambda: (begun.set(), go_on.wait(_TIMEOUT))
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(framework.load().add(2, 1)), daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(_TIMEOUT)
    go_on.set()
    for thread in threads:
        thread.join(_TIMEOUT)
    assert results == [FIXED, FIXED]


@pytest.mark.parametrize("last", ["child", "parent"])
def test_parents_and_children_that_import_each_other(framework, repair, last):
    framework.write("parent", "")
    (framework.site / framework.name / "parent.py").unlink()
    framework.write("parent.child", BUG)
    framework.write("parent.other", "from . import child, add\n" + BUG.replace("add", "unused"))
    (framework.site / framework.name / "parent" / "__init__.py").write_text(f"{BUG}from .child import add as childs\n")
    made = repair("parent", "parent.child")
    made.apply()
    framework.load({"child": "parent.child", "parent": "parent"}[last])
    parent = framework.load("parent")
    assert (parent.add(2, 1), parent.childs(2, 1), parent.child.add(2, 1)) == (FIXED, FIXED, FIXED)
    assert framework.load("parent.other").add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


def test_circular_imports(framework, repair):
    framework.write("mod", f"from . import other\n{BUG}")
    framework.write("other", f"from . import mod\n{BUG}")
    made = repair("mod", "other")
    made.apply()
    assert framework.load("mod").add(2, 1) == framework.load("other").add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


def test_a_patch_of_two_modules_waits_for_both(framework, engine):
    framework.write("mod", BUG)
    framework.write("other", BUG)
    made = engine(
        framework.patch(*(Rewrite(framework.path(f"{name}:add"), "$A - $B", "$A + $B") for name in ("mod", "other")))
    )
    made.apply()
    assert framework.load("mod").add(2, 1) == BROKEN
    assert _statuses(made) == {Status.PENDING}
    assert framework.load("other").add(2, 1) == FIXED
    assert framework.load("mod").add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


# --------------------------------------------------------------------------------------------- lazy modules


@pytest.mark.parametrize("created_first", [True, False])
@pytest.mark.parametrize("watched_again", [True, False])
def test_lazy_modules_are_patched_when_they_load_and_not_before(framework, repair, call, created_first, watched_again):
    framework.write("mod", f"import rlhf_test_call; rlhf_test_call.now()\n{BUG}")
    ran = []
    call.now = lambda: ran.append(1)
    made = repair()
    if created_first:
        module = _lazily(_full(framework, "mod"))
        made.apply()
    else:
        made.apply()
        module = _lazily(_full(framework, "mod"))
    if watched_again:
        made.apply()
    made.report()
    assert not ran
    assert _statuses(made) == {Status.PENDING}
    assert module.add(2, 1) == FIXED
    assert ran == [1]
    assert _statuses(made) == {Status.APPLIED}


def test_a_finder_of_lazy_modules(framework, repair, call, meta_path):
    framework.write("mod", f"import rlhf_test_call; rlhf_test_call.now()\n{BUG}")
    ran = []
    call.now = lambda: ran.append(1)

    class Lazy:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == _full(framework, "mod"):
                spec = importlib.machinery.PathFinder.find_spec(name, path)
                spec.loader = importlib.util.LazyLoader(spec.loader)
                return spec

    meta_path.insert(meta_path.index(importlib.machinery.PathFinder), Lazy)
    made = repair()
    made.apply()
    module = framework.load()
    assert not ran
    assert _statuses(made) == {Status.PENDING}
    assert module.add(2, 1) == FIXED
    assert ran == [1]
    assert _statuses(made) == {Status.APPLIED}


# -------------------------------------------------------------------------------------- half-imported modules


@pytest.mark.parametrize("run", [_here, _in_thread])
def test_apply_in_the_middle_of_the_module(framework, repair, call, run):
    """The module itself applies (by way of something that it imports), or another thread does meanwhile."""
    framework.write("mod", f"import rlhf_test_call; rlhf_test_call.now()\n{BUG}")
    made = repair()
    seen = []
    call.now = lambda: seen.append(run(made.apply)[f"{framework.name}-bug0"].status)
    assert framework.load().add(2, 1) == FIXED
    assert seen == [Status.PENDING]
    assert _statuses(made) == {Status.APPLIED}
    spec = framework.load().__spec__
    assert type(spec) is importlib.machinery.ModuleSpec
    assert not spec._initializing


def test_apply_in_the_middle_of_a_module_that_then_fails(framework, repair, call):
    framework.write("mod", f"import rlhf_test_call; rlhf_test_call.now()\n{BUG}")
    made = repair()

    def now():
        made.apply()
        raise ZeroDivisionError

    call.now = now
    with pytest.raises(ZeroDivisionError):
        framework.load()
    assert _statuses(made) == {Status.PENDING}
    call.now = lambda: None
    assert framework.load().add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


def test_apply_in_the_middle_of_a_circle(framework, repair, call):
    framework.write("mod", f"from . import other\n{BUG}")
    framework.write("other", f"from . import mod\nimport rlhf_test_call; rlhf_test_call.now()\n{BUG}")
    made = repair("mod", "other")
    call.now = made.apply
    assert framework.load("mod").add(2, 1) == framework.load("other").add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


@pytest.mark.parametrize("watched_before", [True, False])
def test_strict_mode_fails_the_import(framework, repair, call, watched_before):
    framework.write("mod", f"import rlhf_test_call; rlhf_test_call.now()\n{BUG.replace('-', '*')}")
    made = repair()
    call.now = lambda: made.apply(strict=True)
    if watched_before:
        made.apply(strict=True)
    for _ in range(2):
        with pytest.raises(PatchError, match="0 times, expected 1"):
            framework.load()
        assert _full(framework, "mod") not in sys.modules
        assert _statuses(made) == {Status.REFUSED}


def test_revert_in_the_middle_of_the_module(framework, repair, call):
    framework.write("mod", f"import rlhf_test_call; rlhf_test_call.now()\n{BUG}")
    made = repair()
    call.now = lambda: (made.apply(), made.revert())
    assert framework.load().add(2, 1) == BROKEN
    assert _statuses(made) == {Status.DISABLED}


# ---------------------------------------------------------------------------------- imported more than once


@pytest.mark.parametrize("imported_first", [True, False])
def test_reload(framework, repair, imported_first):
    framework.write("mod", BUG)
    made = repair()
    if not imported_first:
        made.apply()
    module = framework.load()
    adds = [module.add]
    made.apply()
    for _ in range(3):
        importlib.reload(module)
        adds.append(module.add)
        assert [add(2, 1) for add in adds] == [FIXED] * len(adds)
        assert _statuses(made) == {Status.APPLIED}
    assert len(set(adds)) == 4
    made.revert()
    assert [add(2, 1) for add in adds] == [BROKEN] * 4
    importlib.reload(module)
    assert module.add(2, 1) == BROKEN
    made.apply()
    assert module.add(2, 1) == FIXED


def test_reload_of_a_module_that_was_mended_meanwhile(framework, repair):
    file = framework.write("mod", BUG)
    made = repair()
    made.apply()
    module = framework.load()
    file.write_text(BUG.replace("a - b", "a + b  # mended upstream"))
    importlib.reload(module)
    assert module.add(2, 1) == FIXED
    assert _statuses(made) == {Status.REFUSED}
    assert "'$A - $B' 0 times" in next(iter(made.report())).reason


@pytest.mark.parametrize("reported_meanwhile", [True, False])
def test_deleted_from_sys_modules_and_imported_again(framework, repair, reported_meanwhile):
    framework.write("mod", BUG)
    made = repair()
    made.apply()
    old = framework.load().add
    for _ in range(2):
        del sys.modules[_full(framework, "mod")]
        if reported_meanwhile:
            assert _statuses(made) == {Status.FAILED}
            assert "no longer imported" in next(iter(made.report())).reason
        new = framework.load().add
        assert new is not old
        assert (old(2, 1), new(2, 1)) == (FIXED, FIXED)
        assert _statuses(made) == {Status.APPLIED}
    made.revert()
    assert (old(2, 1), new(2, 1)) == (BROKEN, BROKEN)


def test_first_import_fails_second_succeeds(framework, repair, call):
    framework.write("mod", f"{BUG}import rlhf_test_call; rlhf_test_call.now()\n")
    made = repair()
    made.apply()
    call.now = lambda: 1 / 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            framework.load()
        assert _statuses(made) == {Status.PENDING}
    call.now = lambda: None
    assert framework.load().add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


# ------------------------------------------------------------------------------------- other people's hooks


@pytest.mark.parametrize("theirs_first", [True, False])
def test_somebody_elses_wrapt_hook_raises(framework, repair, theirs_first):
    framework.write("mod", BUG)
    made = repair()

    def register():
        wrapt.register_post_import_hook(lambda module: 1 / 0, _full(framework, "mod"))

    if theirs_first:
        register()
        made.apply()
    else:
        made.apply()
        register()
    with pytest.raises(ZeroDivisionError):
        framework.load()
    assert framework.load().add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


def test_somebody_elses_wrapt_hook_still_runs(framework, repair):
    framework.write("mod", BUG)
    called = []
    wrapt.register_post_import_hook(lambda module: called.append(("before", module)), _full(framework, "mod"))
    made = repair()
    made.apply()
    wrapt.register_post_import_hook(lambda module: called.append(("after", module)), _full(framework, "mod"))
    module = framework.load()
    assert called == [("before", module), ("after", module)]
    assert module.add(2, 1) == FIXED


@pytest.mark.parametrize("place", [0, None], ids=["in front", "behind"])
def test_a_finder_that_asks_all_others_is_asked_once(framework, repair, meta_path, place):
    """As some tracers do. Nothing keeps it from asking us, who ask it."""
    framework.write("mod", BUG)
    repair().apply()
    asked = []

    class AsksAllOthers:
        def find_spec(self, name, path=None, target=None):
            asked.append(name)
            specs = (other.find_spec(name, path, target) for other in sys.meta_path if other is not self)
            return next((spec for spec in specs if spec is not None), None)

    # Behind ours and before Python's own, or in front of ours.
    meta_path.insert(1 if place is None else place, AsksAllOthers())
    assert framework.load().add(2, 1) == FIXED
    assert asked.count(framework.path("mod")) == 1


@pytest.mark.parametrize("kind", ["delegates", "asks the path finder", "finds nothing"])
def test_somebody_elses_finder_in_front(framework, repair, meta_path, kind):
    framework.write("mod", BUG)
    made = repair()
    made.apply()

    class Front:
        busy = False

        def find_spec(self, name, path=None, target=None):
            if self.busy or not name.startswith(framework.name) or kind == "finds nothing":
                return None
            if kind == "asks the path finder":
                return importlib.machinery.PathFinder.find_spec(name, path, target)
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    meta_path.insert(0, Front())
    module = framework.load()
    if kind == "asks the path finder":
        # It keeps ours from hearing of the import. No silence then, and apply() goes to the front again.
        assert _statuses(made) == {Status.FAILED}
        assert "imported without the import hooks; call apply() again" in next(iter(made.report())).reason
        made.apply()
    assert _statuses(made) == {Status.APPLIED}
    assert module.add(2, 1) == FIXED
    made.apply()
    assert type(sys.meta_path[0]) is not Front
    assert len(sys.meta_path) == len(set(map(id, sys.meta_path)))
    importlib.reload(module)
    assert _statuses(made) == {Status.APPLIED}
    assert module.add(2, 1) == FIXED


def test_put_into_sys_modules_by_hand(framework, repair):
    file = framework.write("mod", BUG)
    made = repair()
    made.apply()
    name = _full(framework, "mod")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    assert _statuses(made) == {Status.FAILED}
    made.apply()
    assert _statuses(made) == {Status.APPLIED}
    assert module.add(2, 1) == FIXED


def test_a_loader_of_the_old_protocol_still_works(framework, repair, meta_path):
    if sys.version_info >= (3, 15):
        pytest.skip("load_module() is gone")
    framework.write("mod", BUG)
    name = _full(framework, "mod")

    class Old:
        @staticmethod
        def find_spec(fullname, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, Old) if fullname == name else None

        @staticmethod
        def load_module(fullname):
            module = sys.modules[fullname] = ModuleType(fullname)
            module.__spec__ = importlib.machinery.ModuleSpec(fullname, Old)
            exec(BUG, module.__dict__)
            return module

    meta_path.insert(meta_path.index(importlib.machinery.PathFinder), Old)
    made = repair()
    made.apply()
    with pytest.warns(ImportWarning):
        assert framework.load().add(2, 1) == BROKEN
    assert _statuses(made) == {Status.FAILED}
    made.apply()
    assert _statuses(made) == {Status.REFUSED}
    assert "no source file" in next(iter(made.report())).reason


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="find_module() is gone")
@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_a_finder_of_the_old_protocol_still_finds(framework, repair, meta_path):
    framework.write("mod", BUG)
    name = _full(framework, "mod")

    class Old:
        @staticmethod
        def find_module(fullname, path=None):
            return Old if fullname == name else None

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            module.found_by_old = True

    meta_path.insert(meta_path.index(importlib.machinery.PathFinder), Old)
    repair().apply()
    assert framework.load().found_by_old


# ------------------------------------------------------------------------------------ nobody can tell


SELF_PORTRAIT = "loader_in_body, spec_loader_in_body = __loader__, __spec__.loader\n" + BUG


@pytest.mark.parametrize("apply", [True, False])
def test_loaders_are_the_real_ones(framework, repair, apply):
    framework.write("mod", SELF_PORTRAIT)
    if apply:
        repair().apply()
    module = framework.load()

    def loaders():
        return [module.loader_in_body, module.spec_loader_in_body, module.__loader__, module.__spec__.loader]

    assert [type(loader) for loader in loaders()] == [importlib.machinery.SourceFileLoader] * 4
    importlib.reload(module)
    assert [type(loader) for loader in loaders()] == [importlib.machinery.SourceFileLoader] * 4
    assert type(module.__spec__) is importlib.machinery.ModuleSpec


def test_a_lazy_modules_loader_is_the_real_one(framework, repair):
    framework.write("mod", SELF_PORTRAIT)
    module = _lazily(_full(framework, "mod"))
    repair().apply()
    assert type(module.loader_in_body) is type(module.__loader__) is importlib.machinery.SourceFileLoader
    assert type(module.spec_loader_in_body) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert "exec_module" not in vars(module.__spec__.loader)


WITNESS = """\
import sys, warnings
frame, files = sys._getframe(), []
while frame := frame.f_back:
    files.append(frame.f_code.co_filename)
warnings.warn("old", DeprecationWarning, stacklevel=2)
def add(a, b):
    return a - b
"""


@pytest.mark.parametrize("how", ["import", "reload", "lazy", "half-imported"])
def test_no_frame_of_ours_is_on_the_stack_while_a_module_runs(framework, repair, call, how):
    """A warning with stacklevel=2 is the importer's, so that Python shows it or not as it would without us."""
    body = ("import rlhf_test_call; rlhf_test_call.now()\n" if how == "half-imported" else "") + WITNESS
    framework.write("mod", body)
    framework.write("control", body)
    made = repair()

    def seen(module, apply):
        """The files on the stack of the module's body, and those that its warning is attributed to."""
        name = _full(framework, module)
        call.now = apply
        loaded = _lazily(name) if how == "lazy" else None
        if how != "half-imported":
            apply()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if how == "reload":
                loaded = framework.load(module)
                warned.clear()
            loaded = importlib.reload(loaded) if how == "reload" else loaded or importlib.import_module(name)
            # Warnings and tracebacks pass over the import system's own frames.
            files = [file for file in loaded.files if not file.startswith("<frozen importlib._bootstrap")]
            return files, [item.filename for item in warned if str(item.message) == "old"]

    expected = seen("control", lambda: None)
    assert len(expected[1]) == 1
    assert seen("mod", made.apply) == expected
    assert framework.load().add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


@pytest.mark.parametrize("watched", [True, False])
def test_a_module_that_fails_has_the_traceback_that_it_would_have(framework, repair, watched):
    framework.write("mod", "1 / 0\n")
    if watched:
        repair().apply()
    with pytest.raises(ZeroDivisionError) as caught:
        exec(f"import {_full(framework, 'mod')}", {})
    assert [os.path.basename(str(entry.path)) for entry in caught.traceback[1:]] == ["<string>", "mod.py"]


def test_introspection_of_patched_modules(framework, repair):
    framework.write("sub.mod", BUG)
    package = framework.site / framework.name / "sub"
    (package / "__init__.py").write_text(BUG)
    (package / "data.txt").write_text("data")
    made = repair("sub", "sub.mod")
    made.apply()
    found = importlib.util.find_spec(_full(framework, "sub"))  # before the import, through every finder
    assert found.loader.get_data(found.origin) == BUG.encode()
    sub = framework.load("sub")
    module = framework.load("sub.mod")
    assert _statuses(made) == {Status.APPLIED}
    assert inspect.getsource(sub) == inspect.getsource(module) == BUG
    assert inspect.getsource(module.add) == BUG
    assert inspect.getsourcefile(module) == str(package / "mod.py")
    assert inspect.getmodule(module.add) is module
    assert [item.name for item in pkgutil.iter_modules(sub.__path__)] == ["mod"]
    assert pkgutil.get_data(sub.__name__, "data.txt") == b"data"
    assert importlib.resources.files(sub.__name__).joinpath("data.txt").read_text() == "data"
    assert importlib.util.find_spec(sub.__name__) is sub.__spec__


def test_find_spec_of_a_watched_module_imports_nothing(framework, repair):
    framework.write("mod", BUG)
    made = repair()
    made.apply()
    assert importlib.util.find_spec(_full(framework, "mod")) is not None
    assert importlib.util.find_spec(_full(framework, "nothing")) is None
    assert _full(framework, "mod") not in sys.modules
    assert _statuses(made) == {Status.PENDING}
    assert framework.load().add(2, 1) == FIXED


@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec)), lambda spec: spec]
)
def test_the_spec_of_a_watched_module_can_be_copied_and_pickled(framework, repair, twin):
    framework.write("mod", BUG)
    expected = importlib.util.find_spec(_full(framework, "mod"))
    repair().apply()
    found = twin(importlib.util.find_spec(_full(framework, "mod")))
    assert isinstance(found, importlib.machinery.ModuleSpec)
    assert (found, found.loader) == (expected, expected.loader)
    assert framework.load().add(2, 1) == FIXED


def test_apply_does_not_import_parents(framework, repair):
    framework.write("sub.mod", BUG)
    made = repair("sub.mod")
    made.apply()
    made.report()
    assert not [name for name in sys.modules if name.startswith(framework.name)]


# ---------------------------------------------------------------------------------- unusual ways to be stored


@pytest.mark.parametrize("imported_first", [True, False])
def test_zip_imports(framework, repair, monkeypatch, imported_first):
    archive = framework.site / "framework.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(f"{framework.name}/__init__.py", "")
        file.writestr(f"{framework.name}/mod.py", BUG)
    monkeypatch.syspath_prepend(str(archive))
    made = repair()
    if imported_first:
        framework.load()
    made.apply()
    assert framework.load().add(2, 1) == FIXED
    # The metadata beside the archive owns what is in it.
    report = next(iter(made.report()))
    assert (report.status, report.version) == (Status.APPLIED, "1.0")


@pytest.mark.parametrize("imported_first", [True, False])
def test_namespace_packages(framework, repair, tmp_path, monkeypatch, imported_first):
    """Nested ones, of two portions, whose parents are not imported."""
    other = tmp_path / "other-site"
    monkeypatch.syspath_prepend(str(other))
    for site, module in ((other, "first"), (framework.site, "second")):
        folder = site / framework.name / "space"
        folder.mkdir(parents=True)
        (folder / f"{module}.py").write_text(BUG)
    made = repair("space.first", "space.second")
    if imported_first:
        framework.load("space.first")
        framework.load("space.second")
    report = made.apply()
    if not imported_first:
        assert _statuses(made) == {Status.PENDING}
        assert not [name for name in sys.modules if name.startswith(framework.name)]
    assert framework.load("space.first").add(2, 1) == framework.load("space.second").add(2, 1) == FIXED
    report = made.report()
    assert _statuses(made) == {Status.APPLIED}
    assert [patch.version for patch in report] == [None, "1.0"]  # the metadata owns one portion only


@pytest.mark.parametrize("with_spec", [True, False])
@pytest.mark.parametrize("imported_first", [True, False])
def test_replaced_in_sys_modules_by_its_own_body(framework, repair, with_spec, imported_first):
    framework.write(
        "mod",
        f"""\
        import sys, types

        def add(a, b):
            return a - b

        class Stand(types.ModuleType):
            pass

        stand = Stand(__name__)
        stand.__file__ = __file__
        if {with_spec}:
            stand.__spec__ = __spec__
        stand.add = add
        sys.modules[__name__] = stand
        """,
    )
    made = repair()
    if imported_first:
        framework.load()
    made.apply()
    module = framework.load()
    assert type(module).__name__ == "Stand"
    report = next(iter(made.report()))
    if with_spec:
        assert report.status is Status.APPLIED
        assert module.add(2, 1) == FIXED
    else:
        assert report.status is Status.REFUSED
        assert "no __spec__" in report.reason
        assert module.add(2, 1) == BROKEN


# ---------------------------------------------------------------------------------------- implementations


def test_an_implementation_that_imports_its_target(framework, engine):
    framework.write("mod", BUG)
    framework.write("fixes", f"from {framework.name}.mod import add as old\ndef add(a, b):\n    return a + b\n")
    made = engine(
        framework.patch(
            Replace(framework.path("mod:add"), framework.path("fixes:add"), {fingerprint(BUG, "add"): "1.0"})
        )
    )
    made.apply()
    assert _full(framework, "fixes") not in sys.modules
    assert framework.load().add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


def test_no_implementation_is_imported_under_the_lock(framework, engine, call, monkeypatch):
    """Not even where the target comes between the moment in which implementations are imported, and its turn."""
    framework.write("mod", BUG)
    framework.write("fixes", "import rlhf_test_call; rlhf_test_call.now()\ndef add(a, b):\n    return a + b\n")
    made = engine(
        framework.patch(
            Replace(framework.path("mod:add"), framework.path("fixes:add"), {fingerprint(BUG, "add"): "1.0"})
        )
    )
    free = []
    call.now = lambda: free.append(_in_thread(lambda: made._lock.acquire(timeout=5) and made._lock.release() is None))
    monkeypatch.setattr(made, "_resolve_implementations", lambda entries: framework.load())
    made.apply()
    assert free == [True]
    assert framework.load().add(2, 1) == FIXED


def test_threads_that_apply_and_import_do_not_wait_for_each_other(framework, engine, call):
    """One thread is in the body of the implementation's module, another one applies and imports the target.

    Python itself resolves such a circle, by an error in one of the two; our lock must not make it endless.
    """
    framework.write("mod", BUG)
    framework.write(
        "fixes",
        f"import rlhf_test_call; rlhf_test_call.now()\nimport {framework.name}.mod\ndef add(a, b):\n    return a + b\n",
    )
    made = engine(
        framework.patch(
            Replace(framework.path("mod:add"), framework.path("fixes:add"), {fingerprint(BUG, "add"): "1.0"})
        )
    )
    made.apply()
    inside, go_on = threading.Event(), threading.Event()
    call.now = lambda: (inside.set(), go_on.wait(_TIMEOUT))

    def load_fixes():
        with contextlib.suppress(RuntimeError):  # importlib's _DeadlockError
            framework.load("fixes")

    first = threading.Thread(target=load_fixes, daemon=True)
    first.start()
    assert inside.wait(_TIMEOUT)
    second = threading.Thread(target=lambda: (framework.load("mod"), made.apply()), daemon=True)
    second.start()
    go_on.set()
    first.join(_TIMEOUT)
    second.join(_TIMEOUT)
    assert not first.is_alive()
    assert not second.is_alive()
    made.apply()
    assert framework.load().add(2, 1) == FIXED
    assert _statuses(made) == {Status.APPLIED}


def test_the_public_functions_use_one_engine():
    from rlhf_patches.engine.engine import engine

    assert rlhf_patches.report().to_dict() == engine.report().to_dict()


# -------------------------------------------------------------------------------------------- watching by itself


def test_a_module_is_half_imported_until_everybody_was_told(framework):
    """Another thread that imports it has to wait, or it would find the module unpatched."""
    framework.write("mod", BUG)
    name, seen = framework.path("mod"), []

    def callback(_, module):
        seen.append(import_system.is_initializing(module))

    import_hooks.watch(name, callback)
    module = framework.load()
    import_hooks.unwatch(name, callback)
    assert seen == [True]
    assert import_hooks.is_ready(module)


def test_who_watches_twice_is_told_once(framework, call):
    framework.write("mod", f"import rlhf_test_call; rlhf_test_call.now()\n{BUG}")
    name, seen = framework.path("mod"), []

    def callback(told, _):
        seen.append(told)

    call.now = lambda: (import_hooks.watch(name, callback), import_hooks.watch(name, callback))
    framework.load()
    import_hooks.unwatch(name, callback)
    assert seen == [name]


def test_nobody_is_told_of_a_module_that_failed(framework):
    framework.write("mod", "1 / 0\n")
    name, seen = framework.path("mod"), []

    def callback(told, _):
        seen.append(told)

    import_hooks.watch(name, callback)
    with pytest.raises(ZeroDivisionError):
        framework.load()
    import_hooks.unwatch(name, callback)
    assert seen == []


def test_looking_whether_a_module_is_half_imported_runs_none(framework):
    framework.write("mod", "raise AssertionError('it ran')\n")
    assert not import_system.is_initializing(_lazily(framework.path("mod")))
