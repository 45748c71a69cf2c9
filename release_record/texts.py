"""The facts of released texts that the package ships, ``rlhf_patches/guards/texts/NAME.json`` (`guards.known`).

They are found as in any process that does not know a text: by the tree, by ast-grep, by compiling the whole module.
Kept is what is the same with the slice of each function, as released and edited. `prove` asks again on each Python.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Union

from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.definitions.changes import Change, Rewrite, Shape, Wrap
from rlhf_patches.definitions.checks import MODULE
from rlhf_patches.definitions.variant import Variant
from rlhf_patches.guards import fingerprints, known, patterns, rewriting, shapes, sources
from rlhf_patches.guards.edits import Edit, Undefined, Unrecognized, with_edits
from rlhf_patches.guards.places import FunctionNode, NotFound, Place, Slice, Source, Unreadable
from rlhf_patches.offline import facts
from rlhf_patches.offline.archive import Release

if TYPE_CHECKING:
    from record import Entry, Record

FOLDER = Path(known.__file__).parent / "texts"
Why = Union[str, int, list[Any]]
CACHE = Path(__file__).parent.parent / ".cache" / "texts"
"""The texts, by digest, for `prove`."""


def packages() -> list[str]:
    """Those that there are facts of."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


class Facts:
    """Of one top-level package: ``texts`` by digest, and ``functions`` by the digest of theirs."""

    def __init__(self, texts: dict[str, Any] | None = None, functions: dict[str, Any] | None = None) -> None:
        self.texts = texts or {}
        self.functions = functions or {}

    def add(self, other: Facts) -> None:
        """Take in what is known of other texts.

        Raises:
            ValueError: what was found of equal texts of a function differs, so that it depends on more than that.
        """
        for key, function in other.functions.items():
            mine = self.functions.setdefault(key, function)
            changes = {**mine["changes"], **function["changes"]}
            for change, found in mine["changes"].items():
                if None in (found, changes[change]):  # somewhere it has to be found anew, so it is everywhere
                    changes[change] = None
                elif found != changes[change]:
                    raise ValueError(f"of the text {key} of {function['name']} different things were found")
            if any(mine[fact] != function[fact] for fact in (mine.keys() & function.keys()) - {"changes"}):
                raise ValueError(f"of the text {key} of {function['name']} different things were found")
            self.functions[key] = {**mine, **function, "changes": changes}  # with what an earlier patch did not ask for
        for key, text in other.texts.items():
            mine = self.texts.setdefault(key, text)
            imported = sorted({*mine["imported"], *text["imported"]})
            self.texts[key] = {**text, "imported": imported, "functions": {**mine["functions"], **text["functions"]}}

    def only(self, wanted: Iterable[str], changes: Iterable[Change]) -> Facts:
        """Those of the texts of these digests, and of these changes."""
        chosen = [change for change in changes if is_kept(change)]
        names = {change.target.partition(":")[2] for change in chosen}
        keys = {known.key_of(change) for change in chosen if isinstance(change, (Rewrite, Shape))}
        texts = {
            key: {**self.texts[key], "functions": {n: f for n, f in self.texts[key]["functions"].items() if n in names}}
            for key in sorted(set(wanted) & self.texts.keys())
        }
        used = {place[1] for text in texts.values() for place in text["functions"].values() if isinstance(place, list)}
        functions = {
            key: {**function, "changes": {k: v for k, v in sorted(function["changes"].items()) if k in keys}}
            for key, function in sorted(self.functions.items())
            if key in used
        }
        return Facts(texts, functions)

    def to_bytes(self) -> bytes:
        """The file, made to be packed: what says nearly the same stands together, and texts name functions briefly."""
        parts = []
        for name, facts_of in (("texts", self._brief()), ("functions", self.functions)):
            found = sorted(
                (json.dumps(value, separators=(",", ":")), json.dumps(key)) for key, value in facts_of.items()
            )
            lines = [f"{key}: {value}" for value, key in found]
            parts.append(f'"{name}": {{\n' + ",\n".join(lines) + "\n}")
        rest = (",\n".join(parts) + "}\n").encode()
        return known.header(rest) + b"\n" + rest

    def _brief(self) -> dict[str, Any]:
        """The texts, with no more of a function's digest than tells it from the others'."""
        digits = next(n for n in range(4, 65) if len({key[:n] for key in self.functions}) == len(self.functions))
        return {
            key: {**text, "functions": {name: _with(place, digits) for name, place in text["functions"].items()}}
            for key, text in self.texts.items()
        }


def _with(place: list[Any] | str, digits: int) -> list[Any] | str:
    return place if isinstance(place, str) else [place[0], place[1][:digits]]


def load(package: str) -> Facts:
    """What is shipped; nothing where there is no file."""
    path = FOLDER / f"{package}.json"
    if not path.exists():
        return Facts()
    data = json.loads(path.read_text(encoding="utf-8"))
    for text in data["texts"].values():
        for place in text["functions"].values():
            if isinstance(place, list):
                (place[1],) = (key for key in data["functions"] if key.startswith(place[1]))
    return Facts(data["texts"], data["functions"])


def save(package: str, facts: Facts) -> None:
    """Write a file, or remove the one of a package of which nothing is known."""
    path = FOLDER / f"{package}.json"
    if not facts.texts:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(facts.to_bytes())
    os.replace(unfinished, path)


def known_texts() -> set[tuple[str, str]]:
    """Package and digest of each text that there are facts of."""
    return {(package, digest) for package in packages() for digest in load(package).texts}


NEWEST, MINOR = 8, 15


def kept(record: Record) -> list[Entry]:
    """The releases of which facts are shipped: those that people pin.

    The newest, the last of each of some minor versions and of each major one, and what is in git now, without
    pre-releases. On others a process looks at the texts itself, which takes it most of a second where a framework has
    dozens of patches.
    """
    pinned = (entry for entry in record.entries if entry.label == "main" or not entry.order.is_prerelease)
    released = sorted(pinned, key=lambda entry: entry.order)
    minor = {entry.order.release[:2]: entry for entry in released}
    major = {entry.order.release[:1]: entry for entry in released}
    chosen = {e.file for e in (*released[-NEWEST:], *[*minor.values()][-MINOR:], *major.values())}
    return [entry for entry in released if entry.file in chosen]


def of_record(records: Iterable[Record], patches: Iterable[KnownBug]) -> dict[str, Facts]:
    """By package what is shipped of the texts that the record has (`kept`): no others, and of no other changes."""
    wanted: dict[str, set[str]] = {package: set() for package in packages()}
    for record in records:
        for entry in kept(record):
            for module, digest in entry.texts.items():
                wanted.setdefault(module.partition(".")[0], set()).add(digest)
    changes = [change for patch in patches for variant in patch.variants for change in variant.changes]
    return {package: load(package).only(digests, changes) for package, digests in wanted.items()}


def is_kept(change: Change) -> bool:
    """Whether there are facts of a change: not where a signature suffices, for which no text need be read."""
    return not (isinstance(change, Wrap) and change.signature)


def of_release(release: Release, patches: Iterable[KnownBug]) -> tuple[dict[str, str], dict[str, Facts]]:
    """By module the digest of its text, and by top-level package what was found in these texts."""
    variants = [variant for patch in patches for variant in patch.variants]
    digests: dict[str, str] = {}
    found: dict[str, Facts] = {}
    for module in dict.fromkeys(module for variant in variants for module in variant.modules):
        try:
            source = release.source(module)
            sources.parse(source)
        except (NotFound, Unreadable):
            continue
        digests[module] = known.digest(source.text)
        found.setdefault(module.partition(".")[0], Facts()).add(of_text(source, variants))
        CACHE.mkdir(parents=True, exist_ok=True)
        if not (path := CACHE / f"{digests[module]}.py").exists():
            path.write_text(source.text, encoding="utf-8", errors="surrogatepass", newline="")
    return digests, found


def of_text(source: Source, variants: Iterable[Variant]) -> Facts:
    """What is found of the changes of variants in a text."""
    places: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    imported: set[str] = set()
    module = sources.parse(source)
    for qualname, groups in by_function(source.module, variants).items():
        if qualname == MODULE:
            places[qualname], functions[known.digest(source.text)] = _of_module(source, groups)
            continue
        try:
            node = sources.find_function(source, qualname)
        except NotFound as error:
            places[qualname] = str(error)
            continue
        place = sources.place_of(node)
        lines = source.text.split("\n")
        text = "\n".join(lines[place.first_line - 1 : node.end_lineno])
        start = sum(len(line) + 1 for line in lines[: place.first_line - 1])
        found = {change: _of_change(change, source, text, start) for group in groups for change in group}
        new = [edit[2] for each in found.values() if isinstance(each, dict) for edit in each["edits"]]
        slice_ = slice_of(module, node, qualname, known.names_in(text, *new))
        place = place._replace(slice=slice_)
        try:
            check(source, place, [])
        except Unrecognized:  # its slice is not what it should be: it is looked at anew in every process
            continue
        digest = known.digest(text)
        places[qualname] = [place.first_line, digest]
        imported.update(slice_.imported)
        changes: dict[str, Any] = {}
        for group in groups:
            own = {known.key_of(change): found[change] for change in group if isinstance(change, (Rewrite, Shape))}
            holds = _holds(source, place, own.values(), start)
            for key, each in own.items():
                changes[key] = each if holds and each == changes.get(key, each) else None
        functions[digest] = {
            "name": place.name,
            "line": place.lineno - place.first_line,
            "lines": slice_.last_line - place.first_line + 1,
            "column": place.column,
            "async": place.is_async,
            "parameters": [list(parameter) for parameter in place.parameters],
            "changes": changes,
        }
        if not all(isinstance(change, (Rewrite, Shape)) for change in found):  # these do not ask for it
            functions[digest]["fingerprint"] = fingerprints.fingerprint_of(node)
    text_facts = {"future": sorted(_imported(module)[1]), "imported": sorted(imported), "functions": places}
    return Facts({known.digest(source.text): text_facts}, functions)


def _of_module(source: Source, groups: Iterable[list[Change]]) -> tuple[list[Any], dict[str, Any]]:
    """What is found of statements of a module: as of a function that is all of it, and of which nothing is compiled."""
    changes: dict[str, Any] = {}
    for change in (each for group in groups for each in group if isinstance(each, Shape)):
        try:
            shapes.recognize(change, source._replace(known=None))
            changes[known.key_of(change)] = {"edits": []}
        except Unrecognized as error:
            changes[known.key_of(change)] = str(error)
    lines = source.text.count("\n") + 1
    described = {"name": MODULE, "line": 0, "lines": lines, "column": 0, "async": False, "parameters": []}
    return [1, known.digest(source.text)], {**described, "changes": changes}


def by_function(module: str, variants: Iterable[Variant]) -> dict[str, list[list[Change]]]:
    """By qualified name, of each variant that changes a function of this module, what it changes there."""
    found: dict[str, list[list[Change]]] = {}
    for variant in variants:
        targets = dict.fromkeys(change.target for change in variant.changes if is_kept(change))
        for target in targets:
            name, _, qualname = target.partition(":")
            if name == module:
                own = [change for change in variant.changes if change.target == target]
                found.setdefault(qualname, []).append(own)
    return found


def _of_change(change: Change, source: Source, text: str, start: int) -> dict[str, Any] | Why:
    """The edits of a change in a function's text, which begins at ``start`` in the module's; or why there are none."""
    try:
        edits = shapes.recognize(change, source._replace(known=None)).edits
    except Unrecognized as error:
        return briefly(change, facts.LINES.sub("", str(error)))  # a function's text knows no lines
    inside = [Edit(edit.start - start, edit.end - start, edit.text) for edit in edits]
    said = {"edits": [list(edit) for edit in inside]}
    return {**said, "after": known.digest(with_edits(text, inside))} if inside else said


def briefly(change: Change, why: str) -> Why:
    """What `patterns.why_not` says it of; else the same."""
    if not isinstance(change, (Rewrite, Shape)):
        return why
    others = [[kind, at] for kind in ("alongside", "unless") for at in range(len(getattr(change, kind)))]
    return next((found for found in [*others, *range(10)] if patterns.why_not(change, found) == why), why)


def _holds(source: Source, place: Place, together: Iterable[dict[str, Any] | Why], start: int) -> bool:
    """Whether changes that are made together, if they all are, give with the slice what they give with the whole."""
    if not all(isinstance(each, dict) for each in together):
        return True
    found: list[Any] = [edit for each in together if isinstance(each, dict) for edit in each["edits"]]
    edits = [Edit(begin + start, end + start, new) for begin, end, new in found]
    try:
        check(source, place, sorted(edits))
    except (Unrecognized, Undefined):
        return False
    return True


def slice_of(module: ast.Module, node: FunctionNode, qualname: str, names: Iterable[str]) -> Slice:
    """The slice of a function of a module, or of a class in it, in which these names occur, or will after an edit."""
    last, classes = node.end_lineno or node.lineno, tuple(qualname.split(".")[:-1])
    imported, future = _imported(module)
    return Slice(last, classes, tuple(sorted({*names} & imported)), tuple(sorted(future)))


def _imported(module: ast.Module) -> tuple[set[str], set[str]]:
    """The names that a module imports, not within functions and classes; and what it imports from ``__future__``."""
    found: set[str] = set()
    future: set[str] = set()
    for node in _in_scope(module):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future.update(alias.name for alias in node.names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.Name) and node.id == "super":
            found.add(node.id)  # wherever a module mentions it, CPython takes care with `super()` in its functions
    return found - {"*"}, future


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _in_scope(child)


def check(source: Source, place: Place, edits: Iterable[Edit]) -> None:
    """Check that a function's slice, edited or not, gives the code object that its whole module gives.

    Raises:
        Unrecognized: it does not, or an edited text changes more than its function, or moves lines.
        Undefined: the edited text uses a name that nothing defines.
    """
    edits, whole = [*edits], place._replace(slice=None)
    if edits:
        rewriting.check_lines(source, edits)
        codes = [rewriting.rewrite_code(source, each, edits) for each in (place, whole)]
    else:
        codes = [rewriting.code_of(rewriting.compile_around(source, each), each) for each in (place, whole)]
    if not is_same(*codes):
        raise Unrecognized(f"the slice of {place.name} gives other code than {source.filename}")


def is_same(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects are equal, to the column."""
    return one == other and _positions(one) == _positions(other)


def _positions(code: Any) -> list[Any]:
    """Of each instruction, here and in what is nested."""
    positions = [*code.co_positions()] if hasattr(code, "co_positions") else [*code.co_lines()]
    return positions + [_positions(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
