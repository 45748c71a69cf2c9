"""Random sequences of operations, and random upstream text."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import random
import sys
import textwrap
import tokenize
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_patches import Rewrite, Status
from rlhf_patches.patches.megatron_core import _no_sync
from tests.harness.effort import SHARE
from tests.harness.random_tests import COMMON, EXPLORE, numbers

pytestmark = pytest.mark.usefixtures("quiet")


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
    module._repaired = _no_sync.is_none_or_megatrons
    exec(compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True), module.__dict__)
    return module, repair.assertions


def behavior(train, base):
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
    for name, _ in _no_sync._BASES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return base


def all_functions(module):
    spaces = [vars(module), *(vars(v) for v in vars(module).values() if isinstance(v, type))]
    items = [item for space in spaces for item in space.items()]
    return [v for name, v in items if inspect.isfunction(v) and not name.startswith("_rlhf_patches_entered_")]


def real_change(target):
    made = _no_sync.patch("toy-trainer", "Toy", {_no_sync.Guard("toy", ""): target}, ("r",))
    ((change,),) = (variant.changes for variant in made.variants)
    assert isinstance(change, Rewrite)
    return change


@pytest.mark.parametrize("name", TRAINERS)
def test_the_unmutated_trainers_are_repaired(framework, engine, megatron_base, name):
    """Otherwise the mutations below would prove nothing."""
    text = textwrap.dedent(TRAINERS[name])
    framework.write("mod", text)
    mod = framework.load()
    before = behavior(mod.train, megatron_base)
    patch = framework.patch(real_change(framework.path("mod:train")))
    assert engine(patch).apply()[patch.name].status is Status.APPLIED
    after = behavior(mod.train, megatron_base)
    assert [result.startswith("AssertionError") for result, *_ in before] == [False] * 2 + [True] * 5
    assert [result.startswith("AssertionError") for result, *_ in after] == [False] * 4 + [True] * 3
    by_hand, assertions = repaired_by_hand(text, mod.__file__)
    assert (assertions, after) == (1, behavior(by_hand.train, megatron_base))


@pytest.mark.exhaustive
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
    name = f"mutant{next(numbers)}"
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
            assert behavior(mod.train, base) == behavior(witness.train, base)
        return "refused"
    assert assertions == 1
    assert behavior(mod.train, base) == behavior(by_hand.train, base)
    assert differing <= {"train"}
    made.revert()
    assert behavior(mod.train, base) == behavior(witness.train, base)
    return "applied"
