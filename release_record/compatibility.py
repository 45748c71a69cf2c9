"""``docs/compatibility.md``: the record as a table that a user can read, and its figures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import record
from record import Entry, Record

from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.definitions.patch import Advice, Watch
from rlhf_patches.offline.facts import DEFECT, DIFFERENT, NO_MODULE

_HEAD = """\
# Compatibility

This page lists every release that was read, and what was found in it. `make releases` generates it from
[the record](../release_record/record). A test compares it with the record, and the record with the patches' ranges. To
read a release, the project fetched the published file, looked for each patch's code in it, and compiled the repaired
module: no other function may differ, and no line may move. `rlhf-patches check SOURCE` does the same for a copy of your
own.

A patch with several variants repairs the bug in several shapes of upstream's code. Its page shows each.

| state | meaning |
| --- | --- |
| affected | has the bug; the patch repairs it |
| advice | has the bug; no patch repairs it, and the page says what to do |
| watched | the watch checks runs for signs of bugs |
| not there | the code with the bug does not exist yet, or is not in this package |
| fixed | newer than the bug, and without it; the note says how upstream fixed it |
"""


_THERE = {Advice.kind: "advice", Watch.kind: "watched"}


def page(records: Iterable[Record], patches: Iterable[KnownBug]) -> str:
    """The whole page, as Markdown."""
    records, patches = list(records), list(patches)
    parts = [_HEAD]
    for item in records:
        own = [patch for patch in record.patches_of(item.distribution, patches) if item.has_module(patch)]
        if not own:
            continue
        source = "git tags" if item.in_git else "PyPI"
        parts.append(f"## {item.name}\n\n{len(item.entries)} releases read ({source}).\n")
        if not item.in_git and (oldest := record.reviewed().oldest.get(item.name)):
            parts.append(f"None before {oldest['version']}: {oldest['why']}.\n")
        rows = ["| versions | state | patch, advice or watch | note |", "| --- | --- | --- | --- |"]
        for patch in own:
            link = f"[{patch.name}](patches/{patch.name}.md)"
            notes = record.reviewed().harmless.get(patch.name, {})
            for members, state in stretches(item, patch):
                note = "; ".join(_notes(members, patch, notes))
                rows.append(f"| {_span(item, members)} | {state} | {link} | {note} |".replace("  |", " |"))
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def stretches(item: Record, patch: KnownBug) -> list[tuple[list[Entry], str]]:
    """Neighboring releases in the same state and of the same variant's shape, oldest first, and that state."""
    entries = sorted(item.entries, key=lambda entry: entry.order)
    seen = False
    states = []
    for entry in entries:
        shapes = record.recognized(patch, entry)
        seen = seen or bool(shapes)
        which = f", variant {shapes[0] + 1}" if shapes and len(patch.variants) > 1 else ""
        there = _THERE.get(patch.kind, "affected")
        states.append(f"{there}{which}" if shapes else "fixed" if seen else "not there")
    groups = itertools.groupby(zip(entries, states, strict=True), key=lambda pair: pair[1])
    return [([entry for entry, _ in group], state) for state, group in groups]


def _span(item: Record, members: list[Entry]) -> str:
    first, last = _name(item, members[0]), _name(item, members[-1])
    return first if len(members) == 1 else f"{first} to {last} ({len(members)})"


def _name(item: Record, entry: Entry) -> str:
    return entry.file if item.in_git else entry.version


def _notes(members: list[Entry], patch: KnownBug, notes: dict[str, str]) -> list[str]:
    notes, above = dict(notes), ""
    for key, note in notes.items():
        if note == "the same" or note.startswith(("the same;", "the same,")):  # as the note above it
            notes[key] = above + note[len("the same") :]
        else:
            above = note
    found = []
    for entry in members:
        if record.recognized(patch, entry):
            continue
        for code in entry.patches[patch.name]:
            if code.state == DIFFERENT:
                found.append(notes.get(code.key, "not read yet"))
    return list(dict.fromkeys(found))


def figures(records: Iterable[Record], patches: Iterable[KnownBug]) -> str:
    """Releases and decisions of each kind, per framework and patch."""
    patches = list(patches)
    lines = []
    for item in records:
        lines.append(f"{item.name}: {len(item.entries)} {'tags' if item.in_git else 'releases'}")
        for patch in record.patches_of(item.distribution, patches):
            kinds = Counter(decision(patch, entry) for entry in item.entries)
            counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            lines.append(f"  {patch.name}: {counts}")
    return "\n".join(lines)


def decision(patch: KnownBug, entry: Entry) -> str:
    """What `rlhf-patches check` says of a release."""
    number = record.claimed(patch, entry)
    if number is None:
        return "absent" if record.code(patch, entry).state == NO_MODULE else "unaffected"
    if record.may_lack(patch, entry):
        return "absent"
    if patch.kind == Advice.kind:
        return "advice"
    return "applies" if entry.patches[patch.name][number].state == DEFECT else "refused"
