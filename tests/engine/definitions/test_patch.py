"""What a patch may say of itself, fingerprints, and how little it costs to import the vocabulary."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import rlhf_patches
from rlhf_patches import Advice, DefinitionError, Guard, Patch, Replace, Rewrite, Shape, Variant, Wrap, fingerprint
from rlhf_patches.guards.fingerprints import signature_of
from rlhf_patches.guards.places import NotFound, Source, Unreadable
from rlhf_patches.guards.sources import find_function
from tests.harness.texts import FUNCTION

ABOUT = {
    "name": "some-framework-bug",
    "summary": "s",
    "symptom": "s",
    "cause": "c",
    "references": ("https://example.invalid",),
    "obsolete_when": "never",
}
REPAIRED = Variant(Guard("some-dist", ""), (Rewrite("a.b:c", "$A", "$A + 1"),))
SEEN = Variant(Guard("some-dist", ""), (Shape("a.b:c", "$A"),))
GOOD = {
    Guard: {"distribution": "some-dist", "versions": ">=1,<2"},
    Shape: {"target": "a.b:C.d", "pattern": "$A - $B"},
    Advice: {**ABOUT, "what_to_do": "use another", "variants": (SEEN,)},
    Rewrite: {"target": "a.b:C.d", "pattern": "$A - $B", "replacement": "$A + $B"},
    Replace: {"target": "a.b:c", "implementation": "x.y:z", "fingerprints": {"0" * 16: "1.0"}},
    Wrap: {"target": "a.b:c", "implementation": "x.y:z", "fingerprints": {"0" * 16: "1.0"}},
    Patch: {
        **ABOUT,
        "repair": "r",
        "variants": (
            Variant(
                Guard("some-dist", ""),
                (
                    Rewrite("a.b:c", "$A", "$A + 1"),
                    Replace("d:e", "f:g", {"0" * 16: "1.0"}),
                    Rewrite("a.b:h", "$A", "1"),
                ),
            ),
        ),
    },
    Variant: {"guard": REPAIRED.guard, "changes": REPAIRED.changes},
}


@pytest.mark.parametrize("kind", GOOD)
def test_good_ones_are_immutable(kind):
    made = kind(**GOOD[kind])
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, next(iter(GOOD[kind])), "x")
    assert made == kind(**GOOD[kind])


def test_uses_cannot_be_changed_from_outside():
    uses = {"FIX": "a:b"}
    rewrite = Rewrite("a:b", "$A", "$FIX($A)", uses=uses)
    uses["FIX"] = "c:d"
    assert rewrite.uses == {"FIX": "a:b"}
    with pytest.raises(TypeError):
        rewrite.uses["FIX"] = "c:d"


def test_modules_in_the_order_of_the_changes():
    assert Patch(**GOOD[Patch]).modules == ("a.b", "d")


@pytest.mark.parametrize(("guard", "text"), [(("d", ">=1"), "d >=1"), (("d", ""), "d")])
def test_a_guard_as_text(guard, text):
    assert str(Guard(*guard)) == text


BAD_PATHS = [
    "",
    "a",
    "a.b",
    "a:",
    ":b",
    "a:b:c",
    "a b:c",
    "1a:b",
    "a:1b",
    "a..b:c",
    "a:b.",
    "a.b:c()",
    None,
    3,
    "a:b\n",
]


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        (Guard, "distribution", "", "Guard.distribution is empty"),
        (Guard, "versions", "1.0", "Guard.versions is '1.0': expected a PEP 440 specifier"),
        (Guard, "versions", ">=1;<2", "Guard.versions"),
        *(
            (Rewrite, "target", path, f"Rewrite.target is {path!r}: expected 'module:qualified.name'")
            for path in BAD_PATHS
        ),
        *((Replace, "target", path, "Replace.target is") for path in BAD_PATHS),
        *((Replace, "implementation", path, "Replace.implementation is") for path in BAD_PATHS),
        *((Wrap, "target", path, "Wrap.target is") for path in BAD_PATHS),
        *((Wrap, "implementation", path, "Wrap.implementation is") for path in BAD_PATHS),
        (Rewrite, "pattern", " ", "Rewrite.pattern is empty"),
        (Rewrite, "alongside", "$A", "Rewrite of a.b:C.d: alongside is '$A': expected a tuple of strings"),
        (Rewrite, "unless", "$A", "Rewrite of a.b:C.d: unless is '$A': expected a tuple of strings"),
        (Rewrite, "matches", 0, "Rewrite.matches is 0"),
        (Rewrite, "uses", {"fix": "a:b"}, "Rewrite.uses has the name 'fix'"),
        (Rewrite, "uses", {"FIX": "a.b"}, "Rewrite.uses['FIX'] is 'a.b'"),
        (Replace, "fingerprints", {}, "Replace.fingerprints is empty"),
        (Replace, "fingerprints", ("0" * 16,), f"Replace.fingerprints is {('0' * 16,)!r}: expected a dictionary"),
        (Replace, "fingerprints", {"0" * 15: "1.0"}, "expected 16 hex digits"),
        (Replace, "fingerprints", {"0" * 16: " "}, "expected the releases that have it"),
        (Wrap, "fingerprints", "0" * 16, f"Wrap.fingerprints is {'0' * 16!r}: expected a dictionary"),
        (Wrap, "fingerprints", {}, "needs a shape guard"),
        (Wrap, "signature", "(a)", "needs a shape guard"),
        (Wrap, "signature_suffices", "because", "needs a shape guard"),
        *(
            (Patch, "name", name, "expected kebab-case")
            for name in ("", "bug", "Some-Bug", "a_b", "a--b", "-a", "a-", "a-b\n", None)
        ),
        *(
            (Patch, text, " \n", f"{text} is empty")
            for text in ("summary", "symptom", "cause", "repair", "obsolete_when")
        ),
        *((Patch, text, "a\nb", f"{text} has several lines") for text in ("summary", "bug", "when")),
        (Patch, "harm", "bad", "harm is 'bad'; expected one of wrong gradient, wrong weights, "),
        *(
            (Patch, "changes_numbers", text, "changes_numbers is empty; expected what was wrong")
            for text in ("", " \n")
        ),
        *((Patch, "references", value, "references is") for value in ((), ["x"], "x", (1,))),
        *((Variant, "changes", value, "changes is") for value in ((), [], ("x",), Rewrite("a:b", "$A", "1"))),
        *((Patch, "variants", value, "variants is") for value in ((), [], ("x",), GOOD[Variant])),
        (Variant, "guard", "some-dist>=1", "expected a Guard"),
        (Variant, "changes", REPAIRED.changes + SEEN.changes, "a Shape with other changes"),
        (Shape, "target", "a.b", "Shape.target is 'a.b'"),
        (Shape, "pattern", "", "Shape.pattern is empty"),
        (Shape, "unless", "$A", "Shape of a.b:C.d: unless is '$A': expected a tuple of strings"),
        (Shape, "matches", 0, "Shape.matches is 0"),
        (Advice, "name", "bug", "Advice.name is 'bug': expected kebab-case"),
        (Advice, "what_to_do", " ", "Advice some-framework-bug: what_to_do is empty"),
        (Advice, "variants", (REPAIRED,), "a variant has changes; expected shapes, since an advice changes nothing"),
        (Patch, "variants", (SEEN,), "a variant has shapes and no change; expected changes, or an Advice"),
    ],
)
def test_definition_errors(kind, field, value, message):
    with pytest.raises(DefinitionError, match=re.escape(message)):
        kind(**{**GOOD[kind], field: value})


class Unshown:
    def __repr__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "value", [3.5, [1], {1: 2}, Unshown(), "x" * 10**6 + "\n"], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("kind", GOOD)
def test_a_value_of_the_wrong_type_is_named_with_its_field(kind, value):
    for each in dataclasses.fields(kind):
        if isinstance(value, str) and each.type in ("str", "str | None") and each.name != "target":
            continue
        with pytest.raises(DefinitionError, match=rf"\b{each.name}\b") as caught:
            kind(**{**GOOD[kind], each.name: value})
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", GOOD)
def test_a_field_that_is_missing_or_unknown_is_named_with_what_it_is_of(kind):
    owner = re.escape(f"{kind.__name__} {GOOD[kind].get('name', GOOD[kind].get('target', ''))}".rstrip())
    needed = [
        each.name
        for each in dataclasses.fields(kind)
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    ]
    for name in needed:
        some = {field: value for field, value in GOOD[kind].items() if field != name}
        called = owner if name not in ("name", "target") else kind.__name__
        with pytest.raises(DefinitionError, match=rf"^{called} lacks {name}$"):
            kind(**some)
        with pytest.raises(DefinitionError, match=rf"^{called} has no field '{name}_'; expected one of .*\b{name}\b"):
            kind(**some, **{f"{name}_": 1})
    with pytest.raises(DefinitionError, match=f"^{kind.__name__} lacks {', '.join(needed)}$"):
        kind()
    values = list(GOOD[kind].values())
    with pytest.raises(DefinitionError, match=rf"^{kind.__name__} .*has {next(iter(GOOD[kind]))} twice$"):
        kind(*values, **{next(iter(GOOD[kind])): "a.b:c"})
    with pytest.raises(DefinitionError, match=r" fields \(.*\), and 30 values$"):
        kind(*["x"] * 30)


def test_one_item_where_a_tuple_is_expected():
    with pytest.raises(DefinitionError, match=r"expected a tuple of one or more Variant; write \(\.\.\.,\) around it"):
        Patch(**{**GOOD[Patch], "variants": GOOD[Patch]["variants"][0]})


def test_a_wrap_has_one_shape_guard():
    made = Wrap("a:b", "c:d", signature="(x)", signature_suffices="it only times the call")
    assert made.fingerprints == {}
    with pytest.raises(DefinitionError, match="needs a shape guard"):
        dataclasses.replace(made, fingerprints={"0" * 16: "1.0"})


def _of_variants(*guards):
    return Patch(**{**GOOD[Patch], "variants": tuple(Variant(guard, GOOD[Variant]["changes"]) for guard in guards)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (">=1,<3", ">=2"),
        (">=1,<=2", ">=2,<3"),
        ("", ">=2"),
        ("<2", "<1"),
        (">1", ">=1.1"),
        ("==1.*", "==1.2"),
        (">=2", ">=2"),
    ],
)
def test_two_variants_for_one_release_are_an_error(one, other):
    """Which of them is applied would depend on their order."""
    with pytest.raises(DefinitionError, match=r"version .+ is in the range of two variants") as caught:
        _of_variants(Guard("some-dist", one), Guard("some-dist", other))
    named = re.search("version (\\S+) is", str(caught.value)).group(1)
    assert all(Version(named) in SpecifierSet(versions, prereleases=True) for versions in (one, other)), named


@pytest.mark.parametrize(
    ("one", "other"), [(">=1,<2", ">=2"), ("<1.5", ">1.5"), ("==1.0", "==1.1"), (">=1,<2", ">=2,<3"), ("==1.*", ">=2")]
)
def test_variants_that_share_no_release(one, other):
    assert _of_variants(Guard("some-dist", one), Guard("some-dist", other)).versions == f"{one} or {other}"


def test_variants_of_two_frameworks_are_an_error():
    with pytest.raises(DefinitionError, match="its variants are for some-dist, other-dist; expected one distribution"):
        _of_variants(Guard("some-dist", "<2"), Guard("other-dist", ">=2"))


# ----------------------------------------------------------------------------------------------- fingerprints

SAME = {
    "docstring": lambda t: t.replace('"""A docstring."""', "'''Another,\n        longer.'''"),
    "no docstring": lambda t: t.replace('"""A docstring."""\n', "\n"),
    "annotations": lambda t: t.replace("a: int", "a").replace('c: "str"', "c: Any").replace(" -> None", ""),
    "annotation of a variable": lambda t: t.replace("x: int = 1", "x: float = 1"),
    "comment": lambda t: t.replace("# a comment", ""),
    "formatting": lambda t: t.replace("a and not b", "(a\n   and (not b))").replace("'x'", '"x"'),
    "joined strings": lambda t: t.replace('"text" "more"', '"textmore"'),
    "raw character": lambda t: t.replace("\\U0001fae8", "\U0001fae8"),
    "underscores": lambda t: t.replace("10 **", "1_0 **"),
    "surroundings": lambda t: f"import x\n\n{t}\n    def other(self): pass\n",
    "line ends": lambda t: t.replace("\n", "\r\n"),
}
OTHER = {
    "name": (lambda t: t.replace("def method", "def other"), "Thing.other"),
    "async": lambda t: t.replace("def method", "async def method"),
    "decorator": lambda t: t.replace("@decorated(1)", "@decorated(2)"),
    "no decorator": lambda t: t.replace("    @decorated(1)\n", ""),
    "parameter": lambda t: t.replace("b=2", "bb=2"),
    "positional-only": lambda t: t.replace("/, ", ""),
    "default": lambda t: t.replace("b=2", "b=3"),
    "no default": lambda t: t.replace("b=2", "b"),
    "keyword default": lambda t: t.replace("'x'", "'y'"),
    "operator": lambda t: t.replace(" @ r", " * r"),
    "order": lambda t: t.replace("a and not b", "not b and a"),
    "negation": lambda t: t.replace("not b", "b"),
    "integer, not float": lambda t: t.replace("1.5", "1"),
    "True, not 1": lambda t: t.replace("q[1:2", "q[True:2"),
    "string, not bytes": lambda t: t.replace('b"bytes"', '"bytes"'),
    "None": lambda t: t.replace("return {", "return None and {"),
    "return without value": lambda t: re.sub("return {.*", "return", t),
    "slice": lambda t: t.replace("1:2", "1:"),
    "format": lambda t: t.replace("{a!r:", "{a!s:"),
    "format width": lambda t: t.replace(":>{b}", ":<{b}"),
    "character": lambda t: t.replace("é", "e"),
    "cause": lambda t: t.replace(" from None", ""),
    "exception's name": lambda t: t.replace("as error", "as exc"),
    "target": lambda t: t.replace("as lock", "as latch"),
    "annotated, not assigned": lambda t: t.replace("x: int = 1", "x: int"),
    "statement": lambda t: t.replace("del x", "pass"),
    "yield from": lambda t: t.replace("yield lambda", "yield from lambda"),
    "unpacking": lambda t: t.replace("{**kw, ", "{'kw': kw, "),
    "comprehension": lambda t: t.replace(" if i]", "]"),
    "a string that is no docstring": lambda t: t.replace("        # a comment", "        'x'\n        'y'"),
}


@pytest.mark.parametrize("change", SAME)
def test_a_fingerprint_leaves_out(change):
    changed = SAME[change](FUNCTION)
    assert changed != FUNCTION
    assert fingerprint(changed, "Thing.method") == fingerprint(FUNCTION, "Thing.method")


@pytest.mark.parametrize("change", OTHER)
def test_a_fingerprint_notices(change):
    edit, name = OTHER[change] if isinstance(OTHER[change], tuple) else (OTHER[change], "Thing.method")
    changed = edit(FUNCTION)
    assert changed != FUNCTION
    assert fingerprint(changed, name) != fingerprint(FUNCTION, "Thing.method")


def test_fingerprint_of_what_is_not_there():
    with pytest.raises(NotFound, match="f is not defined in"):
        fingerprint("g = 1", "f")
    with pytest.raises(NotFound, match="f is defined 2 times"):
        fingerprint("if x:\n    def f(): pass\nelse:\n    def f(): pass\n", "f")
    with pytest.raises(Unreadable, match="does not parse"):
        fingerprint("def f(:", "f")


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    {}\nexcept E:\n    pass",
        "with x:\n    {}",
        "while x:\n    {}",
        "match x:\n    case 1:\n        {}",
        "{}",
    ],
)
def test_functions_are_found_within_statements(text):
    text = text.format("def f(): pass")
    assert fingerprint(text, "f") == fingerprint("def f(): pass", "f")


def test_overloads_are_no_definitions():
    overload = "@typing.overload\ndef f(a: int): ...\n@overload\ndef f(a: str): ...\n"
    assert fingerprint(f"{overload}def f(a): pass", "f") == fingerprint("def f(a): pass", "f")


def test_signature_leaves_out_annotations():
    node = find_function(Source("m", "m.py", FUNCTION), "Thing.method")
    assert signature_of(node) == "(self, a, /, b=2, *args, c='x', **kw)"


def test_everything_that_is_promised_is_there():
    for name in rlhf_patches.__all__:
        assert getattr(rlhf_patches, name) is not None
    assert set(rlhf_patches.__all__) <= set(dir(rlhf_patches))
    assert set(rlhf_patches._HOME) == set(rlhf_patches.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'aply'"):
        rlhf_patches.aply  # noqa: B018


@pytest.mark.parametrize("kind", [Guard, Replace, Wrap, Shape, Advice])
def test_data_can_be_pickled(kind):
    made = kind(**GOOD[kind])
    assert pickle.loads(pickle.dumps(made)) == made


def test_every_built_in_patch_survives_pickling():
    import pickle

    from rlhf_patches.patches import plugin

    for patch in plugin.rlhf_patches():
        assert pickle.loads(pickle.dumps(patch)) == patch
        assert hash(patch) == hash(pickle.loads(pickle.dumps(patch)))
