"""What each patch would do in this environment, from metadata and text alone: no framework is imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from . import recognition, rewriting, settings, sources, versions
from .plugins import PluginFailure, Registered
from .reporting import Report, Status, patch_report
from .rewriting import NoEffect, Unrecognised
from .sources import NotFound, Source, Unreadable
from .versions import Verdict
from .vocabulary import Patch, Rewrite, Wrap


def inspect(registered: Iterable[Registered], failures: Iterable[PluginFailure] = ()) -> Report:
    """A report in which APPLIES takes the place of APPLIED and PENDING.

    Raises:
        SettingsError: an environment variable is wrong.
    """
    registered = list(registered)
    environment = settings.read([item.patch.name for item in registered])
    rows = []
    for item in registered:
        found = _judge(item.patch)
        off = environment.switched_off(item.patch.name)
        if off:
            found = _Judgement(Status.DISABLED, off, found.version)
        rows.append(patch_report(item.patch, item.plugin, *found))
    return Report(tuple(rows), tuple(failures))


class _Judgement(NamedTuple):
    status: Status
    reason: str
    version: str | None
    unread: bool = False


def _judge(patch: Patch) -> _Judgement:
    finding = None
    try:
        specs = {name: sources.locate(name) for name in patch.modules}
        findings = [versions.check(patch.guard, spec.origin) for spec in specs.values()]
        finding = versions.worst(findings)
        texts = {name: sources.read(spec) for name, spec in specs.items()}
        if finding.verdict is Verdict.OUTSIDE:
            reason, unread = recognition.outside(patch, finding, texts)
            return _Judgement(Status.UNAFFECTED, reason, finding.version, unread)
        recognition.check_compiles(recognition.recognise_all(patch, texts))
    except NotFound as error:
        version, reason = versions.why_absent(patch.guard, error)
        return _Judgement(Status.ABSENT, reason, version)
    except (NoEffect, Unrecognised, Unreadable) as error:
        assert finding is not None
        return _Judgement(*recognition.refusal(finding, error), finding.version)
    except Exception as error:
        return _Judgement(Status.FAILED, f"{type(error).__name__}: {error}", finding.version if finding else None)
    return _Judgement(Status.APPLIES, f"{finding.reason}, and the code is recognised", finding.version)


def diff(patch: Patch) -> str:
    """Unified diff of the installed source, as the patch changes it. Replaced and wrapped functions show as comments.

    Raises:
        NotFound: the framework is not installed.
        Unrecognised, Unreadable: the patch would be refused.
    """
    texts = {name: sources.read(sources.locate(name)) for name in patch.modules}
    recognised = recognition.recognise_all(patch, texts)
    recognition.check_compiles(recognised)
    return "".join(_file_diff(texts[name], recognised) for name in patch.modules)


def _file_diff(source: Source, recognised: list[recognition.Recognised]) -> str:
    edits = []
    for item in recognised:
        if item.source is not source:
            continue
        if isinstance(item.change, Rewrite):
            edits += list(item.edits)
        else:
            edits.append(_note(item))
    new = source.text
    for edit in sorted(edits, reverse=True):
        new = new[: edit.start] + edit.text + new[edit.end :]
    lines = difflib.unified_diff(
        source.text.splitlines(keepends=True),
        new.splitlines(keepends=True),
        source.filename,
        source.filename,
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def _note(item: recognition.Recognised) -> rewriting.Edit:
    """A comment above a function that is not edited but called through ours."""
    assert not isinstance(item.change, Rewrite)
    lines = item.source.text.splitlines(keepends=True)
    first = sources.first_line(item.node)
    start = sum(len(line) for line in lines[: first - 1])
    done = "wrapped" if isinstance(item.change, Wrap) else "replaced"
    return rewriting.Edit(start, start, f"{' ' * item.node.col_offset}# {done} by {item.change.implementation}\n")
