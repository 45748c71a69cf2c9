"""The findings of `audit` for GitHub: annotations of a workflow, and Markdown for a comment."""

from __future__ import annotations

from collections.abc import Iterator

from ..definitions.words import printable
from .audit import Findings

_PLAIN = frozenset(" .,/=+-()'")
"""Characters, in addition to letters and digits, without a meaning in Markdown."""


def github(findings: Findings) -> Iterator[str]:
    """One workflow command per line. GitHub shows ten of a kind per step, so the sum comes first in its kind."""
    yield _command("notice", "rlhf-patches audit", " ".join(findings.in_sum()))
    for gap in findings.not_read:
        yield _command("error", "not read", gap.text, *findings.location(gap.place))
    for each, bug in findings.with_bugs:
        title = f"{each.pin.name} {each.pin.version}: {bug.patch.name}"
        text = f"{bug.wrong} ({bug.facts})"
        yield _command("warning", title, text, *findings.location(each.pin.place))
    for pair in findings.failing:
        title = f"{pair.pin.name} {pair.pin.version}: known to fail"
        yield _command("warning", title, pair.why, *findings.location(pair.pin.place))
    for note in findings.notes:
        yield _command("notice", "configuration", note)
    for gap in findings.gaps:
        yield _command("notice", "not looked up", gap.text, *findings.location(gap.place))


def _command(kind: str, title: str, text: str, file: str | None = None, line: int | None = None) -> str:
    where = {} if file is None else {"file": file, "line": str(line or 1)}  # TOML and JSON give no line
    properties = ",".join(f"{name}={_property(value)}" for name, value in {**where, "title": title}.items())
    return f"::{kind} {properties}::{_data(text)}"


def _data(text: str) -> str:
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def markdown(findings: Findings) -> Iterator[str]:
    """A table of the bugs, then the entries that were not looked up, and the sum."""
    if findings.with_bugs:
        yield "| package | version | harm | what is wrong, and when | fixed in | where |"
        yield "| --- | --- | --- | --- | --- | --- |"
    for each, bug in findings.with_bugs:
        wrong = f"**{bug.patch.name}**: {_cell(bug.wrong)}"
        cells = (each.pin.name, _code(each.pin.version or ""), bug.patch.harm, wrong, bug.fixed_in)
        yield f"| {' | '.join(cells)} | {_code(each.pin.place)} |"
    if findings.with_bugs:
        yield ""
    for pair in findings.failing:
        yield f"- **known to fail**: {_code(pair.text)}"
    for gap in [*findings.gaps, *findings.not_read]:
        yield f"- {_code(gap.text)}"
    for _, bug, reason in findings.excluded:
        yield f"- **{bug.patch.name}** cannot affect this run: {_code(reason)}"
    for note in findings.notes:
        yield f"- {_code(note)}"
    if findings.failing or findings.gaps or findings.not_read or findings.excluded or findings.notes:
        yield ""
    yield " ".join(findings.in_sum())


def _code(text: str) -> str:
    """Escape outside text, so that it has no Markdown, HTML, link, mention or end of a cell."""
    escaped = (c if c.isalnum() or c in _PLAIN else f"&#{ord(c)};" for c in printable(text))
    return f"<code>{''.join(escaped)}</code>"


def _cell(text: str) -> str:
    """A patch's text, which contains Markdown."""
    return printable(text).replace("<", "&lt;").replace("|", "&#124;")
