"""The tests that an author names for each rule and for each claim of a patch's texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ..definitions.bug import KnownBug
from . import conduct

RULES = {
    "minimal scope": (
        "the patch first checks, cheaply, whether the bug occurs; if not, only upstream's statements run"
    ),
    "no side effects": ("the user's objects keep their types, identities and attributes (`untouched`)"),
    "backward compatible": "upstream's inputs work as before: types, subclasses, missing keys, half precision, names",
    "no new blocking": "no exception between a rank's start and a collective, and every lock has a bound",
}
"""The rules for which every patch must name tests."""
KNOWN = "known"
"""The rule for patches that decide by a name, a signature, a stack or autograd's graph (`conduct.inferences`)."""

_CLAIM = re.compile(
    r"""\bbit\ for\ bit\b | \bexactly\b | \bthe\ very\b | \bwith\ and\ without\ the\ patch\b
    | \bnothing\ (else\ )?(of\ .{0,40}\ )?changes\b | \bchanges?\ nothing\b | \bno\ change\b | \bnothing\ is\ done\b
    | \b(do|does|is|are)\ not\ changed?\b | \bunchanged\b | \buntouched\b | \bnot\ touched\b
    | (?<!go\ on\ )\bas\ before\b | \bas\ released\b | \b(as|what)\ (it|they)\ (was|were)\b(?!\ trained)
    | \b(is|are)\ left\ (alone|as)\b | \bleaves?\ .{0,40}\bas\ (it\ is|they\ are)\b | \bstays?\ (as|so)\b
    | \b(original\ function\ runs|own\ way\ is\ taken)\b""",
    re.VERBOSE | re.IGNORECASE,
)
"""Words by which a patch claims that something does not change."""

_PROMISE = re.compile(
    r"(?<!\bmay\ )\bstays?\b | \bnever\b(?!\ ends?\b) | \balways\b | \bonly\b", re.VERBOSE | re.IGNORECASE
)
"""Words that make a promise in the text on the repair; in other texts they describe upstream's code."""

_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z0-9`*(\[])|\n\s*\n|\n(?=[-|] )")

Held = Mapping[str, "str | Sequence[str]"]


def claims(patch: KnownBug) -> Iterator[str]:
    """The sentences of a patch's texts that claim that something does not change, and those with a promise."""
    repair = getattr(patch, "repair", None)
    for text in _texts(patch):
        for sentence in _END.split(text):
            words = " ".join(sentence.split())
            if _CLAIM.search(words) or (text is repair and _PROMISE.search(words)):
                yield words


def wrong_with(held: Held, patches: Collection[KnownBug], tests: Mapping[str, Collection[str]]) -> list[str]:
    """The problems, a line for each.

    Args:
        held: by rule, and by words of the patches' texts: names of tests, or a reason that begins with "because ".
        patches: the patches that `held` is for.
        tests: by file, "" for the file of `held`, the names of its tests.
    """
    wrong = [f'it has no "{rule}": {RULES[rule]}' for rule in RULES if rule not in held]
    for key, value in held.items():
        values = [value] if isinstance(value, str) else list(value)
        if not values:
            wrong.append(f'"{key}" names no test, and no reason')
        wrong += [f'"{key}": {problem}' for each in values if (problem := _wrong_with(each, tests))]
    if KNOWN not in held:
        inferences = [finding for patch in patches for finding in conduct.inferences(patch)]
        wrong += [f'it has no "{KNOWN}": the test of the decision in {finding}' for finding in inferences[:1]]
    words = {patch: " ".join(" ".join(_texts(patch)).split()) for patch in patches}
    further = [key for key in held if key not in (*RULES, KNOWN)]
    wrong += [
        f'"{key}" is in no text of the patch' for key in further if not any(key in each for each in words.values())
    ]
    for patch in patches:
        wrong += [
            f"{patch.name} states: {sentence} (expected a key of words in it, and the test that holds it)"
            for sentence in claims(patch)
            if not any(key in sentence for key in further)
        ]
    return wrong


def _wrong_with(value: object, tests: Mapping[str, Collection[str]]) -> str | None:
    if not isinstance(value, str) or not value.strip():
        return f"{value!r} is neither the name of a test nor a reason"
    if value.startswith("TODO"):
        return f"not written yet: {value}"
    if value.startswith("because "):
        return None if len(value.split()) > 3 else f"{value!r} gives no reason"
    file, _, name = value.rpartition("::")
    if file not in tests:
        return f"there is no {file} in its folder"
    if name not in tests[file]:
        return f'there is no test {name} in {file or "this module"} (expected one, or a reason: "because ...")'
    return None


def files_named(held: Held) -> set[str]:
    """The files of the named tests, without the file of ``held``."""
    values = [each for value in held.values() for each in ([value] if isinstance(value, str) else value)]
    return {
        each.rpartition("::")[0]
        for each in values
        if isinstance(each, str) and "::" in each and not each.startswith("because ")
    }


def tests_in(file: Path) -> set[str]:
    """The names of the test functions in a file, which is not imported."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test")
    }


def tests_by_file(held: Held, beside: Path) -> dict[str, set[str]]:
    """For `wrong_with`: the tests in a module and in the files that ``held`` names, in its folder or one above."""
    tests = {"": tests_in(beside)}
    for name in files_named(held):
        places = [folder / name for folder in beside.parents[:3] if (folder / name).is_file()]
        if places:
            tests[name] = tests_in(places[0])
    return tests


def _texts(patch: KnownBug) -> list[str]:
    names = ("summary", "symptom", "cause", "repair", "what_to_do", "changes_numbers")
    return [text for name in names if (text := getattr(patch, name, None))]
