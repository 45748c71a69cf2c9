"""Precomputed facts of a framework's texts, from the record of releases, shipped with the package.

``texts/NAME.json`` covers the modules of one top-level package. It has the places of the patched functions in each
text, and for each text of such a function the result of recognizing each change. A fact counts only if the digests of
the function's text and of its edited text match; a damaged file counts as missing. `release_record/texts.py` writes
the files.
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
"""The place of a change's target, the edits, and the fingerprint; the latter two as in `shapes.Recognized`."""


def look_up(source: Source) -> Source:
    """Return the source with the facts of its text, if the record has the text."""
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
    """Return the facts of one package's texts and functions, unparsed.

    Each fact is on its own line, so that only the needed ones are parsed.
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
    """Return the first line of a file of facts."""
    return b'{"sha256": "%s",' % hashlib.sha256(rest).hexdigest().encode()


def _entry(data: bytes, beginning: str) -> tuple[str, Any]:
    """Return the key with this beginning, and its value; None if there is none."""
    start = data.find(b'\n"%s' % beginning.encode())
    if start < 0:
        return beginning, None
    key, _, value = data[start + 2 : data.index(b"\n", start + 1)].partition(b'": ')
    return key.decode(), json.loads(value.removesuffix(b","))


def find(change: Change, source: Source) -> Found | str | None:
    """Return the result of `shapes` for a change in a text, or why it is not recognized; None if it is not known."""
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
    known_edits = facts["changes"].get(key_of(change))
    if not isinstance(known_edits, dict):
        return known_edits if known_edits is None or isinstance(known_edits, str) else why_not(change, known_edits)
    start = len("\n".join(lines[: first - 1])) + (first > 1)
    edits = [Edit(*edit) for edit in known_edits["edits"]]
    if isinstance(change, Rewrite) and known_edits.get("after") != digest(with_edits(text, edits)):
        return None
    return place, tuple(Edit(start + edit.start, start + edit.end, edit.text) for edit in edits), None


def digest(text: str) -> str:
    """Return the first hex digits of a text's SHA-256: some thousand texts collide with a probability of 10**-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def names_in(*texts: str) -> set[str]:
    """Return all words that may be names."""
    return {name for text in texts for name in re.findall(r"\w+", text)}


def key_of(change: Rewrite | Shape) -> str:
    """Return a change's key in the facts; it differs if any field of the change differs."""
    return digest(ascii(change))
