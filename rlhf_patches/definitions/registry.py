"""Loading of patches from entry points. A plugin that breaks is reported by name and stops no other.

What is built-in is not asked of metadata, which any distribution can write: it is this package's own module, by its
name and its folder, and comes first. Whatever else calls itself rlhf-patches is named by what its entry point leads to.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pluggy

from .. import settings
from . import hookspecs
from .patch import Patch

BUILT_IN = "rlhf-patches"
_OWN = importlib.metadata.EntryPoint("built-in", f"{hookspecs.PROJECT}.patches.plugin", hookspecs.ENTRY_POINT_GROUP)
_CALLS_ITSELF = "{} (calls itself {})"
_VALID_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class PluginFailure:
    """A plugin, or one of its patches, that could not be used: ``plugin`` names it, ``reason`` says why."""

    plugin: str
    reason: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} could not be used: {self.reason}"


@dataclass(frozen=True)
class Registered:
    """A patch together with the distribution that brought it: BUILT_IN, or what that of a plugin calls itself."""

    patch: Patch
    plugin: str


def credit(plugin: str) -> str:
    """What to add to a line about a patch: who brings it, where that is not this package."""
    return "" if plugin == BUILT_IN else f" (plugin {plugin})"


def hint(failures: Sequence[PluginFailure]) -> str:
    """What else to say when a patch's name is unknown: it may be in a plugin that did not load."""
    broken = ", ".join(failure.plugin for failure in failures)
    return f" (plugins that could not be used: {broken})" if broken else ""


def load() -> tuple[list[Registered], list[PluginFailure]]:
    """All patches of all plugins that are installed and allowed, built-in ones first, then by distribution name.

    The order decides which of two conflicting patches is applied, so it must be the same on every rank:
    it depends on names only, never on the order of ``sys.path``. Of a plugin that is not allowed nothing is imported.

    Raises:
        SettingsError: RLHF_PATCHES_PLUGINS names what is not installed.
    """
    registered: dict[str, Registered] = {}
    failures: list[PluginFailure] = []
    for plugin, entry_point in _entry_points(failures):
        try:
            patches = _patches_of(entry_point, plugin)
        # A plugin runs foreign code at import; even its sys.exit() must not end a training run.
        except (Exception, SystemExit) as error:
            reason = f"loading {entry_point.value!r} raised {type(error).__name__}: {error}"
            failures.append(PluginFailure(plugin, reason + (_not_installed() if plugin == BUILT_IN else "")))
            continue
        for patch in patches:
            if not isinstance(patch, Patch):
                failures.append(
                    PluginFailure(plugin, f"returned a {type(patch).__name__}, expected a rlhf_patches.Patch")
                )
            elif patch.name in registered:
                first = registered[patch.name].plugin
                failures.append(
                    PluginFailure(plugin, f"its patch {patch.name!r} is ignored: {first} has one of that name")
                )
            else:
                registered[patch.name] = Registered(patch, plugin)
    return list(registered.values()), failures


def _entry_points(failures: list[PluginFailure]) -> list[tuple[str, importlib.metadata.EntryPoint]]:
    found = {(_own_name(), _OWN.name, _OWN.value): _OWN}
    for entry_point in _of_our_group(failures):
        if entry_point.value.strip() != _OWN.value:  # that is ours, whichever distribution lists it
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
    try:
        return importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
    except Exception:
        pass
    # One malformed entry_points.txt, of whatever package, makes the call above fail: leave out that package only.
    found: list[importlib.metadata.EntryPoint] = []
    for distribution in importlib.metadata.distributions():
        try:
            found += distribution.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP)
        except Exception as error:
            path = getattr(distribution, "_path", "an installed package")
            failures.append(
                PluginFailure(str(path), f"its entry points cannot be read ({type(error).__name__}: {error})")
            )
    return found


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


def _patches_of(entry_point: importlib.metadata.EntryPoint, plugin: str) -> list[Patch]:
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
