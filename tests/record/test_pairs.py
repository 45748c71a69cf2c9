"""release_record/pairs.py: what an import executes for certain, and what a release lacks for certain."""

from __future__ import annotations

import zipfile

import pairs
import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pairs import Caller, Needed, Wheel


@pytest.fixture
def wheel(tmp_path):
    """A wheel with these modules, by the paths of their files."""

    def make(files, metadata=""):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: x\nVersion: 1\n{metadata}")
            for name, text in files.items():
                archive.writestr(name, text)
        return Wheel(path)

    return make


CERTAIN = {
    "at the top": "from lib.a import name",
    "in a class": "class A:\n    from lib.a import name",
    "with a context": "with open():\n    from lib.a import name",
    "in a try that catches another": "try:\n    from lib.a import name\nexcept KeyError:\n    pass",
    "where nobody checks types": "if not TYPE_CHECKING:\n    from lib.a import name",
    "under another name": "from lib.a import name as other",
    "at the end of a try": "try:\n    pass\nexcept ImportError:\n    pass\nfinally:\n    from lib.a import name",
}
UNCERTAIN = {
    "in a function": "def f():\n    from lib.a import name",
    "caught": "try:\n    from lib.a import name\nexcept ImportError:\n    name = None",
    "caught with others": "try:\n    from lib.a import name\nexcept (ImportError, RuntimeError):\n    name = None",
    "anything is caught": "try:\n    from lib.a import name\nexcept:\n    name = None",
    "for types": "if TYPE_CHECKING:\n    from lib.a import name",
    "for types, by its module": "if typing.TYPE_CHECKING:\n    from lib.a import name",
    "under a condition": "if version > 3:\n    from lib.a import name\nelse:\n    from lib.a import name",
    "what is available may want a version": "if is_lib_available():\n    from lib.a import name",
    "after what may have raised": "if old:\n    raise ImportError\nfrom lib.a import name",
    "no Python": "from lib.a import name\nprint 'a'",
}


@pytest.mark.parametrize("text", CERTAIN.values(), ids=CERTAIN)
def test_what_is_imported_for_certain(wheel, text):
    assert pairs.needed(wheel({"app/__init__.py": text}), "app", ["lib"]) == {Needed("lib.a", "name")}


@pytest.mark.parametrize("text", UNCERTAIN.values(), ids=UNCERTAIN)
def test_what_may_not_be_imported_does_not_count(wheel, text):
    assert pairs.needed(wheel({"app/__init__.py": text}), "app", ["lib"]) == set()


def test_the_callers_own_modules_are_followed(wheel):
    app = wheel(
        {
            "app/__init__.py": "import other",
            "app/one/__init__.py": "",
            "app/one/entry.py": "from ..two import lazily\nfrom . import beside\nfrom .. import nothing_such",
            "app/one/beside.py": "import lib.b",
            "app/two/__init__.py": "_LazyModule({'lazy': ['lazily'], 'unused': ['never']})",
            "app/two/lazy.py": "from lib.c import made",
            "app/two/unused.py": "from lib.d import never",
        }
    )
    assert pairs.needed(app, "app.one.entry", ["lib"]) == {Needed("lib.b", ""), Needed("lib.c", "made")}


THERE = {
    "defined": "def name(): pass",
    "a class": "class name: pass",
    "assigned": "name = 1",
    "with others": "name, other = 1, 2",
    "annotated": "name: int = 1",
    "under a condition": "if x:\n    name = 1",
    "in a try": "try:\n    import name\nexcept ImportError:\n    pass",
    "imported": "from .b import name",
    "by a star of its own": "from .b import *",
    "by another's star": "from os import *",
    "made": "globals()['na' + 'me'] = 1",
    "asked for": "def __getattr__(x): return 1",
    "a module that takes its place": "sys.modules[__name__] = Thing()",
    "lazy": "s = {'b': ['name']}\nsys.modules[__name__] = _LazyModule(s)",
    "lazy, as its modules say": "sys.modules[__name__] = _LazyModule(define_import_structure(x))",
    "no Python": "print 'a'",
    "a module": "",
}
MISSING = {
    "another": "other = 1",
    "within a function": "def other():\n    name = 1",
    "lazy, without it": "sys.modules[__name__] = _LazyModule({'b': ['other']})",
    "mentioned only": "'name'",
}


@pytest.mark.parametrize("case", THERE)
def test_what_may_be_there_does_not_count_as_lacking(wheel, case):
    files = {"lib/a/__init__.py": THERE[case], "lib/a/b.py": "__all__ = ['name']\nname = 1"}
    if case == "a module":
        files["lib/a/name.py"] = ""
    assert not pairs.lacks(wheel(files), Needed("lib.a", "name"))


@pytest.mark.parametrize("case", MISSING)
def test_what_is_lacking(wheel, case):
    assert pairs.lacks(wheel({"lib/a/__init__.py": MISSING[case]}), Needed("lib.a", "name"))


def test_modules_that_are_not_there(wheel):
    lib = wheel({"lib/__init__.py": "alias('old')", "lib/a/b/c.py": ""})
    assert pairs.lacks(lib, Needed("lib.gone", "name"))
    assert pairs.lacks(lib, Needed("lib.gone", ""))
    assert not pairs.lacks(lib, Needed("lib.old", "name")), "made under this name, for all that can be told"
    assert not pairs.lacks(lib, Needed("lib.a.b", "name")), "a package without a file"


def versions(*texts):
    return [Version(text) for text in texts]


def test_rows_are_of_pairs_that_metadata_allow():
    need = Needed("lib.a", "name")
    lacking = {each: {need} if each >= Version("3") else set() for each in versions("1", "2", "3", "4")}
    bounds = {"1": "", "2": "", "3": "<4", "4": "<3"}
    callers = {
        Version(each): Caller({"app.x": {need}, "app.y": set()}, {"lib": SpecifierSet(bound)})
        for each, bound in bounds.items()
    }
    (row,) = pairs.rows({"app": callers}, {"lib": lacking})
    assert (row.versions, row.beside, row.pin) == (">=1,<4", ">=3,<=4", "<3")
    assert (row.module, row.name, row.entries) == ("lib.a", "name", ("app.x",))


def test_a_name_that_came_later_is_pinned_from_below():
    need = Needed("lib.a", "name")
    lacking = {each: {need} if each < Version("3") else set() for each in versions("1", "2", "3")}
    callers = {Version("1"): Caller({"app": {need}}, {})}
    (row,) = pairs.rows({"app": callers}, {"lib": lacking})
    assert (row.versions, row.beside, row.pin) == (">=1,<=1", ">=1,<3", ">=3")
    none = {each: {need} for each in versions("1", "2")}
    assert [row.pin for row in pairs.rows({"app": callers}, {"lib": none})] == [""]


def test_what_metadata_allow(wheel):
    text = "Requires-Dist: lib<5,>=3\nRequires-Dist: lib!=4.1\nRequires-Dist: more>1; extra == 'all'\n"
    found = wheel({}, text).requires()
    assert set(found) == {"lib"}
    assert [each for each in ("2", "3", "4.1", "5") if each in found["lib"]] == ["3"]
