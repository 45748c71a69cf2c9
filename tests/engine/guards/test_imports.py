"""A shape of a module: what is imported whenever it is, by which an advice says that its import fails."""

from __future__ import annotations

import json
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "release_record"))
import texts

from rlhf_patches import DefinitionError, Shape, Signature, Status
from rlhf_patches.definitions import registry
from rlhf_patches.guards import known, shapes, sources
from rlhf_patches.guards.edits import Unrecognized
from rlhf_patches.guards.places import NotFound, Source
from rlhf_patches.testing import cases
from tests.harness.logs import diagnosed

NAME = "from json import gone"
RUN = [
    "from json import gone\n",
    "import os\nfrom json import (\n    dumps,\n    gone,  # why\n)\nx = 1\n",
    "from json import dumps as d, gone as g, loads\n",
    "if is_there():\n    from json import gone\n",
    "if is_there():\n    if os.is_there():\n        import os; from json import gone\n",
]
NOT_RUN = [
    "from json import dumps\n",
    "from json.decoder import gone\n",
    "from .json import gone\n",
    "import json.gone\n",
    "from json import dumps as gone\n",
    "from json import *\n",
    "def f():\n    from json import gone\n",
    "class C:\n    def f(self):\n        from json import gone\n",
    "try:\n    from json import gone\nexcept ImportError:\n    gone = None\n",
    "if TYPE_CHECKING:\n    from json import gone\n",
    "if version('json') < '2':\n    from json import gone\n",
    "if JSON < 2:\n    from json import gone\n",
    "if is_there():\n    pass\nelse:\n    from json import gone\n",
    "'''from json import gone'''\n",
]


def source(text: str) -> Source:
    return Source("some.mod", "mod.py", text)


@pytest.mark.parametrize("text", RUN)
def test_what_every_import_runs(text):
    change = Shape("some.mod:<module>", NAME)
    found = shapes.recognize(change, source(text))
    line = text.split("\n")[found.place.lineno - 1]
    assert "from json import" in line
    assert line.encode()[found.place.column :].strip().startswith(b"from json import")
    assert (found.qualname, found.edits, found.fingerprint) == ("<module>", (), None)


@pytest.mark.parametrize("text", NOT_RUN)
def test_what_may_do_without_the_name(text):
    with pytest.raises(Unrecognized, match=r"some\.mod does not run 'from json import gone' whenever it is imported"):
        shapes.recognize(Shape("some.mod:<module>", NAME), source(text))
    with pytest.raises(NotFound):
        sources.find_import(source(text), NAME)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"pattern": "import json"}, "expected 'from X import name'"),
        ({"pattern": "from json import a, b"}, "expected 'from X import name'"),
        ({"pattern": "from .json import a"}, "expected 'from X import name'"),
        ({"pattern": NAME, "matches": 2}, "more than a pattern"),
        ({"pattern": NAME, "inside": "if $A: $B"}, "more than a pattern"),
        ({"pattern": NAME, "unless": ("try: $A",)}, "more than a pattern"),
        ({"pattern": None}, "expected text"),
    ],
)
def test_a_shape_of_a_module_is_an_import_and_nothing_else(shape, message):
    with pytest.raises(DefinitionError, match=message):
        Shape("some.mod:<module>", **shape)


@pytest.mark.parametrize("target", [":<module>", "some mod:<module>", "a.b:<lambda>", "a.b:C.<module>"])
def test_no_other_target_has_angles(target):
    with pytest.raises(DefinitionError, match=r"expected 'module:qualified\.name'"):
        Shape(target, NAME)


@pytest.fixture
def advice(framework):
    framework.write("mod", "import os\nif callable(os):\n    pass\n\nfrom os import gone\n\n\ndef f():\n    return 1\n")
    return framework.advice(Shape(framework.path("mod:<module>"), "from os import gone"), versions="<2")


def test_it_is_told_where_it_stands_and_never_in_the_process(framework, advice, engine, tmp_path):
    case = cases.case_of(advice, str(framework.site))
    rows = case.rows(tmp_path / "as it is", (case.version, cases.UNKNOWN))
    assert {row.status for row in rows.values()} == {Status.ADVICE}
    ((target, module, text),) = case.edits()
    assert (target, text) == (framework.path("mod:<module>"), case.read(module).replace("from os import gone", "pass"))
    (row,) = case.rows(tmp_path / "edited", [case.version], {module: text}).values()
    assert "the bug may be present" in row.reason
    one = engine(advice)
    one.apply()
    with pytest.raises(ImportError, match="cannot import name 'gone'"):
        framework.load()
    (row,) = one.report()
    assert row.status is not Status.ADVICE
    assert framework.path("mod") not in sys.modules


def test_a_traceback_through_the_module_tells_it(framework, advice, monkeypatch, tmp_path):
    signed = replace(advice, signatures=(Signature("ImportError", "cannot import name 'gone' from 'os'"),))
    monkeypatch.setattr(registry, "load", lambda: ([registry.Registered(signed, "tests")], []))
    module = framework.path("mod").replace(".", "/")
    log = (
        'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    import framework\n'
        f'  File "/site/{module}.py", line 5, in <module>\n    from os import gone\n'
        "ImportError: cannot import name 'gone' from 'os' (/usr/lib/python3.11/os.py)\n"
    )
    assert diagnosed(log) == [(advice.name, True)]
    assert diagnosed(log.replace(module, "elsewhere/mod")) == []
    assert diagnosed(log[log.index("ImportError") :]) == [(advice.name, False)]


@pytest.mark.parametrize("text", ["from os import gone\n", "import os\n"])
def test_what_is_known_of_a_text_is_what_a_search_finds(framework, advice, monkeypatch, text):
    """As the package ships it, of the whole text."""
    (variant,) = advice.variants
    module = framework.path("mod")
    plain = Source(module, "mod.py", text)
    data = texts.of_text(plain, [variant]).to_bytes()
    assert json.loads(data)
    real = pkgutil.get_data
    shipped = f"texts/{framework.name}.json"
    monkeypatch.setattr(known.pkgutil, "get_data", lambda *args: data if args[1] == shipped else real(*args))
    looked_up = known.look_up(plain)
    assert looked_up.known is not None
    monkeypatch.setattr(sources, "find_import", None)  # whoever searches fails
    if "gone" in text:
        assert shapes.recognize(variant.changes[0], looked_up).edits == ()
    else:
        with pytest.raises(Unrecognized, match="whenever it is imported"):
            shapes.recognize(variant.changes[0], looked_up)
