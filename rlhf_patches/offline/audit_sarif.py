"""The findings of `audit` as SARIF 2.1.0, for GitHub's code scanning and editors.

Entries that were not looked up are results too, so that a consumer does not treat them as clean.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .._version import __version__
from ..definitions import pages
from ..definitions.bug import KnownBug
from ..definitions.patch import Advice
from ..definitions.words import printable
from .audit import Audited, Bug, Findings

NOT_LOOKED_UP, NOT_READ, KNOWN_TO_FAIL = "not-looked-up", "not-read", "known-to-fail"

_LEVELS = {"hang": "warning", "crash": "warning", "memory": "note", "slow": "note", "": "warning"}
"""By harm; a bug with which a run continues with wrong numbers is an error."""
_RULES = {
    KNOWN_TO_FAIL: ("warning", "Known to fail: one of these releases cannot be imported with the other"),
    NOT_LOOKED_UP: ("warning", "Not looked up: it may have known bugs"),
    NOT_READ: ("error", "Not read: this file may name releases with known bugs"),
}


def document(findings: Findings) -> dict[str, Any]:
    """One run: a rule for each known bug, a result for each finding, the worst harm first."""
    bugs = {bug.patch.name: bug for _, bug in findings.with_bugs}
    bugs |= {bug.patch.name: bug for _, bug, _ in findings.excluded}
    rules = [*map(_rule, bugs.values()), *map(_own_rule, _RULES)]
    numbers = {rule["id"]: number for number, rule in enumerate(rules)}

    def result(rule: str, text: str, place: str) -> dict[str, Any]:
        number = numbers[rule]
        return {
            "ruleId": rule,
            "ruleIndex": number,
            "level": rules[number]["defaultConfiguration"]["level"],
            "message": {"text": _message(text)},
            "locations": [_location(findings, place)],
        }

    def of(each: Audited, bug: Bug) -> dict[str, Any]:
        return result(bug.patch.name, f"{each.pin.name} {each.pin.version}: {bug.wrong} ({bug.facts})", each.pin.place)

    results = list(itertools.starmap(of, findings.with_bugs))
    for each, bug, reason in findings.excluded:
        why = f"cannot affect this run: {_message(reason)}"
        results.append({**of(each, bug), "suppressions": [{"kind": "external", "justification": why}]})
    for pair in findings.failing:
        results.append(result(KNOWN_TO_FAIL, f"{pair.pin.name} {pair.pin.version}: {pair.why}", pair.pin.place))
    results += [result(NOT_LOOKED_UP, gap.text, gap.place) for gap in findings.gaps]
    results += [result(NOT_READ, gap.text, gap.place) for gap in findings.not_read]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "rlhf-patches", "version": __version__, "rules": rules}},
                "invocations": [
                    {
                        "executionSuccessful": not findings.not_read,
                        "exitCode": findings.status,
                        "toolConfigurationNotifications": [
                            {"message": {"text": _message(note)}} for note in findings.notes
                        ],
                    }
                ],
                "results": results,
            }
        ],
    }


def _rule(bug: Bug) -> dict[str, Any]:
    patch = bug.patch
    advice = f"What to do: {patch.what_to_do}" if isinstance(patch, Advice) else ""
    repaired = f"Repaired at run time by {bug.repaired_by}: see `rlhf-patches explain {patch.name}`."
    link = next((each for each in patch.references if each.startswith("https://")), None)
    return {
        "id": patch.name,
        "shortDescription": {"text": _message(patch.bug or patch.summary)},
        "fullDescription": {"text": _message(pages.bug(patch))},
        "help": {"text": "\n\n".join((_lines(patch.symptom), _lines(advice) or repaired))},
        **({"helpUri": link} if link else {}),
        "defaultConfiguration": {"level": level(patch)},
        "properties": {"harm": patch.harm or None, "tags": [patch.distribution, *filter(None, [patch.harm])]},
    }


def _own_rule(name: str) -> dict[str, Any]:
    severity, text = _RULES[name]
    return {"id": name, "shortDescription": {"text": text}, "defaultConfiguration": {"level": severity}}


def level(patch: KnownBug) -> str:
    """SARIF's level for the harm: "error", "warning", "note"."""
    return _LEVELS.get(patch.harm, "error")


def _location(findings: Findings, place: str) -> dict[str, Any]:
    file, line = findings.location(place)
    if file is None:
        return {"logicalLocations": [{"fullyQualifiedName": printable(place)}]}
    # GitHub requires a line; entries of TOML and JSON lock files have none.
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(file)}, "region": {"startLine": line or 1}}}


def _uri(file: str) -> str:
    """The file's URI, relative to the working directory if it is below it, as GitHub requires."""
    path, here = Path(os.path.abspath(file)), Path.cwd()
    return quote(os.fsencode(path.relative_to(here).as_posix())) if path.is_relative_to(here) else path.as_uri()


def _message(text: str) -> str:
    """Escape placeholders ({0}) and links in outside text, which viewers would expand."""
    return re.sub(r"\{(\d+)\}", r"{{\1}}", printable(text)).replace("](", "] (")


def _lines(text: str) -> str:
    return "\n".join(map(_message, text.splitlines()))
