"""What each patch would do, here or in a release that is not installed, from metadata and text alone.

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
    """The running environment: a report in which APPLIES takes the place of APPLIED and PENDING.

    Raises:
        SettingsError: an environment variable is wrong.
    """
    registered = list(registered)
    environment = settings.from_environment([item.patch.name for item in registered])
    beside: dict[str, Held] = {}
    rows = []
    with memory.parsed_once():
        for item in registered:
            off = environment.switched_off(item.patch.name)
            unasked = environment.unasked(item.patch.name, item.patch.contested)
            found = _judge(item.patch, choices.look, _read, {} if off else beside, unasked=unasked)
            if any(each.source.known is None for each in found.recognised):
                found = found._replace(reason=found.reason + SEARCHED)
            if off:
                found = Decision(Status.DISABLED, off, found.version)
            rows.append(_row(item, found))
    return Report(tuple(rows), tuple(failures))


def check(
    release: Release,
    registered: Iterable[Registered],
    failures: Iterable[PluginFailure] = (),
    by_name: bool = False,
) -> Report:
    """The same of one release, whatever is installed here and whatever the environment variables say.

    But RLHF_PATCHES_ENABLE and RLHF_PATCHES_ONLY count, as far as they ask for what upstream contests;
    ``by_name``: all is asked for.

    Thorough: that edits leave every line where it is, which the rules of `rewriting` promise, is checked too.

    Raises:
        ReleaseError: something of the release is there and cannot be read.
    """
    named = settings.Settings((), (), False, settings.named())
    beside: dict[str, Held] = {}
    with memory.parsed_once():
        rows = []
        for item in registered:
            why = None if by_name else named.unasked(item.patch.name, item.patch.contested)
            found = _judge(item.patch, functools.partial(look, release), release.source, beside, True, why)
            rows.append(_row(item, found))
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


def _read(module: str) -> Source:
    return known.look_up(locating.read_module(module))


def _row(item: Registered, found: Decision) -> PatchReport:
    places = dict.fromkeys(f"{each.source.filename}:{each.place.lineno}" for each in found.recognised)
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
    unasked: str | None = None,
) -> Decision:
    """What `apply` would do with a patch.

    Args:
        patch: the patch.
        look: gives what there is of a variant.
        read: gives the text of a module.
        beside: per target what the patches before this one have made of it; this one's changes are added.
        release: whether to check lines too, and to let errors through that are not about the patch.
        unasked: why it is off, if it is contested and was not asked for.
    """
    choice: Choice | Decision | None = None
    try:
        choice = choices.choose([look(variant) for variant in patch.variants])
        if unasked:
            return choices.unasked(choice, unasked)
        found = choice if isinstance(choice, Decision) else decision.decide(choice, read)
        if found.status is not Status.APPLIES:
            return found
        assert isinstance(choice, Choice)
        try:
            implementations.check_usable(found.recognised, implementations.of_text)
            added = _beside(patch, found, beside)
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


def _beside(patch: KnownBug, found: Decision, beside: dict[str, Held]) -> dict[str, Held]:
    """What the functions of a patch carry with its changes added."""
    added, name = {}, patch.name
    for target, changes in shapes.by_function(list(found.recognised)).items():
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
