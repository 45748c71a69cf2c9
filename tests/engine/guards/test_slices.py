"""A function's slice gives the code object that its whole module gives, on this Python."""

from __future__ import annotations

import random
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "release_record"))

import texts

from rlhf_patches.guards import known, memory, rewriting, sources
from rlhf_patches.guards.edits import Edit, Unrecognized
from rlhf_patches.guards.places import Place, Source, Unreadable
from tests.harness.effort import SHARE

LIBRARY = Path(sysconfig.get_path("stdlib"))
MODULES = sorted(
    path
    for path in LIBRARY.rglob("*.py")
    if not {"test", "tests", "site-packages"} & set(path.relative_to(LIBRARY).parts)
)


def places(source: Source) -> Iterator[tuple[str, Place]]:
    """Each function of a text that is defined once, with its slice."""
    module = sources.parse(source)
    for qualname, nodes in sources.functions_of(source).items():
        if len(nodes) == 1:
            yield (
                qualname,
                sources.place_of(nodes[0])._replace(
                    slice=texts.slice_of(module, nodes[0], qualname, known.names_in(source.text))
                ),
            )


def codes(source: Source, place: Place) -> list[CodeType]:
    """A function's code, of its slice and of the whole."""
    both = (place, place._replace(slice=None))
    return [rewriting.code_of(rewriting.compile_around(source, each), each) for each in both]


def differing(source: Source) -> tuple[int, list[str]]:
    """How many functions were compared, and which differ."""
    wrong, count = [], 0
    with memory.parsed_once():
        for qualname, place in places(source):
            try:
                cut, whole = codes(source, place)
            except Unrecognized as error:  # two of one name on a line, say
                cut, whole = error, None
            count += 1
            if whole is None or not texts.is_same(cut, whole):
                wrong.append(f"{source.filename}: {qualname}: {cut}")
    return count, wrong


def test_the_standard_librarys_functions():
    """A tenth of the modules, or of that a share, always the same: thousands of functions, those within them too."""
    compared, wrong = 0, []
    for path in random.Random(30).sample(MODULES, len(MODULES) // 10)[::SHARE]:
        try:
            source = Source(path.stem, str(path), path.read_text(encoding="utf-8"))
            sources.parse(source)
        except (UnicodeError, Unreadable):
            continue
        count, some = differing(source)
        compared += count
        wrong += some
    assert wrong == []
    assert compared > 1000 / SHARE


CASES = {
    "a call of what is imported": """
        import os
        from json import dumps
        def f():
            return os.getcwd(), dumps([1]).strip()
    """,
    "imported conditionally": """
        try:
            import numpy as np
        except ImportError:
            np = None
            def f():
                return np.zeros(1)
        if np:
            import os
        def g():
            return np.ones(1), os.getcwd()
    """,
    "imported within a function, and a class": """
        def g():
            import os
        class C:
            import json
            def f(self):
                return os.getcwd(), json.loads("1")
    """,
    "future annotations": """
        from __future__ import annotations
        def f(a: "int", b: list[int] = ()) -> None:
            def g(c: Undefined): ...
            return g
    """,
    "private names, super and nested classes": """
        class _A(B):
            def first(self): ...
            class __In(object):
                x = 1
                def f(self, __a):
                    return super().f(self.__b, __a, __class__)
                @property
                def g(self):
                    return lambda: self.__c
    """,
    "super, which the module mentions": """
        class A:
            def f(self):
                return super().f(1)
        _super = super
    """,
    "decorators": """
        class C:
            @first
            @second(
                1,
            )
            async def f(self):
                async with self as x:
                    yield x
    """,
    "under if, within a class": """
        class C:
            if X:
                for _ in range(2):
                    pass
                def f(self): return [x for x in self]
        if X:
            def g(): return 1
        else:
            def h(): return 2
    """,
    "the last line, without an end": "def f(a):\n    return (a,\n        1)",
    "a text in several lines": '''
        X = """
        def not_this(): pass
        """
        def f():
            """Says
        something."""
            return """
            a"""
        Y = 1; import os
    ''',
    "tabs": "class C:\n\tclass D:\n\t\tdef f(self):\n\t\t\treturn self.__x\n",
    "one line": "class C: x = 1\ndef f(): return 1; x = 2\nimport os\n",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_a_slice_is_as_the_whole(text):
    count, wrong = differing(Source("m", "m.py", textwrap.dedent(text)))
    assert count
    assert wrong == []


def test_without_the_imports_it_would_not_be():
    """What the imports are kept for: CPython calls a function of a module that is imported at the top otherwise."""
    source = Source("m", "m.py", "import os\ndef f():\n    return os.getcwd()\n")
    ((_, place),) = places(source)
    assert place.slice is not None
    cut, whole = codes(source, place._replace(slice=place.slice._replace(imported=())))
    assert (cut == whole) is (sys.version_info < (3, 11))


@pytest.mark.parametrize(
    "new", ["return (a", 'return """a', "return a \\", "return a\nx = 1", "return a; def g(): pass"]
)
def test_an_edit_that_reaches_beyond_the_function_does_not_compile(new):
    text = "class C:\n    def f(self, a):\n        return a\n\n    def g(self):\n        return 1\n"
    source = Source("m", "m.py", text)
    place = dict(places(source))["C.f"]
    start = text.index("return a")
    new = new.replace("\n", " ;") if "x = 1" not in new else new
    with pytest.raises(Unrecognized):
        rewriting.rewrite_code(source, place, [Edit(start, start + len("return a"), new)])
