"""The findings of `audit` in the form of osv-scanner's JSON.

Entries that were not looked up are listed as vulnerabilities, so that a consumer does not treat them as clean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..definitions import pages
from ..definitions.patch import Advice
from ..definitions.words import printable
from .audit import Bug, Findings
from .audit_sarif import KNOWN_TO_FAIL, NOT_LOOKED_UP, NOT_READ

_ECOSYSTEM = "PyPI"


def document(findings: Findings) -> dict[str, Any]:
    """``results``, one for each file, with ``packages`` and their ``vulnerabilities``; ``summary``, sentences."""
    packages: dict[str, list[dict[str, Any]]] = {}

    def add(place: str, name: str, version: str | None, vulnerabilities: Sequence[dict[str, Any]]) -> None:
        package = {"name": name, "version": printable(version or ""), "ecosystem": _ECOSYSTEM}
        groups = [{"ids": [each["id"]], "aliases": [each["id"]]} for each in vulnerabilities]
        source = printable(findings.location(place)[0] or place)
        row = {"package": package, "vulnerabilities": vulnerabilities, "groups": groups}
        packages.setdefault(source, []).append(row)

    for each in findings.audited:
        if each.bugs:
            add(
                each.pin.place,
                each.pin.name,
                each.pin.version,
                [_vulnerability(bug, each.pin.place) for bug in each.bugs],
            )
    for pair in findings.failing:
        place, name, version = pair.pin.place, pair.pin.name, pair.pin.version
        add(place, name, version, [_own(KNOWN_TO_FAIL, pair.why, place)])
    for gap in findings.gaps:
        add(gap.place, gap.name, gap.version, [_own(NOT_LOOKED_UP, gap.text, gap.place)])
    for gap in findings.not_read:
        add(gap.place, "", None, [_own(NOT_READ, gap.text, gap.place)])
    results = [{"source": {"path": path, "type": "lockfile"}, "packages": rows} for path, rows in packages.items()]
    return {"results": results, "summary": [*findings.in_sum(), *map(printable, findings.notes)]}


def _own(name: str, text: str, place: str) -> dict[str, Any]:
    return {"id": name, "summary": printable(text), "affected": [], "database_specific": {"place": printable(place)}}


def _vulnerability(bug: Bug, place: str) -> dict[str, Any]:
    patch = bug.patch
    affected: dict[str, Any] = {"package": {"ecosystem": _ECOSYSTEM, "name": patch.distribution}}
    ranges = [{"type": "ECOSYSTEM", "events": events} for events in _events(bug)]
    if ranges:
        affected["ranges"] = ranges
    return {
        "id": patch.name,
        "summary": pages.bug(patch),
        "details": patch.symptom,
        "affected": [{**affected, "database_specific": {"range": patch.versions}}],
        "references": [{"type": "WEB", "url": each} for each in patch.references],
        "database_specific": {
            "harm": patch.harm or None,
            "fixed": bug.fixed,
            "repaired_by": bug.repaired_by,
            **({"beside": bug.beside} if bug.beside else {}),
            **({"what_to_do": patch.what_to_do} if isinstance(patch, Advice) else {}),
            "place": printable(place),
        },
    }


class _Span(NamedTuple):
    first: Version
    last: Version | None
    includes_last: bool


def _events(bug: Bug) -> list[list[dict[str, str]]]:
    """The patch's ranges, adjacent ones merged; empty if this form cannot express them.

    A range up to the newest reviewed release has no end, because the next release may have the bug.
    """
    spans = []
    for variant in bug.patch.variants:
        span = _span(variant.guard.versions)
        if span is None:
            return []
        spans.append(span)
    *earlier, newest = _merged(sorted(spans, key=lambda span: span.first))
    ranges = [[{"introduced": str(span.first)}, *_end(span)] for span in earlier]
    is_open = newest.includes_last and bug.read and newest.last and newest.last >= Version(bug.read)
    end = [{"fixed": bug.fixed}] if bug.fixed else [] if is_open else _end(newest)
    return [*ranges, [{"introduced": str(newest.first)}, *end]]


def _end(span: _Span) -> list[dict[str, str]]:
    return [{"last_affected" if span.includes_last else "fixed": str(span.last)}] if span.last else []


def _span(versions: str) -> _Span | None:
    first, last, includes_last = Version("0"), None, False
    for each in SpecifierSet(versions):
        if each.operator not in (">=", "<", "<=", "==") or each.version.endswith(".*"):
            return None
        version = Version(each.version)
        if each.operator in (">=", "=="):
            first = version
        if each.operator != ">=":
            last, includes_last = version, each.operator != "<"
    return _Span(first, last, includes_last)


def _merged(spans: Sequence[_Span]) -> Iterator[_Span]:
    current = spans[0]
    for span in spans[1:]:
        if current.last == span.first:
            current = _Span(current.first, span.last, span.includes_last)
        else:
            yield current
            current = span
    yield current
