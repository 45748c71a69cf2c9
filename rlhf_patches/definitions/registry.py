"""Loading of patches from entry points. A plugin that breaks is reported by name and stops no other.

What is built-in is not asked of metadata, which any distribution can write: it is this package's own module, by its
name and its folder, and comes first. Whatever else calls itself rlhf-patches is named by what its entry point leads to.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from .. import installed, settings
from .patch import KnownBug, Listed

if TYPE_CHECKING:
    import importlib.metadata

BUILT_IN = "rlhf-patches"
_CALLS_ITSELF = "{} (calls itself {})"
_VALID_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class _OwnEntryPoint(NamedTuple):
    """As an `importlib.metadata.EntryPoint`."""

    name: str
    value: str

    def load(self) -> Any:
        return importlib.import_module(self.value)


_OWN = _OwnEntryPoint("built-in", installed.OWN_ENTRY_POINT)
_EntryPoint = Union["importlib.metadata.EntryPoint", _OwnEntryPoint]


class PluginFailure(NamedTuple):
    """A plugin, or one of its patches, that could not be used: ``plugin`` names it, ``reason`` says why."""

    plugin: str
    reason: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} could not be used: {self.reason}"


class Registered(NamedTuple):
    """A patch or an advice with the distribution that brought it: BUILT_IN, or what that of a plugin calls itself."""

    patch: KnownBug
    plugin: str


def credit(plugin: str) -> str:
    """What to add to a line about a patch: who brings it, where that is not this package."""
    return "" if plugin == BUILT_IN else f" (plugin {plugin})"


def hint(failures: Sequence[PluginFailure]) -> str:
    """What else to say when a patch's name is unknown: it may be in a plugin that did not load."""
    broken = ", ".join(failure.plugin for failure in failures)
    return f" (plugins that could not be used: {broken})" if broken else ""


def load() -> tuple[list[Registered], list[PluginFailure]]:
    """All patches of all plugins, as `listed`, and imported."""
    found, failures = listed()
    registered = []
    for patch, plugin in found:
        try:
            registered.append(Registered(patch.load() if isinstance(patch, Listed) else patch, plugin))
        except (Exception, SystemExit) as error:
            failures.append(_not_loaded(plugin, patch.name, error))
    return registered, failures


def listed() -> tuple[list[tuple[KnownBug | Listed, str]], list[PluginFailure]]:
    """All patches of all plugins that are installed and allowed, built-in ones first, then by distribution name.

    The order decides which of two conflicting patches is applied, so it must be the same on every rank:
    it depends on names only, never on the order of ``sys.path``. Of a plugin that is not allowed nothing is imported.

    Raises:
        SettingsError: RLHF_PATCHES_PLUGINS names what is not installed.
    """
    found: dict[str, tuple[KnownBug | Listed, str]] = {}
    failures: list[PluginFailure] = []
    for plugin, entry_point in _entry_points(failures):
        try:
            patches = _patches_of(entry_point, plugin)
        # A plugin runs foreign code at import; even its sys.exit() must not end a training run.
        except (Exception, SystemExit) as error:
            failures.append(_not_loaded(plugin, entry_point.value, error))
            continue
        for patch in patches:
            if not isinstance(patch, (KnownBug, Listed)):
                failures.append(
                    PluginFailure(plugin, f"returned a {type(patch).__name__}, expected a rlhf_patches.Patch")
                )
            elif patch.name in found:
                first = found[patch.name][1]
                failures.append(
                    PluginFailure(plugin, f"its patch {patch.name!r} is ignored: {first} has one of that name")
                )
            else:
                found[patch.name] = patch, plugin
    return list(found.values()), failures


def _not_loaded(plugin: str, what: str, error: BaseException) -> PluginFailure:
    reason = f"loading {what!r} raised {type(error).__name__}: {error}"
    return PluginFailure(plugin, reason + (_not_installed() if plugin == BUILT_IN else ""))


def _entry_points(failures: list[PluginFailure]) -> list[tuple[str, _EntryPoint]]:
    found: dict[tuple[str, str, str], _EntryPoint] = {(_own_name(), _OWN.name, _OWN.value): _OWN}
    for entry_point in _of_our_group(failures):
        # The same distribution can be listed twice (two metadata folders, a path twice on sys.path).
        found.setdefault((_called(entry_point), entry_point.name, entry_point.value), entry_point)
    allowed = settings.plugins({key[0] for key in found} | {BUILT_IN}) | {BUILT_IN}
    order = sorted(found, key=lambda key: (key[0] != BUILT_IN, key))
    return [(key[0], found[key]) for key in order if key[0] in allowed]


def _not_installed() -> str:
    """The end of an error: this package is that of a checkout, whose patches are no part of it."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    if not os.path.exists(os.path.join(root, "patches", "plugin.py")):
        return ""
    return f". {root} is a checkout on sys.path (PYTHONPATH, or the working directory): `pip install {root}`"


def _own_name() -> str:
    """What to call the module of the built-in patches: it is not ours where a finder leads to another folder."""
    try:
        spec = importlib.util.find_spec(_OWN.value.rpartition(".")[0])
        folder = os.path.realpath(spec.submodule_search_locations[0])  # type: ignore[union-attr, index]
    except Exception:
        return BUILT_IN  # it cannot be imported either, which is said then
    # Within the package in a wheel, beside it in a checkout.
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    ours = (os.path.join(here, "patches"), os.path.join(os.path.dirname(here), "patches"))
    return BUILT_IN if folder in ours else _CALLS_ITSELF.format(folder, BUILT_IN)


def _of_our_group(failures: list[PluginFailure]) -> Iterable[importlib.metadata.EntryPoint]:
    """The entry points of others. Not by importlib.metadata.entry_points().

    It parses those of every distribution, of which an image has hundreds, and one malformed file fails it as a whole.
    """
    if installed.others_bring_patches(sys.path) is False:
        return
    import importlib.metadata  # 25 ms

    for distribution in importlib.metadata.distributions():
        try:
            if installed.ENTRY_POINT_GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            found = distribution.entry_points.select(group=installed.ENTRY_POINT_GROUP)
            others = [entry_point for entry_point in found if entry_point.value.strip() != _OWN.value]
            if others and not _is_shadowed(distribution):
                yield from others
        except Exception as error:
            path = getattr(distribution, "_path", "an installed package")
            failures.append(
                PluginFailure(str(path), f"its entry points cannot be read ({type(error).__name__}: {error})")
            )


def _is_shadowed(distribution: importlib.metadata.Distribution) -> bool:
    """Whether another of this name, which is its folder's, comes before it on the path."""
    import importlib.metadata

    name = getattr(distribution, "_normalized_name", None)
    first = next(iter(importlib.metadata.distributions(name=name)), distribution) if name else distribution
    return getattr(first, "_path", None) != getattr(distribution, "_path", None)


def _called(entry_point: importlib.metadata.EntryPoint) -> str:
    """What to call a plugin of another distribution: never what the built-in patches are called."""
    name = _distribution(entry_point)
    if not _VALID_NAME.fullmatch(name):
        name = ascii(name)  # letters that look like others, or none that can be seen
    return _CALLS_ITSELF.format(entry_point.value, name) if settings.canonical(name) == BUILT_IN else name


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
    # A half removed distribution has entry points and no name: None or an exception, depending on the Python.
    try:
        name = entry_point.dist.metadata["Name"] if entry_point.dist and "Name" in entry_point.dist.metadata else None
    except Exception:
        name = None
    return name or entry_point.name


def _patches_of(entry_point: _EntryPoint, plugin: str) -> list[KnownBug | Listed]:
    if plugin == BUILT_IN:
        return list(entry_point.load().listed())
    import pluggy  # and inspect: only where there is a plugin

    from . import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load(), name=plugin)
    manager.check_pending()
    results = manager.hook.rlhf_patches()
    if not results:
        raise LookupError(
            f"no hook implementation: expected a function rlhf_patches() marked with @{hookspecs.PROJECT}.hookimpl"
        )
    return [patch for result in results for patch in result]
