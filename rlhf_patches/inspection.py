"""What each patch would do, here or in a release that is not installed, from metadata and text alone.

No framework is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import recognition, rewriting, settings, sources, versions
from .plugins import PluginFailure, Registered
from .releases import Release, ReleaseError
from .reporting import Report, Status, patch_report
from .rewriting import NoEffect, Unrecognised
from .sources import NotFound, Source, Unreadable
from .versions import Finding, Verdict
from .vocabulary import Patch, Rewrite, Wrap


def inspect(registered: Iterable[Registered], failures: Iterable[PluginFailure] = ()) -> Report:
    """The running environment: a report in which APPLIES takes the place of APPLIED and PENDING.

    Raises:
        SettingsError: an environment variable is wrong.
    """
    registered = list(registered)
    environment = settings.read([item.patch.name for item in registered])
    rows = []
    with sources.parsed_once():
        for item in registered:
            found = _judge(item.patch, _Installed())
            off = environment.switched_off(item.patch.name)
            if off:
                found = _Judgement(Status.DISABLED, off, found.version)
            rows.append(patch_report(item.patch, item.plugin, *found))
    return Report(tuple(rows), tuple(failures))


def check(release: Release, registered: Iterable[Registered], failures: Iterable[PluginFailure] = ()) -> Report:
    """The same of one release, whatever is installed here and whatever the environment variables say.

    Thorough: that edits leave every line where it is, which the rules of `rewriting` promise, is checked too.

    Raises:
        ReleaseError: something of the release is there and cannot be read.
    """
    with sources.parsed_once():
        rows = [patch_report(item.patch, item.plugin, *_judge(item.patch, _Released(release))) for item in registered]
    return Report(tuple(rows), tuple(failures))


def is_patched(release: Release, registered: Iterable[Registered]) -> bool:
    """Whether the release has a package that any patch is for; if not, nothing has been found out about it.

    Raises:
        ReleaseError: something of the release is there and cannot be read.
    """
    packages = {module.partition(".")[0] for item in registered for module in item.patch.modules}
    return any(map(release.has_package, packages))


class _Judgement(NamedTuple):
    status: Status
    reason: str
    version: str | None
    unread: bool = False


class _Installed:
    """The running environment, as `_judge` asks for it."""

    thorough = False
    fatal: tuple[type[Exception], ...] = ()

    def read(self, patch: Patch) -> tuple[Finding, Callable[[], dict[str, Source]]]:
        """The version guard's finding, and a function that reads the text of each module."""
        specs = {name: sources.locate(name) for name in patch.modules}
        finding = versions.worst([versions.check(patch.guard, spec.origin) for spec in specs.values()])
        return finding, lambda: {name: sources.read(spec) for name, spec in specs.items()}

    def why_absent(self, patch: Patch, error: NotFound) -> tuple[str | None, str]:
        """The version, if there is one, and why the patch's module is not there."""
        return versions.why_absent(patch.guard, error)


class _Released:
    """A release, as `_judge` asks for it."""

    thorough = True
    fatal: tuple[type[Exception], ...] = (ReleaseError, MemoryError)

    def __init__(self, release: Release) -> None:
        self._release = release

    def read(self, patch: Patch) -> tuple[Finding, Callable[[], dict[str, Source]]]:
        """As `_Installed.read`."""
        return self._release.finding(patch.guard), lambda: {name: self._release.source(name) for name in patch.modules}

    def why_absent(self, patch: Patch, error: NotFound) -> tuple[str | None, str]:
        """As `_Installed.why_absent`."""
        return self._release.finding(patch.guard).version, str(error)


def _judge(patch: Patch, world: _Installed | _Released) -> _Judgement:
    finding = None
    try:
        finding, read_texts = world.read(patch)
        texts = read_texts()
        if finding.verdict is Verdict.OUTSIDE:
            reason, unread = recognition.outside(patch, finding, texts)
            return _Judgement(Status.UNAFFECTED, reason, finding.version, unread)
        recognition.check_compiles(recognition.recognise_all(patch, texts), lines=world.thorough)
    except NotFound as error:
        version, reason = world.why_absent(patch, error)
        return _Judgement(Status.ABSENT, reason, version)
    except (NoEffect, Unrecognised, Unreadable) as error:
        assert finding is not None
        return _Judgement(*recognition.refusal(finding, error), finding.version)
    except world.fatal:
        raise
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
