"""``docs/compatibility.md``: the record as a table that a user can read, and its figures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import record
from record import Code, Entry, Record

from rlhf_patches.vocabulary import Patch

_HEAD = """\
# Compatibility

Every release that was read, and what was found in it. Generated from [the record](../releases/record) by
`make releases`; a test compares it with the record and the record with the patches' ranges. "Read" means: the
published file was fetched, each patch's code pattern was looked for in it, and the repaired module was compiled, with
no other function different and no line moved. To ask about a copy of your own: `rlhf-patches check SOURCE`.

| state | meaning |
| --- | --- |
| affected | has the bug; the patch repairs it |
| not there | the code that has the bug does not exist yet, or not in this package |
| fixed | newer than the bug, and without it; the note says where it went |
"""


def page(records: Iterable[Record], patches: Iterable[Patch]) -> str:
    """The whole page, as Markdown."""
    records, patches = list(records), list(patches)
    parts = [_HEAD]
    for item in records:
        own = [patch for patch in record.patches_of(item.distribution, patches) if item.has_module(patch)]
        if not own:
            continue
        source = "git tags" if item.in_git else "PyPI"
        parts.append(f"## {item.name}\n\n{len(item.entries)} releases read ({source}).\n")
        rows = ["| versions | state | patch | note |", "| --- | --- | --- | --- |"]
        for patch in own:
            link = f"[{patch.name}](patches/{patch.name}.md)"
            notes = record.reviewed().harmless.get(patch.name, {})
            for members, state in stretches(item, patch):
                note = "; ".join(_notes(members, patch, notes))
                rows.append(f"| {_span(item, members)} | {state} | {link} | {note} |".replace("  |", " |"))
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def stretches(item: Record, patch: Patch) -> list[tuple[list[Entry], str]]:
    """Neighbouring releases in the same state, oldest first, and that state."""
    entries = sorted(item.entries, key=lambda entry: entry.order)
    seen = False
    states = []
    for entry in entries:
        defect = entry.patches[patch.name].state == record.DEFECT
        seen = seen or defect
        states.append("affected" if defect else "fixed" if seen else "not there")
    groups = itertools.groupby(zip(entries, states, strict=True), key=lambda pair: pair[1])
    return [([entry for entry, _ in group], state) for state, group in groups]


def _span(item: Record, members: list[Entry]) -> str:
    first, last = _name(item, members[0]), _name(item, members[-1])
    return first if len(members) == 1 else f"{first} to {last} ({len(members)})"


def _name(item: Record, entry: Entry) -> str:
    return entry.file if item.in_git else entry.version


def _notes(members: list[Entry], patch: Patch, notes: dict[str, str]) -> list[str]:
    found = []
    for entry in members:
        code = entry.patches[patch.name]
        if code.state == record.DIFFERENT:
            found.append(notes.get(code.key, "not read yet"))
    return list(dict.fromkeys(found))


def figures(records: Iterable[Record], patches: Iterable[Patch]) -> str:
    """Releases and decisions of each kind, per framework and patch."""
    patches = list(patches)
    lines = []
    for item in records:
        lines.append(f"{item.name}: {len(item.entries)} {'tags' if item.in_git else 'releases'}")
        for patch in record.patches_of(item.distribution, patches):
            kinds = Counter(decision(record.claims(patch, entry), entry.patches[patch.name]) for entry in item.entries)
            counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            lines.append(f"  {patch.name}: {counts}")
    return "\n".join(lines)


def decision(affected: bool, code: Code) -> str:
    """What `rlhf-patches check` says of a release with this code, whose version is affected or not."""
    if code.state == record.NO_MODULE:
        return "absent"
    if not affected:
        return "unaffected"
    return "applies" if code.state == record.DEFECT else "refused"
