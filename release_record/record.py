"""The record: for every release of every framework, which variants of each patch have their shape in its code.

One file per distribution, ``record/NAME.json``; for a framework that lives in git ``record/git/NAME.json``, by tag. It
holds facts about released code only (no upstream text, no version guard), so the guards can be held against it:
`disagreements` and `loose_bounds` must be empty.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tomllib
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from rlhf_patches.definitions import registry
from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.definitions.changes import Change
from rlhf_patches.definitions.guard import CoInstalled
from rlhf_patches.definitions.listed import WATCH
from rlhf_patches.definitions.variant import Variant
from rlhf_patches.offline import facts
from rlhf_patches.offline.facts import DIFFERENT, NO_MODULE, UNREADABLE, Code

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """One release. ``tag`` and ``commit`` for git, ``file`` and ``sha256`` for an index.

    ``version`` is what its metadata says, which in git need not be what the tag says. ``patches`` has a `Code` for each
    variant of each patch, ``texts`` the digest of each module that they are for (`texts`).
    """

    version: str
    file: str
    sha256: str
    patches: dict[str, tuple[Code, ...]]
    texts: dict[str, str]

    @property
    def order(self) -> Version:
        """For sorting."""
        return Version(self.version)

    @property
    def label(self) -> str:
        """What people call this release: the version it was published as, or ``main``."""
        return re.sub(r"^(core_)?v(?=\d)", "", self.file) if len(self.sha256) == 40 else self.version


@dataclass
class Record:
    """All releases of one distribution, oldest first.

    Attributes:
        name: the distribution, or the git repository.
        in_git: whether the entries are tags of a repository.
        distribution: whose guards count.
        digests: per patch, that of the variants' changes that the entries were made with.
        entries: the releases.
    """

    name: str
    in_git: bool
    distribution: str
    digests: dict[str, str]
    entries: list[Entry]

    def has_module(self, patch: KnownBug) -> bool:
        """Whether any release has the patch's modules."""
        return any(code(patch, entry).state != NO_MODULE for entry in self.entries)

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return HERE / "record" / ("git" if self.in_git else "") / f"{self.name}.json"


def built_in() -> list[KnownBug]:
    """The patches of this project."""
    registered, failures = registry.load()
    if failures:
        raise SystemExit("\n".join(map(str, failures)))
    return [item.patch for item in registered if item.plugin == registry.BUILT_IN]


def patches_of(distribution: str, patches: Iterable[KnownBug]) -> list[KnownBug]:
    """Those whose guard names this distribution."""
    wanted = canonicalize_name(distribution)
    return [patch for patch in patches if canonicalize_name(patch.distribution) == wanted]


def records_of(patch: KnownBug, records: Iterable[Record]) -> list[Record]:
    """Those of the distribution that a patch's guard names."""
    return [record for record in records if patches_of(record.distribution, [patch])]


def digest(patch: KnownBug) -> str:
    """Changes when what recognizes any variant does, or their order; notes on fingerprints do not count."""
    changes: list[Any] = [[_without_notes(change) for change in variant.changes] for variant in patch.variants]
    defined = [(variant.where_defined, variant.unless_defined) for variant in patch.variants]
    if any(names for both in defined for names in both):
        changes.append(defined)
    return hashlib.sha256(repr(changes).encode()).hexdigest()[:16]


def _without_notes(change: Change) -> tuple[Any, ...]:
    values = ((field.name, getattr(change, field.name)) for field in fields(change))
    return type(change).__name__, *(sorted(value) if name == "fingerprints" else value for name, value in values)


# -------------------------------------------------------------------------------------- reading, writing


def load(path: Path) -> Record:
    """Read one record."""
    data = json.loads(path.read_text(encoding="utf-8"))
    entries = []
    for item in data.pop("releases"):
        codes = {
            name: tuple(Code(**{**one, "fingerprints": tuple(one.get("fingerprints", ()))}) for one in found)
            for name, found in item.pop("patches").items()
        }
        entries.append(Entry(**item, patches=codes))
    return Record(**data, entries=entries)


def load_all() -> list[Record]:
    """Every record, those of indexes first."""
    return [load(path) for path in [*sorted(HERE.glob("record/*.json")), *sorted(HERE.glob("record/git/*.json"))]]


def save(record: Record) -> None:
    """Write a record, one line per release, so that a diff shows which changed."""
    lines = [
        json.dumps(_as_json(entry)) for entry in sorted(record.entries, key=lambda entry: (entry.order, entry.file))
    ]
    fields = {key: getattr(record, key) for key in ("name", "in_git", "distribution", "digests")}
    head = json.dumps(fields, indent=1)
    text = head.removesuffix("\n}") + ',\n "releases": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    record.path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = record.path.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, record.path)


def _as_json(entry: Entry) -> dict[str, Any]:
    data = asdict(entry)
    data["patches"] = {
        name: [{key: value for key, value in one.items() if value} for one in found]
        for name, found in data["patches"].items()
    }
    return data


# ------------------------------------------------------------------------------------- what the facts mean


def recognized(patch: KnownBug, entry: Entry) -> list[int]:
    """`facts.recognized` of a release."""
    return facts.recognized(patch, entry.patches[patch.name])


def code(patch: KnownBug, entry: Entry) -> Code:
    """`facts.counting` of a release."""
    return facts.counting(patch, entry.patches[patch.name])


def claimed(patch: KnownBug, entry: Entry) -> int | None:
    """`facts.claimed` of a release."""
    return facts.claimed(patch, entry.version)


def may_lack(patch: KnownBug, entry: Entry) -> bool:
    """`facts.may_lack` of a release."""
    return facts.may_lack(patch, entry.version, entry.patches[patch.name])


# ----------------------------------------------------------------------------- holding the guards against it


@dataclass(frozen=True)
class Reviewed:
    """What a person has read, ``reviewed.toml``: the file says how to fill it in.

    Attributes:
        harmless: patch -> fingerprint of a target that the patch does not recognize -> why it has no such defect.
        accepted: patch -> version, or in git a tag or branch, for which the two guards may disagree -> why; many at
            once with a ``*``.
        oldest: distribution -> ``version``, the oldest that is fetched, and ``why`` the ones before need no reading.
        parts: distribution -> ``why`` only what patches read is fetched of its wheels.
    """

    harmless: dict[str, dict[str, str]]
    accepted: dict[str, dict[str, str]]
    oldest: dict[str, dict[str, str]]
    parts: dict[str, dict[str, str]]

    def accepts(self, item: Disagreement) -> bool:
        """Whether a disagreement has been explained."""
        return self.has_accepted(item.patch, item.version) or self.has_accepted(item.patch, item.file)

    def has_accepted(self, patch: str, name: str) -> bool:
        """Whether a version, a tag or a branch is among those for which a patch's two guards may disagree."""
        return any(fnmatch.fnmatchcase(name, noted) for noted in self.accepted.get(patch, {}))


def reviewed() -> Reviewed:
    """Read ``reviewed.toml``."""
    return _reviewed((HERE / "reviewed.toml").read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def _reviewed(text: str) -> Reviewed:
    data = tomllib.loads(text)
    return Reviewed(data.get("harmless", {}), data.get("accepted", {}), data.get("oldest", {}), data.get("parts", {}))


@dataclass(frozen=True)
class Disagreement:
    """The version guards say one thing of a release, the shape guards another. ``affected`` is by version."""

    patch: str
    name: str
    version: str
    file: str
    affected: bool
    code: Code

    def __str__(self) -> str:
        says = "affected" if self.affected else "not affected"
        code = f"{self.code.state} {self.code.why}".rstrip()
        return f"{self.patch}: {self.name} {self.version} ({self.file}) is {says} by its version, its code: {code}"


def disagreements(records: Iterable[Record], patches: Iterable[KnownBug]) -> list[Disagreement]:
    """Every release that a range claims wrongly, or fails to claim, or that another variant's range has to claim."""
    patches = list(patches)
    found = []
    for record in records:
        for patch in patches_of(record.distribution, patches):
            for entry in record.entries:
                number = claimed(patch, entry)
                one = code(patch, entry) if number is None else entry.patches[patch.name][number]
                if not facts.agrees(patch, entry.version, entry.patches[patch.name]):
                    affected = number is not None
                    found.append(Disagreement(patch.name, record.name, entry.version, entry.file, affected, one))
    return found


def loose_bounds(records: Iterable[Record], patches: Iterable[KnownBug]) -> list[str]:
    """Guards that claim more than was read: each bound must be a release that was read and is as the bound says."""
    records = list(records)
    complaints = []
    for patch in patches:
        for number, variant in enumerate(patch.variants):
            complaints += [
                f"{patch.name}: {text}" for text in _loose(records_of(patch, records), patch, number, variant)
            ]
            complaints += [f"{patch.name}: {text}" for text in _not_the_newest(records, variant.guard.co_installed)]
    return complaints


def _loose(records: list[Record], patch: KnownBug, number: int, variant: Variant) -> Iterator[str]:
    there: dict[Version, bool] = {}
    for record in records:
        for entry in record.entries:
            there[entry.order] = there.get(entry.order, False) or number in recognized(patch, entry)
    if facts.is_open(variant.guard.versions) and patch.kind != WATCH:  # it looks at whatever takes the same
        yield f"{variant.guard.versions!r} is open to one side"
    for pin in SpecifierSet(variant.guard.versions):
        version = Version(pin.version)
        if version not in there:
            yield f"{pin} names a release that is not in the record"
        elif there[version] != (pin.operator in (">=", "<=", "==")):
            yield f"{pin} names a release whose code is {'' if there[version] else 'not '}of this shape"


def _not_the_newest(records: list[Record], beside: CoInstalled | None) -> Iterator[str]:
    """Ends of another distribution's range that say "the newest when read" (``<=``) and are not.

    With a later release, which was mended, every start would ask its user for a report.
    """
    if beside is None:
        return
    wanted = canonicalize_name(beside.distribution)
    read = [entry.order for item in records if canonicalize_name(item.distribution) == wanted for entry in item.entries]
    for pin in SpecifierSet(beside.versions):
        if read and pin.operator == "<=" and Version(pin.version) != max(read):
            yield f"{pin} of {beside.distribution}, of which {max(read)} was read: say < and the first without the bug"


def unreviewed(records: Iterable[Record], patches: Iterable[KnownBug], notes: Reviewed) -> list[str]:
    """Target functions that a patch does not recognize and that were not reviewed, and notes that nothing needs."""
    records = list(records)
    patches = [patch for patch in patches if patch.kind != WATCH]
    complaints: list[str] = []
    needed: set[tuple[str, str]] = set()
    for record in records:
        for patch in patches_of(record.distribution, patches):
            for entry in record.entries:
                if recognized(patch, entry):
                    continue
                for one in dict.fromkeys(entry.patches[patch.name]):
                    if one.state == UNREADABLE:
                        complaints.append(f"{patch.name}: {record.name} {entry.version} cannot be read: {one.why}")
                    if one.state != DIFFERENT:
                        continue
                    known = (patch.name, one.key) in needed
                    needed.add((patch.name, one.key))
                    if not known and one.key not in notes.harmless.get(patch.name, {}):
                        complaints.append(
                            f"{patch.name}: not reviewed: {record.name} {entry.version} ({entry.file}): "
                            f"{one.key}: {one.why}"
                        )
    for name, entries in notes.harmless.items():
        complaints += [
            f"{name}: the note on {key} is about no release in the record"
            for key in entries
            if (name, key) not in needed
        ]
    return complaints


def outdated(records: Iterable[Record], patches: Iterable[KnownBug]) -> list[str]:
    """Patches whose changes are not those that the record was made with."""
    records = list(records)
    complaints = []
    for patch in patches:
        own = records_of(patch, records)
        if not own:
            complaints.append(f"{patch.name}: there is no record of {patch.distribution}")
        complaints += [
            f"{patch.name}: the record of {record.name} was made with other changes"
            for record in own
            if record.digests.get(patch.name) != digest(patch)
        ]
    return complaints


# ------------------------------------------------------------------------------ the releases of a fingerprint

_SPAN = re.compile(r"(\S+)(?: to (\S+))?")


def mistaken_fingerprints(records: Iterable[Record], patches: Iterable[KnownBug]) -> list[str]:
    """Fingerprints whose releases are not those of the record.

    The text is ``SPAN, SPAN ...: NOTE``, the note optional; a span is a release, ``FIRST to LAST``, or ``main``.
    """
    records = list(records)
    complaints: list[str] = []
    for patch in patches:
        for (target, fingerprint), text in facts.fingerprint_texts(patch).items():
            there, known = [], []
            for record in records_of(patch, records):
                for entry in sorted(record.entries, key=lambda entry: entry.order):
                    known.append(entry.label)
                    if fingerprint in facts.found_fingerprints(patch, entry.patches[patch.name], target):
                        there.append(entry.label)
            said = _expanded(text, known)
            if said != set(there):
                complaints.append(
                    f"{patch.name}: {target} has the fingerprint {fingerprint} in {', '.join(there) or 'no release'}; "
                    f"the patch says {text!r}"
                )
    return complaints


def _expanded(text: str, known: list[str]) -> set[str] | None:
    """The releases that a text names, out of those that are known; None where it does not keep to the form."""
    releases = [label for label in known if label != "main"]
    found: set[str] = set()
    for span in text.partition(":")[0].split(", "):
        match = _SPAN.fullmatch(span)
        if not match or not {match[1], match[2] or match[1]} <= set(releases if match[2] else known):
            return None
        if match[2]:
            found |= {*releases[releases.index(match[1]) : releases.index(match[2]) + 1]}
        else:
            found.add(match[1])
    return found
