"""What is known of a framework's texts beforehand: facts from the record of releases, which come with the package.

``texts/NAME.json`` is for the modules of one top-level package. It says where in each text the functions are that
patches are for, and of each text of such a function what recognising a change in it gives. A fact counts only where the
function's text is, to the digest, the one it was found in, and the edited one what it was then; a file that is damaged
counts as not there. `release_record/texts.py` writes them.
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
import re
from typing import Any, Union

from ..definitions.changes import Change, Rewrite, Shape, Wrap
from . import memory, sources
from .edits import Edit, with_edits
from .patterns import why_not
from .places import Known, Place, Slice, Source

_DIGITS = 12

Found = tuple[Place, tuple[Edit, ...], Union[str, None]]
"""Where a change's target is, the edits, and the fingerprint; the latter two as those of `shapes.Recognised`."""


def look_up(source: Source) -> Source:
    """The same source, with what is known of its text if that is one of the record's."""
    return memory.remembered(("known", source), lambda: source._replace(known=_known(source)), small=True)


def _known(source: Source) -> Known | None:
    package = source.module.partition(".")[0]
    texts, of_functions = memory.remembered(("facts", package), lambda: _read(package), small=True)
    entry = _entry(texts, digest(source.text))
    if entry[1] is None:
        return None
    functions = {
        name: place if isinstance(place, str) else [place[0], *_entry(of_functions, place[1])]
        for name, place in entry[1]["functions"].items()
    }
    return Known(entry[1]["future"], entry[1]["imported"], functions)


def _read(package: str) -> tuple[bytes, bytes]:
    """The facts of one package, of texts and of functions: what a module has may be as a text of both.

    Each is on a line of its own, so that none but those that are needed are parsed.
    """
    try:
        data = pkgutil.get_data(__package__, f"texts/{package}.json") or b""
    except OSError:
        return b"", b""
    head, _, rest = data.partition(b"\n")
    if head != header(rest):
        return b"", b""
    texts, _, of_functions = rest.partition(b'"functions": {')
    return texts, of_functions


def header(rest: bytes) -> bytes:
    """The first line of a file of facts."""
    return b'{"sha256": "%s",' % hashlib.sha256(rest).hexdigest().encode()


def _entry(data: bytes, beginning: str) -> tuple[str, Any]:
    """A key that begins so, and what is said of it; None where there is none."""
    start = data.find(b'\n"%s' % beginning.encode())
    if start < 0:
        return beginning, None
    key, _, said = data[start + 2 : data.index(b"\n", start + 1)].partition(b'": ')
    return key.decode(), json.loads(said.removesuffix(b","))


def find(change: Change, source: Source) -> Found | str | None:
    """What `shapes` finds of a change in a text, or why it does not recognise it; None where that is not known."""
    if source.known is None or (isinstance(change, Wrap) and change.signature):
        return None
    text = source.known
    return memory.remembered(("found", change, source), lambda: _find(change, source, text), small=True)


def _find(change: Change, source: Source, known: Known) -> Found | str | None:
    qualname = change.target.partition(":")[2]
    entry = known.functions.get(qualname)
    if entry is None or isinstance(entry, str):
        return entry
    first, key, facts = entry
    if facts is None:
        return None
    lines = sources.lines_of(source)
    text = "\n".join(lines[first - 1 : first - 1 + facts["lines"]])
    if digest(text) != key:
        return None
    parameters = tuple((name, kind, bool(default)) for name, kind, default in facts["parameters"])
    classes = tuple(qualname.split(".")[:-1])
    new = [edit[2] for each in facts["changes"].values() if isinstance(each, dict) for edit in each["edits"]]
    imported = tuple(sorted(known.imported & names_in(text, *new)))
    slice_ = Slice(first - 1 + facts["lines"], classes, imported, known.future)
    line = first + facts["line"]
    place = Place(facts["name"], line, first, facts["column"], bool(facts["async"]), parameters, slice_)
    if not isinstance(change, (Rewrite, Shape)):
        fingerprint = facts.get("fingerprint")
        return (place, (), fingerprint) if fingerprint is not None else None
    found = facts["changes"].get(key_of(change))
    if not isinstance(found, dict):
        return found if found is None or isinstance(found, str) else why_not(change, found)
    start = len("\n".join(lines[: first - 1])) + (first > 1)
    edits = [Edit(*edit) for edit in found["edits"]]
    if isinstance(change, Rewrite) and found.get("after") != digest(with_edits(text, edits)):
        return None
    return place, tuple(Edit(start + edit.start, start + edit.end, edit.text) for edit in edits), None


def digest(text: str) -> str:
    """The first hex digits of a text's SHA-256: of some thousand texts two are alike once in 10**8 times."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def names_in(*texts: str) -> set[str]:
    """Whatever may be a name there."""
    return {name for text in texts for name in re.findall(r"\w+", text)}


def key_of(change: Rewrite | Shape) -> str:
    """What the facts call a change: another one as soon as anything in it is another."""
    return digest(ascii(change))
