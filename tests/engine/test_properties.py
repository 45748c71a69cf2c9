"""Random sequences of operations, and random upstream text.

Derandomised, so that a failure here is one everywhere; HYPOTHESIS_PROFILE=explore (see below) looks further.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import itertools
import logging
import os
import random
import sys
import textwrap
import tokenize
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
from effort import SHARE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_patches import Replace, Rewrite, Status, Wrap
from rlhf_patches.patches.megatron_core import no_sync
from rlhf_patches.sources import fingerprint

EXPLORE = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
COMMON = {
    "deadline": None,
    "derandomize": not EXPLORE,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Hundreds of refusals are wanted here; their warnings would bury a real failure's report."""
    monkeypatch.setattr(logging.getLogger("rlhf_patches"), "disabled", True)


# ----------------------------------------------------------------------- sequences of operations, and a model

ONE = """
def f():
    return ["a0", "b0"]
class C:
    def g(self): return "g0"
def h(): return "h0"
"""
TWO = """
def h(): return "h0"
def k(): return "k0"
"""
FIXES = """
def around(wrapped, instance, args, kwargs): return ["wrapped", wrapped()]
def k(): return "k1"
"""
# What each patch holds: (module, function). The order is that of registration, in which apply() works.
HOLDS = {
    "fw-a": [("one", "f")],
    "fw-b": [("one", "f")],
    "fw-around-f": [("one", "f")],
    "fw-g": [("one", "C.g")],
    "fw-h": [("one", "h"), ("two", "h")],
    "fw-k": [("two", "k")],
}
EXCLUSIVE = {("fw-a", "fw-around-f"), ("fw-b", "fw-around-f"), ("fw-around-f", "fw-a"), ("fw-around-f", "fw-b")}


def patches_for(framework, one, two, fixes):
    path, implementation = {"one": framework.path(one), "two": framework.path(two)}, framework.path(f"{fixes}:around")

    def prints(source, name):
        return (fingerprint(source, name),)

    changes = {
        "fw-a": [Rewrite(f"{path['one']}:f", '"a0"', '"the new a"')],
        "fw-b": [Rewrite(f"{path['one']}:f", '"b0"', '"the new b"')],
        "fw-around-f": [Wrap(f"{path['one']}:f", implementation, prints(ONE, "f"))],
        "fw-g": [Wrap(f"{path['one']}:C.g", implementation, prints(ONE, "C.g"))],
        "fw-h": [Rewrite(f"{path['one']}:h", '"h0"', '"new h"'), Rewrite(f"{path['two']}:h", '"h0"', '"new h"')],
        "fw-k": [Replace(f"{path['two']}:k", framework.path(f"{fixes}:k"), prints(TWO, "k"))],
    }
    return [framework.patch(*some, name=name) for name, some in changes.items()]


def value(name, holders):
    """What a function returns with these patches on it."""
    if name == "f":
        inner = ["the new a" if "fw-a" in holders else "a0", "the new b" if "fw-b" in holders else "b0"]
        return ["wrapped", inner] if "fw-around-f" in holders else inner
    if name == "C.g":
        return ["wrapped", "g0"] if holders else "g0"
    if name == "h":
        return "new h" if holders else "h0"
    return "k1" if holders else "k0"


class Model:
    """What should be patched, in sets and lists. A reload makes new functions; the old ones keep what they have."""

    def __init__(self):
        self.requested, self.status = set(), dict.fromkeys(HOLDS, Status.DISABLED)
        self.generations = {"one": [], "two": []}  # of each module: one dict a load, function -> holders

    def attempt(self, patch, announced=False):
        if patch not in self.requested or (self.status[patch] is Status.APPLIED and not announced):
            return
        if not all(self.generations[module] for module, _ in HOLDS[patch]):
            self.status[patch] = Status.PENDING
            return
        held = [self.generations[module][-1][name] for module, name in HOLDS[patch]]
        if any((patch, other) in EXCLUSIVE for holders in held for other in holders):
            self.status[patch] = Status.REFUSED
            return
        for holders in held:
            holders.add(patch)
        self.status[patch] = Status.APPLIED

    def apply(self, names):
        self.requested |= set(names)
        for patch in HOLDS:
            self.attempt(patch)

    def revert(self, names):
        for patch in set(names) & self.requested:
            self.status[patch] = Status.DISABLED
            for generation in itertools.chain(*self.generations.values()):
                for holders in generation.values():
                    holders.discard(patch)
        self.requested -= set(names)

    def load(self, module):
        names = ("f", "C.g", "h") if module == "one" else ("h", "k")
        self.generations[module].append({name: set() for name in names})
        for patch, held in HOLDS.items():
            if any(where == module for where, _ in held):
                self.attempt(patch, announced=True)


subsets = st.lists(st.sampled_from(list(HOLDS)), unique=True)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), subsets),
        st.tuples(st.just("revert"), subsets),
        st.tuples(st.sampled_from(["import", "reload"]), st.sampled_from(["one", "two"])),
    ),
    max_size=14,
)


def functions_of(module, which):
    functions = {name: getattr(module, name, None) for name in ("f", "h", "k")}
    if which == "one":
        functions["C.g"] = module.C.__dict__["g"]
    return {name: function for name, function in functions.items() if function is not None}


@settings(max_examples=150, **COMMON)
@given(steps=operations)
def test_any_sequence_of_operations(framework, engine, steps):
    """Behaviour and statuses are the model's after each step; after the last revert every code object is back."""
    number = next(_numbers)
    names = {"one": f"one{number}", "two": f"two{number}"}
    framework.write(names["one"], ONE)
    framework.write(names["two"], TWO)
    framework.write(f"fixes{number}", FIXES)
    made = engine(*patches_for(framework, names["one"], names["two"], f"fixes{number}"))
    model, modules = Model(), {}
    seen = {"one": [], "two": []}  # every generation's functions, kept as a user's references would
    for operation, what in steps:
        if operation == "apply":
            made.apply(only=what)
            model.apply(what)
        elif operation == "revert":
            made.revert(only=what)
            model.revert(what)
        elif (operation == "import" and what not in modules) or (operation == "reload" and what in modules):
            if operation == "import":
                modules[what] = framework.load(names[what])
            else:
                importlib.reload(modules[what])
            seen[what].append(functions_of(modules[what], what))
            model.load(what)
        assert {row.name: row.status for row in made.report()} == model.status
        for which, generations in seen.items():
            for functions, holders in zip(generations, model.generations[which], strict=True):
                for name, function in functions.items():
                    result = function(None) if name == "C.g" else function()
                    assert result == value(name, holders[name])
    made.revert()
    for which, text in (("one", ONE), ("two", TWO)):
        for functions in seen[which]:
            witness = ModuleType("witness")
            exec(compile(text, modules[which].__file__, "exec", dont_inherit=True), witness.__dict__)
            unpatched = functions_of(witness, which)
            assert {n: f.__code__ for n, f in functions.items()} == {n: f.__code__ for n, f in unpatched.items()}


@settings(max_examples=60, **COMMON)
@given(steps=operations)
def test_the_original_code_object_comes_back(framework, engine, steps):
    """``is``, not ``==``: the modules are imported before anything is applied, so their code can be remembered."""
    number = next(_numbers)
    framework.write(f"one{number}", ONE)
    framework.write(f"two{number}", TWO)
    framework.write(f"fixes{number}", FIXES)
    made = engine(*patches_for(framework, f"one{number}", f"two{number}", f"fixes{number}"))
    functions = [
        function
        for which in ("one", "two")
        for function in functions_of(framework.load(f"{which}{number}"), which).values()
    ]
    codes = [function.__code__ for function in functions]
    for operation, what in steps:
        if operation in ("apply", "revert"):
            getattr(made, operation)(only=what)
    made.revert()
    assert all(function.__code__ is code for function, code in zip(functions, codes, strict=True))


# --------------------------------------------------------------------------------- random upstream text

TRAINERS = {
    "plain": '''
        """A trainer."""
        STEPS = 3

        def unrelated(config):
            assert config.no_sync_func is None, "unrelated"
            return config

        def train(model, config, args):
            """Trains."""
            total = 0
            if args.overlap:
                assert config.no_sync_func is None, (
                    "When overlap_grad_reduce is True, config.no_sync_func must be None; "
                    "a custom no_sync_func is not supported"
                )
                config.no_sync_func = [chunk.no_sync for chunk in model]
                if len(model) == 1:
                    config.no_sync_func = config.no_sync_func[0]
            for step in range(STEPS):
                total += step * args.scale
            return total, len(model)

        class Helper:
            def run(self, config):
                return unrelated(config)
        ''',
    "backslash": """
        def is_main(): return True

        def train(model, config, args):
            if isinstance(model[0], object) and args.overlap:
                assert config.no_sync_func is None, \\
                    ('When overlap_grad_reduce is True, config.no_sync_func must be None; '
                     'a custom no_sync_func is not supported when overlapping grad-reduce')
                config.no_sync_func = [model_chunk.no_sync for model_chunk in model]
                if len(model) == 1: config.no_sync_func = config.no_sync_func[0]
            def report(x):  # an inner function
                return [x, args.scale]
            return report(len(model))
        """,
    "one line": """
        def train(model, config, args):
            assert config.no_sync_func is None, 'must be None'  # é 🎉
            config.no_sync_func = [c.no_sync for c in model]
            return args.scale

        def other(config): return config
        """,
}
SWAPS = {
    "is": ["==", "is not"],
    "==": ["!=", "is"],
    "+=": ["-="],
    "*": ["+"],
    "and": ["or"],
    "1": ["2"],
    "None": ["0", "True"],
}
SWAPS |= {"no_sync_func": ["no_sync_function"], "no_sync": ["sync"], "assert": ["return"], "for": ["async for"]}


def tokens_of(text):
    """Start and end (offsets) of every token that is more than layout; as far as the text can be read."""
    starts = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    spans = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.string.strip() and token.type != tokenize.COMMENT:
                spans.append((starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]))
    except (tokenize.TokenError, SyntaxError, IndexError):
        pass
    return spans


def mutate(text, chance):
    """One random change of a text, such as upstream (or a bad merge) might make."""
    lines, spans = text.split("\n"), tokens_of(text)
    n = chance.randrange(len(lines))
    line, indent = lines[n], lines[n][: len(lines[n]) - len(lines[n].lstrip())]
    a, b = chance.choice(spans) if spans else (0, 0)
    kind = chance.choice(KINDS + MILD)
    if kind == "delete token":
        return text[:a] + text[b:]
    if kind == "duplicate token":
        return f"{text[:b]} {text[a:b]}{text[b:]}"
    if kind == "swap tokens" and len(spans) > 1:
        i = chance.randrange(len(spans) - 1)
        (a, b), (c, d) = spans[i], spans[i + 1]
        return text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]
    if kind == "replace operator":
        places = [(a, b) for a, b in spans if text[a:b] in SWAPS]
        if places:
            a, b = chance.choice(places)
            return text[:a] + chance.choice(SWAPS[text[a:b]]) + text[b:]
    if kind in ("rename one", "rename all"):
        old, new = text[a:b], chance.choice(["model", "config", "cfg", "train", "chunk", "no_sync_func", "x"])
        if old.isidentifier():
            places = [(a, b)] if kind == "rename one" else [(c, d) for c, d in spans if text[c:d] == old]
            for c, d in reversed(places):
                text = text[:c] + new + text[d:]
            return text
    if kind == "delete line":
        return "\n".join(lines[:n] + lines[n + 1 :])
    if kind == "duplicate line":
        return "\n".join(lines[: n + 1] + lines[n:])
    if kind == "move line":
        rest = lines[:n] + lines[n + 1 :]
        m = chance.randrange(len(lines))
        return "\n".join(rest[:m] + [line] + rest[m:])
    if kind == "wrap in if" and line.strip():
        return "\n".join(
            [*lines[:n], f"{indent}if len({chance.choice(['str(1)', '()'])}):", f"    {line}", *lines[n + 1 :]]
        )
    if kind == "comment":
        return "\n".join([*lines[:n], f"{indent}# é 🎉 was: {line.strip()}", *lines[n:]])
    if kind == "layout":
        places = [(a, b) for a, b in spans if text[a:b] in ("is", "(", ",", "[", ".", "for")]
        if places:
            a, b = chance.choice(places)
            return text[:b] + chance.choice(["  ", " \\\n    ", "\n", "\t"]) + text[b:]
    if kind == "decorate" and line.lstrip().startswith("def "):
        return "\n".join([*lines[:n], f"{indent}@(lambda g: lambda *a: g(*a))", *lines[n:]])
    if kind == "indent":
        return "\n".join([*lines[:n], "    " + line, *lines[n + 1 :]])
    return text


KINDS = [
    "delete token",
    "duplicate token",
    "swap tokens",
    "replace operator",
    "rename one",
    "rename all",
    "delete line",
    "duplicate line",
    "move line",
    "wrap in if",
    "comment",
    "layout",
    "decorate",
    "indent",
]
# These more often: what they leave is mostly valid.
MILD = ["replace operator", "rename one", "rename all", "delete line", "wrap in if", "move line"]


class Repair(ast.NodeTransformer):
    """The repair done independently of the engine, on the syntax tree."""

    def __init__(self):
        self.assertions = 0

    def visit_Assert(self, node):
        test = node.test
        if (
            node.msg is not None
            and isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and isinstance(test.ops[0], ast.Is)
            and isinstance(test.comparators[0], ast.Constant)
            and test.comparators[0].value is None
            and isinstance(test.left, ast.Attribute)
            and test.left.attr == "no_sync_func"
        ):
            self.assertions += 1
            call = ast.Call(ast.Name("_repaired", ast.Load()), [test.left], [])
            return ast.copy_location(ast.Assert(call, node.msg), node)
        return self.generic_visit(node)


def repaired_by_hand(text, file):
    """The module with the assertion of ``train`` repaired, and how many assertions that were."""
    tree, repair = ast.parse(text), Repair()
    for node in ast.walk(tree):
        for name, field in ast.iter_fields(node):
            if isinstance(field, list):
                setattr(
                    node,
                    name,
                    [repair.visit(i) if isinstance(i, ast.FunctionDef) and i.name == "train" else i for i in field],
                )
    module = ModuleType("by_hand")
    module._repaired = no_sync.is_none_or_megatrons
    exec(compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True), module.__dict__)
    return module, repair.assertions


def behaviour(train, base):
    """What ``train`` does in every situation that the patch is about."""

    class Chunk(base):
        def no_sync(self):
            return None

    chunks = [Chunk(), Chunk()]
    found = []
    for model, before in [
        (chunks[:1], None),
        (chunks, None),
        (chunks[:1], chunks[0].no_sync),
        (chunks, [c.no_sync for c in chunks]),
        (chunks[:1], len),
        (chunks, [chunks[0].no_sync, len]),
        (chunks, []),
    ]:
        config = SimpleNamespace(no_sync_func=before)
        try:
            result = repr(train(model, config, SimpleNamespace(overlap=True, scale=2)))
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        installed = getattr(config, "no_sync_func", "gone")
        found.append((result.split(" at 0x")[0], installed == [c.no_sync for c in chunks], installed == before))
    return found


@pytest.fixture
def megatron_base(monkeypatch):
    """A stand-in for Megatron's base class: the patch's helper looks it up in ``sys.modules``."""
    base = type("_BaseDataParallel", (), {})
    module = ModuleType("megatron.core.distributed.data_parallel_base")
    module._BaseDataParallel = base
    for name, _ in no_sync._BASES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return base


def all_functions(module):
    spaces = [vars(module), *(vars(v) for v in vars(module).values() if isinstance(v, type))]
    return [v for space in spaces for v in space.values() if inspect.isfunction(v)]


def real_change(target):
    made = no_sync.patch("toy-trainer", "Toy", target, no_sync.Guard("toy", ""), ("r",))
    (change,) = made.changes
    assert isinstance(change, Rewrite)
    return dataclasses.replace(change, target=target)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_unmutated_trainers_are_repaired(framework, engine, megatron_base, name):
    """Otherwise the mutations below would prove nothing."""
    text = textwrap.dedent(TRAINERS[name])
    framework.write("mod", text)
    mod = framework.load()
    before = behaviour(mod.train, megatron_base)
    patch = framework.patch(real_change(framework.path("mod:train")))
    assert engine(patch).apply()[patch.name].status is Status.APPLIED
    after = behaviour(mod.train, megatron_base)
    assert [result.startswith("AssertionError") for result, *_ in before] == [False] * 2 + [True] * 5
    assert [result.startswith("AssertionError") for result, *_ in after] == [False] * 4 + [True] * 3
    by_hand, assertions = repaired_by_hand(text, mod.__file__)
    assert (assertions, after) == (1, behaviour(by_hand.train, megatron_base))


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_mutated_upstream_text(framework, engine, megatron_base, capsys):
    """Repaired exactly as by hand, or refused and untouched. Never an exception, never another function changed."""
    counts: Counter[str] = Counter()

    @settings(max_examples=6000 if EXPLORE else 1700 // SHARE, **COMMON)
    @given(
        base=st.sampled_from(sorted(TRAINERS)),
        seed=st.integers(0, 2**32),
        times=st.integers(1, 3),
        before=st.booleans(),
    )
    def run(base, seed, times, before):
        chance = random.Random(seed)
        text = original = textwrap.dedent(TRAINERS[base])
        for _ in range(times):
            text = mutate(text, chance)
        if text == original:
            counts["not mutated"] += 1
            return
        counts[one_mutant(framework, engine, megatron_base, text, before)] += 1

    run()
    with capsys.disabled():
        print(f"\n  mutants: {dict(counts)}")
    assert counts["applied"] + counts["refused"] >= 500 / SHARE, "too few mutants that import"
    assert min(counts["applied"], counts["refused"], counts["does not import"]) >= 100 / SHARE


def one_mutant(framework, engine, base, text, apply_before_import):
    name = f"mutant{next(_numbers)}"
    file = framework.write(name, "")
    file.write_text(text, encoding="utf-8")
    patch = framework.patch(real_change(framework.path(f"{name}:train")))
    made = engine(patch)
    if apply_before_import:
        assert made.apply()[patch.name].status is Status.PENDING
    try:
        mod = framework.load(name)
    except Exception as error:
        # The import's own failure, as without us; the patch still waits.
        with pytest.raises(type(error)):
            exec(compile(text, str(file), "exec", dont_inherit=True), {"__name__": name})
        row = made.apply()[patch.name]
        assert row.status is Status.PENDING, row
        return "does not import"
    witness = ModuleType("witness")  # the same text, never patched
    exec(compile(text, str(file), "exec", dont_inherit=True), witness.__dict__)
    if not apply_before_import:
        codes = {function: function.__code__ for function in all_functions(mod)}
        row = made.apply()[patch.name]
        others = [f for f, code in codes.items() if f.__code__ is not code]
        assert row.status is not Status.REFUSED or not others
        assert all(f.__name__ == "train" for f in others)
    row = made.report()[patch.name]
    assert row.status in (Status.APPLIED, Status.REFUSED), row
    unpatched = {f.__qualname__: f.__code__ for f in all_functions(witness)}
    differing = {f.__qualname__ for f in all_functions(mod) if f.__code__ != unpatched[f.__qualname__]}
    by_hand, assertions = repaired_by_hand(text, str(file))
    if row.status is Status.REFUSED:
        assert not differing
        if hasattr(witness, "train"):
            assert behaviour(mod.train, base) == behaviour(witness.train, base)
        return "refused"
    assert assertions == 1
    assert behaviour(mod.train, base) == behaviour(by_hand.train, base)
    assert differing <= {"train"}
    made.revert()
    assert behaviour(mod.train, base) == behaviour(witness.train, base)
    return "applied"
