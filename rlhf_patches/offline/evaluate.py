"""Judge what each patch would do, here or in a release that is not installed, from metadata and text alone.

No framework is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

from .. import settings
from ..definitions.bug import KnownBug
from ..definitions.listed import WATCH
from ..definitions.registry import PluginFailure, Registered
from ..definitions.status import PatchReport, Report, Status, patch_report
from ..definitions.variant import Variant
from ..guards import choices, decision, implementations, known, locating, memory, shapes
from ..guards.choices import Choice, Decision, Found
from ..guards.decision import Held
from ..guards.places import NotFound, Source, Unreadable
from .archive import Release
from .members import ReleaseError

SEARCHED = "; matched at import; nothing precomputed for this release"


def inspect(registered: Iterable[Registered], failures: Iterable[PluginFailure] = ()) -> Report:
    """A report of this environment, with APPLIES in place of APPLIED and PENDING.

    Raises:
        SettingsError: an environment variable is invalid.
    """
    registered = list(registered)
    environment = settings.from_environment([item.patch.name for item in registered])
    beside: dict[str, Held] = {}
    rows = []
    with memory.parsed_once():
        for item in registered:
            off = environment.switched_off(item.patch.name)
            unasked = environment.unasked(item.patch.name, item.patch.contested)
            result = _judge(item.patch, choices.look, _read, {} if off else beside, unasked=unasked)
            if any(each.source.known is None for each in result.recognized):
                result = result._replace(reason=result.reason + SEARCHED)
            if off:
                result = Decision(Status.DISABLED, off, result.version)
            rows.append(_row(item, result))
    return Report(tuple(rows), tuple(failures))


def check(
    release: Release,
    registered: Iterable[Registered],
    failures: Iterable[PluginFailure] = (),
    by_name: bool = False,
) -> Report:
    """A report of one release, independent of the installed packages and the environment variables.

    Only RLHF_PATCHES_ENABLE and RLHF_PATCHES_ONLY count, and only for patches that upstream contests;
    ``by_name`` enables all of these.

    It also checks that edits do not move lines, which the rules of `rewriting` guarantee.

    Raises:
        ReleaseError: a file of the release exists and cannot be read.
    """
    named = settings.Settings((), (), False, settings.named())
    beside: dict[str, Held] = {}
    with memory.parsed_once():
        rows = []
        for item in registered:
            why = None if by_name else named.unasked(item.patch.name, item.patch.contested)
            result = _judge(item.patch, functools.partial(look, release), release.source, beside, True, why)
            rows.append(_row(item, result))
    return Report(tuple(rows), tuple(failures))


def look(release: Release, variant: Variant) -> Found:
    """The part of a variant's modules that a release has.

    Raises:
        ReleaseError: a file of the release exists and cannot be read.
    """
    finding = release.finding(variant.guard)
    for module in variant.modules:
        try:
            release.source(module)
        except NotFound as error:
            return Found(variant, finding, str(error), str(error))
        except Unreadable:  # the module exists
            continue
    return Found(variant, finding)


def is_patched(release: Release, registered: Iterable[Registered]) -> bool:
    """Whether the release has a package of any patch; if not, the report has no information about it.

    Raises:
        ReleaseError: a file of the release exists and cannot be read.
    """
    packages = {module.partition(".")[0] for item in registered for module in item.patch.modules}
    return any(map(release.has_package, packages))


def _read(module: str) -> Source:
    return known.look_up(locating.read_module(module))


def _row(item: Registered, result: Decision) -> PatchReport:
    places = dict.fromkeys(f"{each.source.filename}:{each.place.lineno}" for each in result.recognized)
    if result.status is not Status.APPLIES:
        places = {}
    return patch_report(
        item.patch, item.plugin, result.status, result.reason, result.version, result.unreviewed, tuple(places)
    )


def _judge(
    patch: KnownBug,
    look: Callable[[Variant], Found],
    read: Callable[[str], Source],
    beside: dict[str, Held],
    release: bool = False,
    unasked: str | None = None,
) -> Decision:
    """Judge what `apply` would do with a patch.

    Args:
        patch: the patch.
        look: returns what exists of a variant.
        read: returns the text of a module.
        beside: by target, the changes of earlier patches; this patch's changes are added.
        release: whether to check lines too, and to raise errors that do not concern the patch.
        unasked: why the patch is off, if it is contested and not enabled.
    """
    choice: Choice | Decision | None = None
    try:
        choice = choices.choose([look(variant) for variant in patch.variants])
        if unasked:
            return choices.unasked(choice, unasked)
        result = choice if isinstance(choice, Decision) else decision.decide(choice, read)
        if result.status is not Status.APPLIES:
            return result
        assert isinstance(choice, Choice)
        try:
            implementations.check_usable(result.recognized, implementations.of_text)
            added = _beside(patch, result, beside)
            shapes.check_compiles(list(result.recognized), lines=release)
        except decision.REFUSALS as error:
            return decision.refusal(choice.finding, error)
    except Exception as error:
        if release and isinstance(error, (ReleaseError, MemoryError)):
            raise
        version = choice.finding.version if isinstance(choice, Choice) else None
        return Decision(Status.FAILED, f"{type(error).__name__}: {error}", version)
    beside.update(added)
    return result if choice.of_several else result._replace(reason=f"{result.reason}, and the code is recognized")


def _beside(patch: KnownBug, result: Decision, beside: dict[str, Held]) -> dict[str, Held]:
    """The changes in each function of a patch, including the patch's own."""
    added, name = {}, patch.name
    for target, changes in shapes.by_function(list(result.recognized)).items():
        held = beside.get(target, Held())
        if name in held.holders:
            continue
        if patch.kind == WATCH:
            decision.check_watch(target, held)
            added[target] = replace(held, watched_by=name)
            continue
        edits = decision.edits_beside(name, changes, held)
        if edits is None:
            added[target] = replace(held, trampoline_of=name)
        else:
            added[target] = replace(held, rewrites={**held.rewrites, name: edits})
    return added
