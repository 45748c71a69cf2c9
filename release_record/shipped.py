"""``rlhf_patches/offline/releases.json`` and ``versions.json``: what `rlhf-patches audit`, which is offline, needs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import record
from record import Entry, Record

from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.offline.facts import NO_MODULE

PATH = Path(__file__).parents[1] / "rlhf_patches" / "offline" / "releases.json"
VERSIONS = PATH.with_name("versions.json")


def text(records: Iterable[Record], patches: Iterable[KnownBug]) -> str:
    """The file's text, one patch a line, so that a diff shows which changed."""
    records = list(records)
    lines = []
    for patch in sorted(patches, key=lambda patch: patch.name):
        known = [item for item in record.records_of(patch, records) if _has(item, patch)]
        if known:
            # Of an index, where it has the patched modules: that is what people pin.
            item = min(known, key=lambda item: item.in_git)
            found = facts(item, patch)
            # On PyPI the same name may be a placeholder, or another project.
            strangers = [other for other in record.records_of(patch, records) if not other.has_module(patch)]
            found["without"] += [[entry.version] * 2 for other in strangers for entry in other.entries]
            lines.append(f" {json.dumps(patch.name)}: {json.dumps(found)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def versions(records: Iterable[Record], patches: Iterable[KnownBug]) -> str:
    """The text of ``versions.json``: by distribution, its releases without pre-releases, oldest first."""
    patches = list(patches)
    lines: dict[str, str] = {}
    for item in sorted(records, key=lambda item: item.in_git):
        if any(_has(item, patch) for patch in record.patches_of(item.distribution, patches)):
            read = dict.fromkeys(entry.order for entry in sorted(item.entries, key=lambda entry: entry.order))
            lines.setdefault(item.distribution, " ".join(str(each) for each in read if not each.is_prerelease))
    return json.dumps(lines, indent=1, sort_keys=True) + "\n"


def facts(item: Record, patch: KnownBug) -> dict[str, Any]:
    """What was read of one patch's distribution.

    Returns:
        ``read``, the newest release; ``fixed``, the first without the bug after all that have it, None where there is
        none; ``without``, releases that lack the modules, as first and last of each stretch.
    """
    entries = sorted(item.entries, key=lambda entry: entry.order)
    last = max(number for number, entry in enumerate(entries) if record.recognized(patch, entry))
    later = entries[last + 1 :]
    fixed = next((entry for entry in later if not entry.order.is_prerelease), later[0] if later else None)
    claimed = [entry for entry in entries if record.claimed(patch, entry) is not None]
    stretches = [list(group) for lacks, group in groupby(claimed, lambda entry: _lacks(patch, entry)) if lacks]
    return {
        "read": entries[-1].version,
        "fixed": fixed.version if fixed else None,
        "without": [[group[0].version, group[-1].version] for group in stretches],
    }


def _has(item: Record, patch: KnownBug) -> bool:
    return any(record.recognized(patch, entry) for entry in item.entries)


def _lacks(patch: KnownBug, entry: Entry) -> bool:
    number = record.claimed(patch, entry)
    return number is not None and entry.patches[patch.name][number].state == NO_MODULE
