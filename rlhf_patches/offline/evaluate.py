"""What each patch would do, here or in a release that is not installed, from metadata and text alone.

No framework is imported.
"""

from __future__ import annotations

import difflib
import functools
import shlex
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from .. import settings
from ..definitions.patch import KnownBug, Patch, Rewrite, Shape, Variant, Wrap
from ..definitions.registry import PluginFailure, Registered
from ..definitions.status import PatchReport, Report, Status, patch_report
from ..guards import decision, implementations, rewriting, shapes, sources
from ..guards.decision import Choice, Decision, Found, Held
from ..guards.rewriting import Unrecognised
from ..guards.sources import NotFound, Source, Unreadable
from .archive import Release, ReleaseError


def inspect(registered: Iterable[Registered], failures: Iterable[PluginFailure] = ()) -> Report:
    """The running environment: a report in which APPLIES takes the place of APPLIED and PENDING.

    Raises:
        SettingsError: an environment variable is wrong.
    """
    registered = list(registered)
    environment = settings.from_environment([item.patch.name for item in registered])
    beside: dict[str, Held] = {}
    rows = []
    with sources.parsed_once():
        for item in registered:
            off = environment.switched_off(item.patch.name)
            found = _judge(item.patch, decision.look, sources.read_module, {} if off else beside)
            if off:
                found = Decision(Status.DISABLED, off, found.version)
            rows.append(_row(item, found))
    return Report(tuple(rows), tuple(failures))


def check(release: Release, registered: Iterable[Registered], failures: Iterable[PluginFailure] = ()) -> Report:
    """The same of one release, whatever is installed here and whatever the environment variables say.

    Thorough: that edits leave every line where it is, which the rules of `rewriting` promise, is checked too.

    Raises:
        ReleaseError: something of the release is there and cannot be read.
    """
    beside: dict[str, Held] = {}
    with sources.parsed_once():
        rows = [
            _row(item, _judge(item.patch, functools.partial(look, release), release.source, beside, release=True))
            for item in registered
        ]
    return Report(tuple(rows), tuple(failures))


def look(release: Release, variant: Variant) -> Found:
    """What a release has of a variant's modules.

    Raises:
        ReleaseError: something of the release is there and cannot be read.
    """
    finding = release.finding(variant.guard)
    for module in variant.modules:
        try:
            release.source(module)
        except NotFound as error:
            return Found(variant, finding, str(error), str(error))
        except Unreadable:  # it is there
            continue
    return Found(variant, finding)


def is_patched(release: Release, registered: Iterable[Registered]) -> bool:
    """Whether the release has a package that any patch is for; if not, nothing has been found out about it.

    Raises:
        ReleaseError: something of the release is there and cannot be read.
    """
    packages = {module.partition(".")[0] for item in registered for module in item.patch.modules}
    return any(map(release.has_package, packages))


def _row(item: Registered, found: Decision) -> PatchReport:
    places = dict.fromkeys(f"{each.source.filename}:{each.node.lineno}" for each in found.recognised)
    if found.status is not Status.APPLIES:
        places = {}
    return patch_report(
        item.patch, item.plugin, found.status, found.reason, found.version, found.unreviewed, tuple(places)
    )


def _judge(
    patch: KnownBug,
    look: Callable[[Variant], Found],
    read: Callable[[str], Source],
    beside: dict[str, Held],
    release: bool = False,
) -> Decision:
    """What `apply` would do with a patch.

    Args:
        patch: the patch.
        look: gives what there is of a variant.
        read: gives the text of a module.
        beside: per target what the patches before this one have made of it; this one's changes are added.
        release: whether to check lines too, and to let errors through that are not about the patch.
    """
    choice: Choice | Decision | None = None
    try:
        choice = decision.choose([look(variant) for variant in patch.variants])
        found = choice if isinstance(choice, Decision) else decision.decide(choice, read)
        if found.status is not Status.APPLIES:
            return found
        assert isinstance(choice, Choice)
        try:
            implementations.check_usable(found.recognised, implementations.of_text)
            added = _beside(patch.name, found, beside)
            shapes.check_compiles(list(found.recognised), lines=release)
        except decision.REFUSALS as error:
            return decision.refusal(choice.finding, error)
    except Exception as error:
        if release and isinstance(error, (ReleaseError, MemoryError)):
            raise
        version = choice.finding.version if isinstance(choice, Choice) else None
        return Decision(Status.FAILED, f"{type(error).__name__}: {error}", version)
    beside.update(added)
    return found if choice.of_several else found._replace(reason=f"{found.reason}, and the code is recognised")


def _beside(name: str, found: Decision, beside: dict[str, Held]) -> dict[str, Held]:
    """What the functions of a patch carry with its changes added."""
    added = {}
    for target, changes in shapes.by_function(list(found.recognised)).items():
        held = beside.get(target, Held())
        if name in held.holders:
            continue
        edits = decision.edits_beside(name, changes, held)
        if edits is None:
            added[target] = Held(held.rewrites, name)
        else:
            added[target] = Held({**held.rewrites, name: edits}, held.trampoline_of)
    return added


def diff(patch: Patch) -> str:
    """Unified diff of the installed source, as the patch changes it, for ``patch -p0`` in the folder that it names.

    What a function is replaced or wrapped by shows as a comment above it.

    Raises:
        NotFound: the framework is not installed.
        Unrecognised, Unreadable: the patch would be refused.
    """
    choice = decision.choose([decision.look(variant) for variant in patch.variants])
    if isinstance(choice, Decision):
        raise NotFound(choice.reason)
    recognised, errors = decision.shapes_in(choice.variants, sources.read_module)
    if not recognised:
        raise errors[0]
    if len(recognised) > 1:
        raise Unrecognised(decision.decide(choice, sources.read_module).reason)
    (found,) = recognised.values()
    shapes.check_compiles(found)
    texts = {item.source.module: item.source for item in found}
    return "".join(_file_diff(text, found) for text in texts.values())


def _file_diff(source: Source, recognised: list[shapes.Recognised]) -> str:
    edits = []
    for item in recognised:
        if item.source is not source:
            continue
        if isinstance(item.change, Rewrite):
            edits += list(item.edits)
        else:
            edits.append(_note(item))
    new = rewriting.with_edits(source.text, edits)
    root = Path(source.filename).parents[source.module.count(".") + (Path(source.filename).stem == "__init__")]
    name = Path(source.filename).relative_to(root).as_posix()  # patch refuses absolute ones
    lines = difflib.unified_diff(source.text.splitlines(keepends=True), new.splitlines(keepends=True), name, name)
    return f"# patch -p0 -d {shlex.quote(str(root))}\n" + "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )


def _note(item: shapes.Recognised) -> rewriting.Edit:
    """A comment above a function that is not edited but called through ours."""
    assert not isinstance(item.change, (Rewrite, Shape))
    lines = item.source.text.splitlines(keepends=True)
    first = sources.first_line(item.node)
    start = sum(len(line) for line in lines[: first - 1])
    done = "wrapped" if isinstance(item.change, Wrap) else "replaced"
    note = [f"{done} by {item.change.implementation}:", *_text_of(item.change.implementation)]
    indent = " " * item.node.col_offset
    return rewriting.Edit(start, start, "".join(f"{indent}# {line}".rstrip() + "\n" for line in note))


def _text_of(path: str) -> list[str]:
    """The lines of an implementation; none where it is not a function of its module's text."""
    module, _, qualname = path.partition(":")
    try:
        source = sources.read_module(module)
        node = sources.find_function(source, qualname)
    except (NotFound, Unreadable, Unrecognised):
        return []
    lines = source.text.splitlines()[sources.first_line(node) - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines)).splitlines()
