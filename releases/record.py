"""The record: for every release of every framework, whether each patch's shape guard recognises its code.

One file a distribution, ``record/NAME.json``; for a framework that lives in git ``record/git/NAME.json``, by tag. It
holds facts about released code only (no upstream text, no version guard), so the guards can be held against it:
`disagreements` and `loose_bounds` must be empty.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomllib
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from rlhf_patches import plugins, recognition, sources, versions
from rlhf_patches.releases import Release
from rlhf_patches.rewriting import Unrecognised
from rlhf_patches.sources import NotFound, Source, Unreadable
from rlhf_patches.versions import Verdict
from rlhf_patches.vocabulary import Patch

HERE = Path(__file__).parent

DEFECT = "defect"
"""Recognised; for rewrites also: the edited module compiles, nothing but the function differs, no line moves."""
DIFFERENT = "different"
"""Every function is there, and at least one is not as the patch expects it."""
NO_FUNCTION = "no function"
NO_MODULE = "no module"
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Code:
    """What a patch's shape guard finds in one release.

    Attributes:
        state: one of the constants of this module.
        fingerprints: of each target function that is defined there, in the order of the patch's targets.
        why: what the shape guard said, empty for DEFECT.
    """

    state: str
    fingerprints: tuple[str, ...] = ()
    why: str = ""

    @property
    def key(self) -> str:
        """How ``reviewed.toml`` names code that is DIFFERENT."""
        return "+".join(self.fingerprints)


@dataclass(frozen=True)
class Entry:
    """One release. ``tag`` and ``commit`` for git, ``file`` and ``sha256`` for an index.

    ``version`` is what its metadata says, which in git need not be what the tag says.
    """

    version: str
    file: str
    sha256: str
    patches: dict[str, Code]

    @property
    def order(self) -> Version:
        """For sorting."""
        return Version(self.version)


@dataclass
class Record:
    """All releases of one distribution, oldest first.

    Attributes:
        name: the distribution, or the git repository.
        in_git: whether the entries are tags of a repository.
        distribution: whose guards count.
        digests: per patch, that of the changes that the entries were made with.
        entries: the releases.
    """

    name: str
    in_git: bool
    distribution: str
    digests: dict[str, str]
    entries: list[Entry]

    def has_module(self, patch: Patch) -> bool:
        """Whether any release has the patch's modules."""
        return any(entry.patches[patch.name].state != NO_MODULE for entry in self.entries)

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return HERE / "record" / ("git" if self.in_git else "") / f"{self.name}.json"


def built_in() -> list[Patch]:
    """The patches of this project."""
    registered, failures = plugins.load()
    if failures:
        raise SystemExit("\n".join(map(str, failures)))
    return [item.patch for item in registered if item.plugin == plugins.BUILT_IN]


def patches_of(distribution: str, patches: Iterable[Patch]) -> list[Patch]:
    """Those whose guard names this distribution."""
    wanted = canonicalize_name(distribution)
    return [patch for patch in patches if canonicalize_name(patch.guard.distribution) == wanted]


def records_of(patch: Patch, records: Iterable[Record]) -> list[Record]:
    """Those of the distribution that a patch's guard names."""
    return [record for record in records if patches_of(record.distribution, [patch])]


def digest(patch: Patch) -> str:
    """Changes when the shape guard of a patch does."""
    return hashlib.sha256(repr(patch.changes).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------- finding the facts


def examine(release: Release, patch: Patch) -> Code:
    """What the shape guard of a patch finds in a release."""
    try:
        texts = {module: release.source(module) for module in patch.modules}
    except NotFound as error:
        return Code(NO_MODULE, why=_without_label(release, error))
    except Unreadable as error:
        return Code(UNREADABLE, why=_without_label(release, error))
    try:
        fingerprints = tuple(_fingerprints(patch, texts))
        recognition.check_compiles(recognition.recognise_all(patch, texts), lines=True)
    except NotFound as error:
        return Code(NO_FUNCTION, why=_without_label(release, error))
    except Unreadable as error:
        return Code(UNREADABLE, why=_without_label(release, error))
    except Unrecognised as error:
        return Code(DIFFERENT, fingerprints, _without_label(release, error))
    return Code(DEFECT, fingerprints)


def targets(patch: Patch) -> tuple[str, ...]:
    """The functions of a patch, each once."""
    return tuple(dict.fromkeys(change.target for change in patch.changes))


def _fingerprints(patch: Patch, texts: dict[str, Source]) -> Iterator[str]:
    for target in targets(patch):
        module, _, qualname = target.partition(":")
        yield sources.fingerprint_of(sources.find_function(texts[module], qualname))


def _without_label(release: Release, error: Exception) -> str:
    # The path of a file on the machine that made the record means nothing to its readers.
    return str(error).replace(f" in {release.label}", "").replace(f"{release.label}/", "")


# -------------------------------------------------------------------------------------- reading, writing


def load(path: Path) -> Record:
    """Read one record."""
    data = json.loads(path.read_text(encoding="utf-8"))
    entries = []
    for item in data.pop("releases"):
        codes = {
            name: Code(**{**code, "fingerprints": tuple(code.get("fingerprints", ()))})
            for name, code in item.pop("patches").items()
        }
        entries.append(Entry(**item, patches=codes))
    return Record(**data, entries=entries)


def load_all() -> list[Record]:
    """Every record, those of indexes first."""
    return [load(path) for path in [*sorted(HERE.glob("record/*.json")), *sorted(HERE.glob("record/git/*.json"))]]


def save(record: Record) -> None:
    """Write a record, a line a release, so that a diff shows which changed."""
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
        name: {key: value for key, value in code.items() if value} for name, code in data["patches"].items()
    }
    return data


# ----------------------------------------------------------------------------- holding the guards against it


@dataclass(frozen=True)
class Reviewed:
    """What a person has read, ``reviewed.toml``: the file says how to fill it in.

    Attributes:
        harmless: patch -> fingerprint of a target that the patch does not recognise -> why it has no such defect.
        accepted: patch -> version for which the two guards may disagree -> why.
    """

    harmless: dict[str, dict[str, str]]
    accepted: dict[str, dict[str, str]]

    def accepts(self, item: Disagreement) -> bool:
        """Whether a disagreement has been explained."""
        return item.version in self.accepted.get(item.patch, {})


def reviewed() -> Reviewed:
    """Read ``reviewed.toml``."""
    data = tomllib.loads((HERE / "reviewed.toml").read_text(encoding="utf-8"))
    return Reviewed(data.get("harmless", {}), data.get("accepted", {}))


@dataclass(frozen=True)
class Disagreement:
    """The version guard says one thing of a release, the shape guard another."""

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


def claims(patch: Patch, entry: Entry) -> bool:
    """Whether the version guard of a patch says that a release is affected."""
    return versions.judge(patch.guard, entry.version).verdict is Verdict.AFFECTED


def disagreements(records: Iterable[Record], patches: Iterable[Patch]) -> list[Disagreement]:
    """Every release that a guard's range claims wrongly, or fails to claim."""
    patches = list(patches)
    found = []
    for record in records:
        for patch in patches_of(record.distribution, patches):
            for entry in record.entries:
                code, affected = entry.patches[patch.name], claims(patch, entry)
                # A package without the module (megatron-core's wheels lack megatron.training before 0.17) contradicts
                # nothing: there is no code of which the range could say something.
                if code.state != NO_MODULE and affected != (code.state == DEFECT):
                    found.append(Disagreement(patch.name, record.name, entry.version, entry.file, affected, code))
    return found


def loose_bounds(records: Iterable[Record], patches: Iterable[Patch]) -> list[str]:
    """Guards that claim more than was read: each bound must be a release that was read and is as the bound says."""
    records = list(records)
    complaints = []
    for patch in patches:
        codes: dict[Version, set[str]] = {}
        for record in records_of(patch, records):
            for entry in record.entries:
                codes.setdefault(entry.order, set()).add(entry.patches[patch.name].state)
        pins = list(SpecifierSet(patch.guard.versions))
        if not any(pin.operator.startswith("<") for pin in pins) or not any(
            pin.operator.startswith(">") for pin in pins
        ):
            complaints.append(f"{patch.name}: {patch.guard.versions!r} is open to one side")
        for pin in pins:
            states = codes.get(Version(pin.version), set())
            if (DEFECT in states) != (pin.operator in (">=", "<=", "==")) or not states:
                complaints.append(
                    f"{patch.name}: {pin} names a release whose code is {sorted(states) or 'not in the record'}"
                )
    return complaints


def unreviewed(records: Iterable[Record], patches: Iterable[Patch], notes: Reviewed) -> list[str]:
    """Target functions that a patch does not recognise and nobody has read, and notes that nothing needs any more."""
    records, patches = list(records), list(patches)
    complaints: list[str] = []
    needed: set[tuple[str, str]] = set()
    for record in records:
        for patch in patches_of(record.distribution, patches):
            for entry in record.entries:
                code = entry.patches[patch.name]
                if code.state == UNREADABLE:
                    complaints.append(f"{patch.name}: {record.name} {entry.version} cannot be read: {code.why}")
                if code.state != DIFFERENT:
                    continue
                known = (patch.name, code.key) in needed
                needed.add((patch.name, code.key))
                if not known and code.key not in notes.harmless.get(patch.name, {}):
                    complaints.append(
                        f"{patch.name}: nobody has read {record.name} {entry.version} ({entry.file}): "
                        f"{code.key}: {code.why}"
                    )
    for name, entries in notes.harmless.items():
        complaints += [
            f"{name}: the note on {key} is about no release in the record"
            for key in entries
            if (name, key) not in needed
        ]
    return complaints


def outdated(records: Iterable[Record], patches: Iterable[Patch]) -> list[str]:
    """Patches whose changes are not those that the record was made with."""
    records = list(records)
    complaints = []
    for patch in patches:
        own = records_of(patch, records)
        if not own:
            complaints.append(f"{patch.name}: there is no record of {patch.guard.distribution}")
        complaints += [
            f"{patch.name}: the record of {record.name} was made with other changes"
            for record in own
            if record.digests.get(patch.name) != digest(patch)
        ]
    return complaints
