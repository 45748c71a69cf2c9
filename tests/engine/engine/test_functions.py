"""What a change must reach, what it must leave as it was, and what it must refuse.

Every target says "old"; the patched one says "renewed" (longer, so that positions move
too). Each case is written once and driven through `Rewrite`, `Replace` and `Wrap`, with references taken
before ``apply()``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import textwrap
from dataclasses import dataclass

import pytest

from rlhf_patches import Replace, Rewrite, Status, Wrap
from rlhf_patches.guards.fingerprints import fingerprint
from rlhf_patches.guards.places import NotFound

AROUND = """
def plain(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs).replace("old", "renewed")

def generator(wrapped, instance, args, kwargs):
    for item in wrapped(*args, **kwargs):
        yield item.replace("old", "renewed")

async def coroutine(wrapped, instance, args, kwargs):
    return (await wrapped(*args, **kwargs)).replace("old", "renewed")
"""


@dataclass(frozen=True)
class Case:
    """``setup`` runs before apply() and takes references; ``use`` is what a caller then does, before and after."""

    source: str
    use: str
    fix: str
    target: str = "f"
    setup: str = "from {mod} import *"
    around: str = "plain"
    since: tuple[int, int] = (3, 10)


PLAIN_FIX = 'def fix(x): return x + "renewed"'
METHOD_FIX = 'def fix(self, x): return x + self.name + "renewed"'

CASES = {
    "imported by name": Case(
        'def f(x): return x + "old"',
        'f("x"), kept("x"), table["k"]("x"), mod.f("x"), partial()',
        PLAIN_FIX,
        setup="from {mod} import f; kept = f; table = dict(k=f); partial = functools.partial(f, 'p')",
    ),
    "under if and try": Case(
        """
        import sys
        if sys.version_info >= (3,):
            try:
                def f(x): return x + "old"
            finally:
                pass
        """,
        'f("x")',
        PLAIN_FIX,
    ),
    "method": Case(
        """
        class C:
            name = "c"
            def m(self, x): return x + self.name + "old"
        """,
        'bound("b"), unbound(C(), "u"), C().m("x"), Sub().m("s"), stored("t")',
        METHOD_FIX,
        target="C.m",
        setup="""
            from {mod} import C
            class Sub(C):
                name = "sub"
                def m(self, x): return super().m(x) + "!"
            bound, unbound, stored = C().m, C.m, Sub().m
            """,
    ),
    "method of an actor": Case(
        """
        def remote(cls):
            class Modified(cls):
                __ray_actor_class__ = cls
            class Handle(Modified):
                def __init__(self): raise TypeError("as Ray's")
            return Handle.__new__(Handle)

        @remote
        class C:
            name = "c"
            def m(self, x): return x + self.name + "old"
        """,
        'actor().m("x"), bound("b")',
        METHOD_FIX,
        target="C.m",
        setup="""
            from {mod} import C
            actor = inspect.getattr_static(C, "__ray_actor_class__")
            bound = actor().m
            """,
    ),
    "static method": Case(
        """
        class C:
            @staticmethod
            def m(x): return x + "old"
        class Sub(C): pass
        """,
        'C.m("x"), C().m("y"), Sub.m("z"), kept("k")',
        PLAIN_FIX,
        target="C.m",
        setup="from {mod} import *; kept = C.m",
    ),
    "class method": Case(
        """
        class C:
            @classmethod
            def m(cls, x): return x + cls.__name__ + "old"
        class Sub(C): pass
        """,
        'C.m("x"), C().m("y"), Sub.m("z"), kept("k")',
        'def fix(cls, x): return x + cls.__name__ + "renewed"',
        target="C.m",
        setup="from {mod} import *; kept = Sub.m",
    ),
    "property that is only read": Case(
        """
        class C:
            name = "c"
            @property
            def m(self): return self.name + "old"
        class Sub(C): name = "sub"
        """,
        "C().m, Sub().m",
        'def fix(self): return self.name + "renewed"',
        target="C.m",
    ),
    "cached property": Case(
        """
        import functools
        class C:
            @functools.cached_property
            def m(self): return "old"
        """,
        "C().m",
        'def fix(self): return "renewed"',
        target="C.m",
    ),
    "constructor __new__": Case(
        """
        class C(str):
            def __new__(cls, x): return str.__new__(cls, x + "old")
        """,
        'C("x"), type(C("x")).__name__',
        'def fix(cls, x): return str.__new__(cls, x + "renewed")',
        target="C.__new__",
        around="constructor",
    ),
    "private name": Case(
        """
        class C:
            def __private(self, x): return x + self.__name() + "old"
            def __name(self): return "n"
            def call(self, x): return self.__private(x)
        """,
        'C().call("x")',
        'def fix(self, x): return x + self._C__name() + "renewed"',
        target="C.__private",
    ),
    "private parameter": Case(
        """
        class C:
            def m(self, __x, *, __y="y"): return __x + __y + "old"
        """,
        'C().m("x"), C().m("x", _C__y="z")',
        'def fix(self, x, *, _C__y): return x + _C__y + "renewed"',
        target="C.m",
    ),
    "decorator with functools.wraps": Case(
        """
        import functools
        def deco(g):
            @functools.wraps(g)
            def inner(*a): return "<" + g(*a) + ">"
            return inner
        @deco
        def f(x): return x + "old"
        """,
        'f("x"), kept("y")',
        PLAIN_FIX,
        setup="from {mod} import *; kept = f",
    ),
    "decorator without functools.wraps": Case(
        """
        def deco(g):
            def inner(*a, **k): return "<" + g(*a, **k) + ">"
            return inner
        class C:
            name = "c"
            @deco
            def m(self, x): return x + self.name + "old"
        """,
        'C().m("x"), bound("b")',
        METHOD_FIX,
        target="C.m",
        setup="from {mod} import C; bound = C().m",
    ),
    "several decorators": Case(
        """
        import functools
        def bare(g):
            def inner(*a): return "<" + g(*a) + ">"
            return inner
        def option(mark):
            def deco(g):
                @functools.wraps(g)
                def inner(*a): return mark + g(*a)
                return inner
            return deco
        class C:
            @classmethod
            @bare
            @option("!")
            @bare
            @option(mark="?")
            def m(cls, x): return x + cls.__name__ + "old"
        """,
        'C.m("x"), C().m("y"), kept("z")',
        'def fix(cls, x): return x + cls.__name__ + "renewed"',
        target="C.m",
        setup="from {mod} import C; kept = C.m",
    ),
    "wrapt decorator": Case(
        """
        import wrapt
        @wrapt.decorator
        def deco(wrapped, instance, args, kwargs): return "<" + wrapped(*args, **kwargs) + ">"
        class C:
            name = "c"
            @deco
            def m(self, x): return x + self.name + "old"
        """,
        'C().m("x")',
        METHOD_FIX,
        target="C.m",
    ),
    "singledispatch": Case(
        """
        import functools
        @functools.singledispatch
        def f(x): return str(x) + "old"
        @f.register
        def _(x: int): return "int"
        """,
        'f("x"), f(1)',
        'def fix(x): return str(x) + "renewed"',
    ),
    "zero-argument super and __class__": Case(
        """
        class Base:
            def m(self, x): return x + "base"
        class C(Base):
            def m(self, x): return super().m(x) + __class__.__name__ + "old"
        """,
        'C().m("x"), Sub().m("y")',
        'def fix(self, x): return x + "base" + "C" + "renewed"',
        target="C.m",
        setup="from {mod} import C\nclass Sub(C): pass",
    ),
    "captured parameters and an inner function": Case(
        """
        def f(x, *, y="y"):
            def inner(): return x + y + "old"
            return inner()
        """,
        'f("x"), f("x", y="z")',
        'def fix(x, *, y): return x + y + "renewed"',
    ),
    "a decorator that knows itself": Case(
        """
        def decorator(g):
            def wrapper(x): return g(x) if wrapper else None
            return wrapper
        @decorator
        def f(x): return x + "old"
        """,
        'f("x")',
        PLAIN_FIX,
    ),
    "recursion": Case(
        'def f(x): return "old" if not x else x[0] + f(x[1:])',
        'f("abc")',
        'def fix(x): return x + "renewed"',
    ),
    "generator": Case(
        """
        def f(x):
            yield x
            yield "old"
        """,
        'list(f("x")), list(kept("y"))',
        'def fix(x):\n    yield x\n    yield "renewed"',
        setup="from {mod} import f; kept = f",
        around="generator",
    ),
    "context manager": Case(
        """
        import contextlib
        @contextlib.contextmanager
        def f(x):
            try:
                yield x + "old"
            except KeyError as error:
                log.append(str(error))
        log = []
        """,
        "entered(f), log",
        """
        def fix(x):
            from {mod} import log
            try:
                yield x + "renewed"
            except KeyError as error:
                log.append(str(error))
        """,
        setup="""
            from {mod} import *
            def entered(f):
                del log[:]
                with f("x") as value:
                    raise KeyError("thrown in")
                return value
            """,
        around="generator_through",
    ),
    "coroutine": Case(
        """
        import asyncio
        async def f(x):
            await asyncio.sleep(0)
            return x + "old"
        """,
        'asyncio.run(f("x")), inspect.iscoroutinefunction(f)',
        'async def fix(x): return x + "renewed"',
        around="coroutine",
    ),
    "every kind of parameter": Case(
        """
        def f(a, b="b", /, c="c", *d, e, g="g", **h):
            return "".join([a, b, c, *d, e, g, *h, *h.values()]) + "old"
        """,
        'f("A", e="E"), f("A", "B", "C", "D", "D", e="E", g="G", a="x", z="Z")',
        """
        def fix(a, b, /, c, *d, e, g, **h):
            return "".join([a, b, c, *d, e, g, *h, *h.values()]) + "renewed"
        """,
    ),
    "type parameters": Case(
        """
        class C[K]:
            name = "c"
            def m[T](self, x: T) -> T: return x + self.name + "old"
        """,
        'C().m("x")',
        METHOD_FIX,
        target="C.m",
        since=(3, 12),
    ),
}
AROUND += """
def constructor(wrapped, instance, args, kwargs):
    cls, x = args
    return str.__new__(cls, str.replace(wrapped(cls, x), "old", "renewed"))

def generator_through(wrapped, instance, args, kwargs):
    return Renamed(wrapped(*args, **kwargs))

class Renamed:
    def __init__(self, generator): self.generator = generator
    def __iter__(self): return self
    def __next__(self): return next(self.generator).replace("old", "renewed")
    def throw(self, *error): return self.generator.throw(*error)
"""


def change(framework, kind, case):
    """The change of one kind for a case, its implementations written next to the target."""
    framework.write(
        "fixes", textwrap.dedent(AROUND) + textwrap.dedent(case.fix).replace("{mod}", framework.path("mod"))
    )
    target = framework.path(f"mod:{case.target}")
    if kind == "rewrite":
        return Rewrite(target, '"old"', '"renewed"')
    prints = {fingerprint(textwrap.dedent(case.source), case.target): "1.0"}
    if kind == "replace":
        return Replace(target, framework.path("fixes:fix"), prints)
    return Wrap(target, framework.path(f"fixes:{case.around}"), prints)


@pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])
@pytest.mark.parametrize("name", CASES)
def test_reaches_and_reverts(framework, engine, name, kind):
    case = CASES[name]
    if sys.version_info < case.since:
        pytest.skip(f"syntax of Python {case.since}")
    framework.write("mod", case.source)
    patch = framework.patch(change(framework, kind, case))
    made = engine(patch)
    namespace = {"mod": framework.load(), "functools": functools, "asyncio": asyncio, "inspect": inspect}
    exec(textwrap.dedent(case.setup.format(mod=framework.path("mod"))), namespace)

    def use():
        return repr(eval(case.use, namespace))

    holder = functools.reduce(getattr, case.target.replace("__private", "_C__private").split("."), namespace["mod"])
    signature = None if isinstance(holder, (property, functools.cached_property)) else inspect.signature(holder)
    before = use()
    assert "old" in before
    assert "renewed" not in before
    report = made.apply()
    assert report[patch.name].status is Status.APPLIED, report[patch.name].reason
    assert use() == before.replace("old", "renewed")
    assert signature is None or inspect.signature(holder) == signature
    assert made.report()[patch.name].status is Status.APPLIED
    made.revert()
    assert use() == before


# ------------------------------------------------------------------------------------------------ refusals

EDITED = "def f(x): x += 'edit'; return 'old'"
REFUSED = {
    "lru_cache": ("import functools\n@functools.lru_cache\ndef f(x): return 'old'", "f", "", "lru_cache"),
    "cache below a decorator": (
        (
            "import functools\ndef deco(g): return functools.wraps(g)(lambda *a: g(*a))\n"
            "@deco\n@functools.cache\ndef f(x): return 'old'"
        ),
        "f",
        "",
        "lru_cache",
    ),
    "builtin in its place": ("def f(x): return 'old'\nf = len", "f", "", "builtin_function_or_method"),
    "C type in its place": (
        "def f(x): return 'old'\nimport operator\nf = operator.itemgetter(0)",
        "f",
        "",
        "operator.itemgetter",
    ),
    "generated elsewhere": (
        "def f(x): return 'old'\nexec(compile('def f(x): return (\"old\", x)', '<generated>', 'exec'))",
        "f",
        "",
        "<generated>",
    ),
    "generated by dataclasses": (
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    x: str = 'old'",
        "C.__init__",
        "",
        "not defined in",
    ),
    "inherited": ("class B:\n    def m(self): return 'old'\nclass C(B): pass", "C.m", "", "not defined in"),
    "inherited after the definition was deleted": (
        "class B:\n    def m(self): return 'b'\nclass C(B):\n    def m(self): return 'old'\n    del m",
        "C.m",
        "",
        "does not define",
    ),
    "defined twice": ("def f(x): return 'old'\ndef f(x): return 'old'", "f", "", "defined 2 times"),
    "defined under if and else": (
        "if True:\n    def f(x): return 'old'\nelse:\n    def f(x): return 'old'",
        "f",
        "",
        "defined 2 times",
    ),
    # Getter and setter have one name: which of the two is meant cannot be said yet.
    "property with a setter": (
        "class C:\n    @property\n    def m(self): return 'old'\n    @m.setter\n    def m(self, value): pass",
        "C.m",
        "",
        "defined 2 times",
    ),
    "hidden in an object": (
        (
            "class Hide:\n    def __init__(self, g): self.g = g\n    def __call__(self, *a): return self.g(*a)\n"
            "@Hide\ndef f(x): return 'old'"
        ),
        "f",
        "",
        "Hide",
    ),
    "two functions with the same code behind it": (
        (
            "import functools\ndef twice(g):\n    import types\n    h = types.FunctionType(g.__code__, {})\n"
            "    return lambda *a: (g(*a), h(*a))\n@twice\ndef f(x): return 'old'"
        ),
        "f",
        "",
        "2 functions",
    ),
    "replaced by somebody else": ("def f(x): return 'old'", "f", "def f(x): return 'theirs'\nmod.f = f", "replaced by"),
    "code swapped by somebody else": (
        "def f(x): return 'old'",
        "f",
        "def f(x): return 'theirs'\nmod.f.__code__ = f.__code__",
        "replaced by",
    ),
    "constant changed by somebody else": (
        "def f(x): return 'old'",
        "f",
        "mod.f.__code__ = mod.f.__code__.replace(co_consts=(None, 'theirs'))",
        "other code has changed",
    ),
    "edited on disk since": (
        "def f(x): return 'old'",
        "f",
        "from pathlib import Path\nPath(mod.__file__).write_text(EDITED)",
        "edited after its import",
    ),
    "moved on disk since": (
        "def f(x): return 'old'",
        "f",
        "from pathlib import Path\nPath(mod.__file__).write_text(\"\\n\\ndef f(x): return 'old'\")",
        "edited after its import",
    ),
    "gone from disk": ("def f(x): return 'old'", "f", "import os\nos.remove(mod.__file__)", "cannot be read"),
    "deleted by somebody else": ("def f(x): return 'old'", "f", "del mod.f", "does not define"),
}


@pytest.mark.parametrize("kind", ["rewrite", "wrap"])
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_and_says_why(framework, engine, name, kind):
    source, target, meddling, fragment = REFUSED[name]
    framework.write("mod", source)
    framework.write("fixes", AROUND)
    full = framework.path(f"mod:{target}")
    if kind == "rewrite":
        one = Rewrite(full, "'old'", "'renewed'")
    else:
        # The fingerprint guard must not be what refuses: it accepts every version of the text in play.
        one = Wrap(
            full, framework.path("fixes:plain"), fingerprints(source, EDITED, target=target) or {"0" * 16: "none"}
        )
    mod = framework.load()
    exec(meddling, {"mod": mod, "EDITED": EDITED})
    codes = all_codes(mod)
    row = engine(framework.patch(one)).apply()[f"{framework.name}-bug"]
    assert row.status is Status.REFUSED, row
    assert fragment in row.reason
    assert "nothing was changed" in row.reason
    assert all_codes(mod) == codes


def fingerprints(*texts, target):
    found = {}
    for text in texts:
        with contextlib.suppress(NotFound):
            found[fingerprint(text, target)] = "1.0"
    return found


def all_codes(module):
    """Identity of the code of every function in a module and its classes."""
    spaces = [
        vars(module),
        *(vars(v) for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__),
    ]
    return [(name, id(v.__code__)) for space in spaces for name, v in space.items() if inspect.isfunction(v)]


def test_asynchronous_generator(framework, engine):
    """`yield from` does not exist there, so only a rewrite can be handed through."""
    source = "async def f(x):\n    yield x\n    yield 'old'\n"
    framework.write("mod", source)
    framework.write("fixes", AROUND + "\nasync def fix(x):\n    yield 'renewed'\n")
    f = framework.load().f
    code = f.__code__

    async def items():
        return [item async for item in f("x")]

    prints = {fingerprint(source, "f"): "1.0"}
    changes = {
        "fw-replace": Replace(framework.path("mod:f"), framework.path("fixes:fix"), prints),
        "fw-wrap": Wrap(framework.path("mod:f"), framework.path("fixes:plain"), prints),
        "fw-rewrite": Rewrite(framework.path("mod:f"), "'old'", "'renewed'"),
    }
    made = engine(*(framework.patch(one, name=name) for name, one in changes.items()))
    report = made.apply(only=["fw-replace", "fw-wrap"])
    for name in ("fw-replace", "fw-wrap"):
        assert report[name].status is Status.REFUSED
        assert "asynchronous generator" in report[name].reason
    assert f.__code__ is code
    made.revert()
    assert made.apply(only="fw-rewrite")["fw-rewrite"].status is Status.APPLIED
    assert asyncio.run(items()) == ["x", "renewed"]


# ---------------------------------------------------------------------------- defaults, attributes, frames


@pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])
def test_defaults_and_attributes_stay_the_functions_own(framework, engine, kind):
    """Somebody who changes ``__defaults__`` after the patch must see it in the patched function too."""
    case = Case(
        'def f(x="x", *, y="y"):\n    "Doc."\n    return x + y + "old"\nf.mark = []',
        "",
        'def fix(x, *, y): return x + y + "renewed"',
    )
    framework.write("mod", case.source)
    patch = framework.patch(change(framework, kind, case))
    f = framework.load().f
    kept = (f.__defaults__, f.__kwdefaults__, f.__doc__, f.__name__, f.__qualname__, f.__module__, f.mark, f.__dict__)
    made = engine(patch)
    assert made.apply()[patch.name].status is Status.APPLIED
    after = (f.__defaults__, f.__kwdefaults__, f.__doc__, f.__name__, f.__qualname__, f.__module__, f.mark, f.__dict__)
    assert all(new is old for new, old in zip(after, kept, strict=True))
    assert f() == "xyrenewed"
    f.__defaults__, f.__kwdefaults__ = ("1",), {"y": "2"}
    assert f() == "12renewed"
    made.revert()
    assert f() == "12old"


@pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])
def test_wrong_arguments_are_a_type_error_as_before(framework, engine, kind):
    case = Case('def f(a, /, b, *, c): return "old"', "", 'def fix(a, /, b, *, c): return "renewed"')
    framework.write("mod", case.source)
    patch = framework.patch(change(framework, kind, case))
    f = framework.load().f
    made = engine(patch)

    def messages():
        found = []
        for args, kwargs in (((), {}), ((1, 2, 3), {"c": 1}), ((1,), {"a": 1, "b": 2, "c": 3}), ((1, 2), {})):
            with pytest.raises(TypeError) as caught:
                f(*args, **kwargs)
            found.append(str(caught.value))
        return found

    before = messages()
    assert made.apply()[patch.name].status is Status.APPLIED
    assert messages() == before


def test_wrap_sees_instance_arguments_and_defaults(framework, engine):
    """wrapt's convention; every positional parameter is in ``args``, defaults filled in."""
    source = textwrap.dedent(
        """
        def function(a, b=2, *rest, c, d=4, **more): return a
        class C:
            def method(self, a, b=2): return a
            @classmethod
            def of_class(cls, a): return a
            @staticmethod
            def static(a): return a
        """
    )
    framework.write("mod", source)
    framework.write(
        "fixes", "seen = []\ndef plain(wrapped, *rest):\n    seen.append(rest)\n    return wrapped(9, **rest[-1])\n"
    )
    names = ("function", "C.method", "C.of_class", "C.static")
    changes = [
        Wrap(framework.path(f"mod:{n}"), framework.path("fixes:plain"), {fingerprint(source, n): "1.0"}) for n in names
    ]
    mod = framework.load()
    patch = framework.patch(*changes)
    assert engine(patch).apply()[patch.name].status is Status.APPLIED
    seen, instance = framework.load("fixes").seen, mod.C()
    assert mod.function(1, c=3, e=5) == 9
    assert instance.method(1) == mod.C.of_class(1) == mod.C.static(1) == 9
    assert mod.C.method(None, 1) == 9  # unbound, and None is as good an instance as any
    assert seen.pop() == (None, (1, 2), {})
    assert seen == [
        (None, (1, 2), {"c": 3, "d": 4, "e": 5}),
        (instance, (1, 2), {}),
        (mod.C, (1,), {}),
        (None, (1,), {}),
    ]


@pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])
def test_a_running_generator_keeps_its_code(framework, engine, kind):
    case = CASES["generator"]
    framework.write("mod", case.source)
    patch = framework.patch(change(framework, kind, case))
    f = framework.load().f
    made = engine(patch)
    running = f("x")
    next(running)
    assert made.apply()[patch.name].status is Status.APPLIED
    patched = f("y")
    assert next(patched) == "y"
    made.revert()
    assert (list(running), list(patched)) == (["old"], ["renewed"])


@pytest.mark.parametrize("kind", ["replace", "wrap"])
def test_generators_pass_send_throw_close_and_their_result_through(framework, engine, kind):
    source = """
def f():
    try:
        while True:
            try:
                got = yield "ready"
                log.append(("sent", got))
                if got == "stop":
                    return "result"
            except KeyError as error:
                log.append(("thrown", str(error)))
    finally:
        log.append("closed")
log = []
"""
    framework.write("mod", source)
    framework.write(
        "fixes",
        f"from {framework.name}.mod import log\n{source.replace('log = []', '')}"
        "def around(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs)",
    )
    prints = {fingerprint(source, "f"): "1.0"}
    one = (
        Replace(framework.path("mod:f"), framework.path("fixes:f"), prints)
        if kind == "replace"
        else Wrap(framework.path("mod:f"), framework.path("fixes:around"), prints)
    )
    mod = framework.load()

    def drive():
        del mod.log[:]
        generator = mod.f()
        next(generator)
        generator.send(1)
        generator.throw(KeyError("k"))
        with pytest.raises(StopIteration) as end:
            generator.send("stop")
        abandoned = mod.f()
        next(abandoned)
        abandoned.close()
        return end.value.value, list(mod.log)

    before = drive()
    patch = framework.patch(one)
    assert engine(patch).apply()[patch.name].status is Status.APPLIED
    assert drive() == before == ("result", [("sent", 1), ("thrown", "'k'"), ("sent", "stop"), "closed", "closed"])


def test_an_exception_inside_wrap_leaves_the_function_usable(framework, engine):
    source = "def f(x): return 1 / x\n"
    framework.write("mod", source)
    framework.write("fixes", "def plain(wrapped, instance, args, kwargs): return wrapped(*args) + 1\n")
    f = framework.load().f
    patch = framework.patch(
        Wrap(framework.path("mod:f"), framework.path("fixes:plain"), {fingerprint(source, "f"): "1.0"})
    )
    engine(patch).apply()
    with pytest.raises(ZeroDivisionError):
        f(0)
    assert f(1) == 2


# ----------------------------------------------------------------------------------------- after apply()

UNDONE = {
    "attribute replaced": ("mod.f = lambda x: x", "was replaced after it was patched"),
    "code set back": ("mod.f.__code__ = code", "other code has changed"),
    "attribute deleted": ("del mod.f", "does not define"),
    "module forgotten": ("import sys; del sys.modules[mod.__name__]", "no longer imported"),
}


@pytest.mark.parametrize("kind", ["rewrite", "wrap"])
@pytest.mark.parametrize("name", UNDONE)
def test_report_notices_what_was_undone(framework, engine, name, kind):
    """ "applied" is said of nothing that does not run, and another apply() must not claim it either."""
    meddling, fragment = UNDONE[name]
    case = CASES["imported by name"]
    framework.write("mod", case.source)
    patch = framework.patch(change(framework, kind, case))
    made = engine(patch)
    mod = framework.load()
    code = mod.f.__code__
    assert made.apply()[patch.name].status is Status.APPLIED
    exec(meddling, {"mod": mod, "code": code})
    row = made.report()[patch.name]
    assert row.status is Status.FAILED
    assert fragment in row.reason
    if name != "module forgotten":
        assert made.apply()[patch.name].status.is_problem


def test_a_decorator_around_the_patched_function_is_no_undoing(framework, engine):
    """Profilers and tracers wrap with functools.wraps; the patched function still runs behind them."""
    framework.write("mod", 'def f(x): return x + "old"')
    patch = framework.patch(Rewrite(framework.path("mod:f"), '"old"', '"renewed"'))
    made = engine(patch)
    mod = framework.load()
    made.apply()
    inner = mod.f
    mod.f = functools.wraps(inner)(lambda *a: inner(*a))
    assert made.report()[patch.name].status is Status.APPLIED
    assert mod.f("x") == "xrenewed"


def test_revert_leaves_somebody_elses_code_alone(framework, engine):
    framework.write("mod", 'def f(x): return x + "old"')
    patch = framework.patch(Rewrite(framework.path("mod:f"), '"old"', '"renewed"'))
    made = engine(patch)
    f = framework.load().f
    made.apply()
    f.__code__ = theirs = (lambda x: "theirs").__code__
    row = made.revert()[patch.name]
    assert row.status is Status.FAILED
    assert "other code has changed" in row.reason
    assert f.__code__ is theirs
