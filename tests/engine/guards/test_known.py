"""What is known of a text beforehand: used for what it was found in, never believed beyond that, never in the way."""

from __future__ import annotations

import builtins
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "release_record"))

import texts

from rlhf_patches import Patch, Replace, Rewrite, Status, Wrap, fingerprint
from rlhf_patches.guards import known, patterns, rewriting, shapes, slices, sources
from rlhf_patches.guards.places import Place, Source

SOURCE = """\
import os

def f(a):
    return a - 1, a - os.path.getsize(os.devnull) - 2

class C:
    def h(self):
        return os.getcwd()

    def g(self, a, *, b=1):
        \"\"\"It says so.\"\"\"
        return a - b
"""
AROUND = "def around(w, i, args, kwargs):\n    return w(*args, **kwargs) + 100\n"


@pytest.fixture
def patch(framework) -> Patch:
    framework.write("mod", SOURCE)
    framework.write("fixes", AROUND)
    return framework.patch(
        Rewrite(framework.path("mod:f"), "a - 1", "a + 1"),
        Rewrite(framework.path("mod:f"), "a - $X - 2", "a + $X + 2"),
        Wrap(framework.path("mod:C.g"), framework.path("fixes:around"), {fingerprint(SOURCE, "C.g"): "1.0"}),
    )


def facts_of(framework: Any, patch: Patch, text: str = SOURCE) -> texts.Facts:
    """What the survey would ship of a text."""
    name = f"{framework.name}.mod"
    return texts.of_text(Source(name, "mod.py", text), patch.variants)


@pytest.fixture
def ship(framework, monkeypatch) -> Callable[[bytes], None]:
    """Has the package come with these facts."""

    def ship(data: bytes) -> None:
        real = pkgutil.get_data

        def get_data(package: str, name: str) -> bytes | None:
            return data if name == f"texts/{framework.name}.json" else real(package, name)

        monkeypatch.setattr(known.pkgutil, "get_data", get_data)

    return ship


@pytest.fixture
def work(monkeypatch) -> list[str]:
    """What was parsed, compiled as a whole, and looked for, by name."""
    done: list[str] = []

    def counted(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: Any) -> object:
            if name != "_compile" or "getcwd" in arguments[0]:  # no slice of what is patched has it
                done.append(name)
            return real(*arguments)

        monkeypatch.setattr(module, name, call)

    counted(sources, "_parse")
    counted(rewriting, "_compile")
    counted(patterns, "_by_line")
    return done


@pytest.fixture
def applied(framework, engine) -> Iterator[Callable[[Patch], tuple[Status, str, object]]]:
    """What a new process says of a patch, and the code of the rewritten function then: as released or repaired."""

    def apply(patch: Patch) -> tuple[Status, str, object]:
        for name in [name for name in sys.modules if name.startswith(framework.name)]:
            del sys.modules[name]
        one = engine(patch)
        one.apply()
        mod = framework.load()
        (row,) = one.report()
        code = mod.f.__code__
        results = mod.f(10), mod.C().g(10, b=3)
        one.revert()
        assert (mod.f(10), mod.C().g(10)) == ((9, 8), 9)
        assert results == (((11, 12), 107) if row.status is Status.APPLIED else ((9, 8), 7))
        positions = code.co_positions if sys.version_info >= (3, 11) else code.co_lines
        return row.status, row.reason, (code, code.co_filename, [*positions()])

    return apply


SEARCHED = {"_parse", "_compile", "_by_line"}


def test_a_known_text_is_not_searched(framework, applied, patch, work, ship):
    first = applied(patch)
    assert first[0] is Status.APPLIED
    assert set(work) == SEARCHED
    ship(facts_of(framework, patch).to_bytes())
    del work[:]
    assert applied(patch) == first
    assert not work


def test_without_ast_grep(framework, applied, patch, ship, monkeypatch):
    """Nor is it imported."""
    facts = facts_of(framework, patch).to_bytes()
    monkeypatch.setattr(patterns, "_ast_grep", None)
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "ast_grep_py":
            raise ImportError("not here")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    ship(facts)
    assert applied(patch)[0] is Status.APPLIED
    assert not patterns.ast_grep_is_known()
    ship(b"")
    monkeypatch.setattr(patterns, "_without_ast_grep", None)
    status, reason, _ = applied(patch)
    assert status is Status.FAILED
    assert "ast_grep_py, which locates the code to rewrite, cannot be imported: not here" in reason
    monkeypatch.setattr(patterns, "_without_ast_grep", None)


def test_an_edited_text_is_searched(framework, applied, patch, work, ship):
    ship(facts_of(framework, patch).to_bytes())
    framework.write("mod", SOURCE + "\nX = 1\n")
    del work[:]
    assert applied(patch)[0] is Status.APPLIED
    assert set(work) == SEARCHED


def test_another_change_is_searched_for(framework, applied, patch, work, ship):
    """As a patch of a plugin is: what is known of the text is known of our own changes."""
    ship(facts_of(framework, patch).to_bytes())
    wrap = patch.variants[0].changes[2]
    target = framework.path("mod:f")
    others = [
        (Rewrite(target, "a - 1", "1 + a"), patch.variants[0].changes[1], wrap),
        (Rewrite(target, "$A - 1", "$A + 1"), patch.variants[0].changes[1], wrap),
        (Rewrite(target, "return a - 1, $_", "return a + 1, a + 2"), wrap),
    ]
    for changes in others:
        del work[:]
        assert applied(framework.patch(*changes))[0] is Status.APPLIED
        assert "_by_line" in work
    del work[:]
    refused = Wrap(wrap.target, wrap.implementation, {"0" * 16: "1.0"})
    status, reason, _ = applied(framework.patch(*patch.variants[0].changes[:2], refused))
    assert status is Status.REFUSED
    assert "has the fingerprint" in reason
    assert not work


@pytest.mark.parametrize(
    "change",
    [
        lambda path: Rewrite(path("mod:f"), "a - 7", "a + 7"),
        lambda path: Rewrite(path("mod:f"), "f(a=a, b)", "f(b, a=a)"),  # no Python, which is said
        lambda path: Rewrite(path("mod:f"), "a - 1", "a + 1", alongside=("a", "a * 5")),
        lambda path: Rewrite(path("mod:f"), "a - 1", "a + 1", unless=("a * 5", "return $$$A")),
        lambda path: Rewrite(path("mod:gone"), "a - 7", "a + 7"),
        lambda path: Replace(path("mod:C.gone"), path("fixes:around"), {"0" * 16: "1.0"}),
    ],
)
def test_a_refusal_is_known_too(framework, engine, patch, work, ship, change):
    patch = framework.patch(change(framework.path))
    rows = []
    for data in (b"", facts_of(framework, patch).to_bytes()):
        ship(data)
        del work[:]
        one = engine(patch)
        framework.load()
        rows += one.apply()
    first, second = rows
    assert first == second
    assert first.status is Status.REFUSED
    assert not work


def test_a_name_that_the_module_defines_is_known_in_a_slice(framework, applied, patch, work, ship):
    """The slice does not define it; that something does was seen in the whole."""
    text = SOURCE + "\nONE = 1\n"
    framework.write("mod", text)
    _, *others = patch.variants[0].changes
    patch = framework.patch(Rewrite(framework.path("mod:f"), "a - 1", "a + ONE"), *others)
    ship(facts_of(framework, patch, text).to_bytes())
    del work[:]
    assert applied(patch)[0] is Status.APPLIED
    assert not work


def test_its_signature_is_looked_up_in_the_text(framework, engine, patch, work, ship):
    path = framework.path
    patch = framework.patch(
        Wrap(path("mod:f"), path("fixes:around"), signature="(a)", signature_suffices="the body does not matter")
    )
    ship(facts_of(framework, patch).to_bytes())
    one = engine(patch)
    framework.load()
    (row,) = one.apply()
    assert row.status is Status.APPLIED
    assert "_parse" in work


# ------------------------------------------------------------------------------------------ wrong, damaged


def _at(data: Any, path: str) -> tuple[Any, Any]:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in parents:
        data = next(iter(data.values())) if part == "*" else data[part]
    return data, (next(iter(data)) if last == "*" else last)


PLACE = "texts/*/functions/f"
WRONG = {
    "first line, below": (f"{PLACE}/0", lambda line: line + 1),
    "first line, above": (f"{PLACE}/0", lambda line: line - 1),
    "first line, nowhere": (f"{PLACE}/0", lambda line: 99),
    "first line, of another function": (f"{PLACE}/0", lambda line: 7),
    "no import": ("texts/*/imported", lambda names: []),
    "other imports": ("texts/*/imported", lambda names: ["a", "x y"]),
    "the future": ("texts/*/future", lambda names: ["annotations"]),
    "no future": ("texts/*/future", lambda names: ["nothing"]),
    "digest": (f"{PLACE}/1", lambda digest: "0" * 16),
    "too long": ("lines", lambda lines: lines + 1),
    "too short": ("lines", lambda lines: lines - 1),
    "name": ("name", lambda name: "other"),
    "column": ("column", lambda column: 4),
    "edit, later": ("changes/*/edits/0/0", lambda start: start + 1),
    "edit, at the same text elsewhere": ("changes/*/edits/0", lambda edit: [edit[0] + 7, edit[1] + 7, edit[2]]),
    "edit, longer": ("changes/*/edits/0/1", lambda end: end + 1),
    "edit, outside": ("changes/*/edits/0/1", lambda end: end + 1000),
    "edit, before": ("changes/*/edits/0/0", lambda start: -5),
    "edit, backwards": ("changes/*/edits/0", lambda edit: [edit[1], edit[0], edit[2]]),
    "edit, other text": ("changes/*/edits/0/2", lambda text: "a + 9"),
    "edit, more lines": ("changes/*/edits/0/2", lambda text: "(a +\n1)"),
    "edit, twice": ("changes/*/edits", lambda edits: [*edits, *edits]),
    "no edit": ("changes/*/edits", lambda edits: []),
    "edited digest": ("changes/*/after", lambda digest: "0" * 16),
    "a count": ("changes/*", lambda found: 2),
    "of another change": ("changes/*", lambda found: {"edits": [], "after": ""}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_fact_never_patches_wrongly(framework, applied, patch, ship, wrong):
    """The file is whole, but not true: `applied` checks that what runs is the repair, or what was there."""
    facts = facts_of(framework, patch)
    path, change = WRONG[wrong]
    (f,) = [function for function in facts.functions.values() if function["name"] == "f"]
    holder, key = _at({"texts": facts.texts} if path.startswith("texts") else f, path)
    assert holder[key] != change(holder[key])
    holder[key] = change(holder[key])
    ship(facts.to_bytes())
    assert applied(patch)[0] in (Status.APPLIED, Status.REFUSED)


def test_facts_of_another_text_of_the_function_do_not_count(framework, engine, patch, ship):
    """The fingerprint of the one release would be said of the other."""
    text = SOURCE.replace("return a - b", "return a * b")
    facts, others = facts_of(framework, patch, text), facts_of(framework, patch)
    facts.add(others)
    (one, *_), (other, *_) = (next(iter(each.texts.values()))["functions"]["C.g"][1:] for each in (others, facts))
    assert one != other
    facts.texts[known.digest(text)]["functions"]["C.g"][1] = one
    ship(facts.to_bytes())
    framework.write("mod", text)
    made = engine(patch)
    framework.load()
    (row,) = made.apply()
    assert row.status is Status.REFUSED
    assert "has the fingerprint" in row.reason


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_not_there(framework, applied, patch, work, ship, seed):
    data = facts_of(framework, patch).to_bytes()
    place = len(data) * seed // 40
    ship(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] if seed else data[: len(data) // 2])
    del work[:]
    assert applied(patch)[0] is Status.APPLIED
    assert set(work) == SEARCHED


def test_where_a_slice_gives_other_code_the_whole_module_counts(framework, applied, patch, ship, work, monkeypatch):
    """As on a Python that nobody has tried."""
    ship(facts_of(framework, patch).to_bytes())
    real = slices.cut

    def cut(lines: list[str], place: Place) -> list[str]:
        return [line.replace("return a", "return 1 * a") for line in real(lines, place)]

    monkeypatch.setattr(slices, "cut", cut)
    del work[:]
    assert applied(patch)[0] is Status.APPLIED
    assert "_compile" in work
    assert "_by_line" not in work


def test_the_file_is_json_with_a_line_for_each_fact(framework, patch):
    data = facts_of(framework, patch).to_bytes()
    found = json.loads(data)
    assert found["sha256"]
    lines = data.decode().split("\n")
    assert {line.partition(":")[0].strip('"') for line in lines} > {*found["texts"], *found["functions"]}


def test_what_was_found_twice_in_different_ways_is_an_error(framework, patch):
    """Facts of a function stand for every text that has it: they must not depend on more."""
    one, other = facts_of(framework, patch), facts_of(framework, patch)
    one.add(other)
    next(iter(other.functions.values()))["lines"] += 1
    with pytest.raises(ValueError, match="different things were found"):
        one.add(other)


def test_the_same_as_by_search(framework, patch, ship):
    """Place, edits and fingerprint of every change."""
    source = Source(f"{framework.name}.mod", "mod.py", SOURCE)
    changes = patch.variants[0].changes
    alone = [shapes.recognize(change, source) for change in changes]
    ship(facts_of(framework, patch).to_bytes())
    with_facts = known.look_up(source)
    assert with_facts.known is not None
    found = [shapes.recognize(change, with_facts).in_the_whole() for change in changes]
    assert [item._replace(source=source) for item in found] == alone
