"""Loading of patches from entry points. A plugin that breaks is reported by name and stops nobody else."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pluggy

from . import hookspecs
from .vocabulary import Patch

BUILT_IN = "rlhf-patches"


@dataclass(frozen=True)
class PluginFailure:
    """A plugin, or one of its patches, that could not be used: ``plugin`` names it, ``reason`` says why."""

    plugin: str
    reason: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} could not be used: {self.reason}"


@dataclass(frozen=True)
class Registered:
    """A patch together with the distribution that brought it."""

    patch: Patch
    plugin: str


def hint(failures: Sequence[PluginFailure]) -> str:
    """What else to say when a patch's name is unknown: it may be in a plugin that did not load."""
    broken = ", ".join(failure.plugin for failure in failures)
    return f" (plugins that could not be used: {broken})" if broken else ""


def load() -> tuple[list[Registered], list[PluginFailure]]:
    """All patches of all installed plugins, built-in ones first, then by distribution name.

    The order decides which of two conflicting patches is applied, so it must be the same on every rank:
    it depends on names only, never on the order of ``sys.path``.
    """
    registered: dict[str, Registered] = {}
    failures: list[PluginFailure] = []
    for plugin, entry_point in _entry_points(failures):
        try:
            patches = _patches_of(entry_point, plugin)
        # A plugin runs foreign code at import; even its sys.exit() must not end a training run.
        except (Exception, SystemExit) as error:
            failures.append(
                PluginFailure(plugin, f"loading {entry_point.value!r} raised {type(error).__name__}: {error}")
            )
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
    # The same distribution can be listed twice (two metadata folders, a path twice on sys.path).
    found: dict[tuple[str, str, str], importlib.metadata.EntryPoint] = {}
    for entry_point in _of_our_group(failures):
        found.setdefault((_distribution(entry_point), entry_point.name, entry_point.value), entry_point)
    order = sorted(found, key=lambda key: (key[0] != BUILT_IN, key))
    return [(key[0], found[key]) for key in order]


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
