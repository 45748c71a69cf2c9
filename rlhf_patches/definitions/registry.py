"""Loads patches from entry points. A plugin that fails is reported by name and does not affect the others.

The built-in patches do not come from metadata, which any distribution can write: they are this package's own module,
identified by name and folder, and come first. Any other distribution named rlhf-patches is named by its entry point.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import installed, settings
from ..import_system import no_signal
from .listed import Listed

if TYPE_CHECKING:
    import importlib.metadata

    from .bug import KnownBug

BUILT_IN = "rlhf-patches"
_CALLS_ITSELF = "{} (calls itself {})"
_VALID_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"


class _EntryPoint(NamedTuple):
    """Like `importlib.metadata.EntryPoint`, which from Python 3.15 on rejects a malformed value."""

    name: str
    value: str
    dist: importlib.metadata.Distribution | None = None

    def load(self) -> Any:
        if self.dist is None:  # our own
            return importlib.import_module(self.value)
        from importlib.metadata import EntryPoint

        return EntryPoint(self.name, self.value, installed.ENTRY_POINT_GROUP).load()


_OWN = _EntryPoint("built-in", installed.OWN_ENTRY_POINT)


class PluginFailure(NamedTuple):
    """A plugin, or one of its patches, that could not be used: the ``plugin``'s name and the ``reason``.

    ``partly``: its other patches are used.
    """

    plugin: str
    reason: str
    partly: bool = False

    def __str__(self) -> str:
        return f"plugin {self.plugin} could not be used{' in full' if self.partly else ''}: {self.reason}"


class _Wrong(Exception):
    """A plugin is invalid; the text is the whole reason."""


class Registered(NamedTuple):
    """A patch or an advice with the distribution that provides it: BUILT_IN, or the plugin's name."""

    patch: KnownBug
    plugin: str


def credit(plugin: str) -> str:
    """Return the plugin's name to add to a line about a patch; empty for built-in patches."""
    return "" if plugin == BUILT_IN else f" (plugin {plugin})"


def hint(failures: Sequence[PluginFailure]) -> str:
    """Return a hint for an unknown patch name: the plugins that did not load, which may define it."""
    broken = ", ".join(dict.fromkeys(failure.plugin for failure in failures))
    return f" (plugins that could not be used: {broken})" if broken else ""


def load() -> tuple[list[Registered], list[PluginFailure]]:
    """Return all patches of all plugins, as `listed` does, and import them."""
    patches, failures = listed()
    registered = []
    for patch, plugin in patches:
        try:
            registered.append(Registered(patch.load() if isinstance(patch, Listed) else patch, plugin))
        except no_signal(Exception, SystemExit) as error:
            path = patch.path if isinstance(patch, Listed) else ""
            failures.append(_not_loaded(plugin, patch.name, path, error))
    used = {item.plugin for item in registered}
    return registered, [failure._replace(partly=failure.plugin in used) for failure in failures]


def modules_of(patch: KnownBug) -> list[types.ModuleType]:
    """Return the imported modules that have a patch as a global: its own, and one that lists it."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    # Identity, without code of the globals' classes, over the thousands of modules that frameworks import.
    return [module for module in modules if id(patch) in map(id, list(vars(module).values()))]


def listed() -> tuple[list[tuple[KnownBug | Listed, str]], list[PluginFailure]]:
    """Return all patches of all installed and allowed plugins, built-in ones first, then by distribution name.

    The order decides which of two conflicting patches is applied, so it must be the same on every rank:
    it depends on names only, never on the order of ``sys.path``. A plugin that is not allowed is not imported.
    An invalid patch of a plugin does not affect its other patches.

    Raises:
        SettingsError: RLHF_PATCHES_PLUGINS names a plugin that is not installed.
    """
    by_name: dict[str, tuple[KnownBug | Listed, str]] = {}
    failures: list[PluginFailure] = []
    for plugin, entry_point in _entry_points(failures):

        def complain(reason: str, plugin: str = plugin) -> None:
            failures.append(PluginFailure(plugin, reason))

        try:
            for patch in _patches_of(entry_point, plugin, complain):
                if patch.name not in by_name:
                    by_name[patch.name] = patch, plugin
                elif by_name[patch.name][1] == plugin:
                    complain(
                        f"it has two patches named {patch.name!r}; the first is used: give each bug one name "
                        "and one Patch, with a Variant for each shape of its code"
                    )
                else:
                    complain(f"its patch {patch.name!r} is ignored: {by_name[patch.name][1]} has a patch of that name")
        # A plugin runs foreign code at import; even its sys.exit() must not end a training run.
        except no_signal(Exception, SystemExit) as error:
            failures.append(_not_loaded(plugin, entry_point.value, entry_point.value, error))
    used = {plugin for _, plugin in by_name.values()}
    return list(by_name.values()), [failure._replace(partly=failure.plugin in used) for failure in failures]


def _not_loaded(plugin: str, what: str, path: str, error: BaseException) -> PluginFailure:
    if isinstance(error, _Wrong):
        return PluginFailure(plugin, str(error))
    place = _place_of(error, path.partition(".")[0].partition(":")[0])
    reason = f"loading {what!r} raised {type(error).__name__}: {error}{f' (at {place})' if place else ''}"
    return PluginFailure(plugin, reason + (_not_installed() if plugin == BUILT_IN else ""))


def _place_of(error: BaseException, package: str) -> str:
    """Return file and line of the code in a plugin's own package that led to an exception; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{error.filename}:{error.lineno}"
    place, step = "", error.__traceback__
    while step is not None:
        if str(step.tb_frame.f_globals.get("__name__")).partition(".")[0] == package:
            place = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return place


def _entry_points(failures: list[PluginFailure]) -> list[tuple[str, _EntryPoint]]:
    entry_points: dict[tuple[str, str, str], _EntryPoint] = {(_own_name(), _OWN.name, _OWN.value): _OWN}
    for entry_point in _of_our_group(failures):
        # The same distribution can be listed twice (two metadata folders, a path twice on sys.path).
        entry_points.setdefault((_called(entry_point), entry_point.name, entry_point.value), entry_point)
    allowed = settings.plugins({key[0] for key in entry_points} | {BUILT_IN}) | {BUILT_IN}
    order = sorted(entry_points, key=lambda key: (key[0] != BUILT_IN, key))
    return [(key[0], entry_points[key]) for key in order if key[0] in allowed]


def _not_installed() -> str:
    """Return the end of an error if this package is a checkout, which does not contain the patches."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    if not os.path.exists(os.path.join(root, "patches", "plugin.py")):
        return ""
    return f". {root} is a checkout on sys.path (PYTHONPATH, or the working directory): `pip install {root}`"


def _own_name() -> str:
    """Return the name of the module of the built-in patches; another name if a finder leads to another folder."""
    try:
        spec = importlib.util.find_spec(_OWN.value.rpartition(".")[0])
        folder = os.path.realpath(spec.submodule_search_locations[0])  # type: ignore[union-attr, index]
    except no_signal(Exception):
        return BUILT_IN  # its import fails too, and that is reported
    # In the package in a wheel, next to it in a checkout.
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    ours = (os.path.join(here, "patches"), os.path.join(os.path.dirname(here), "patches"))
    return BUILT_IN if folder in ours else _CALLS_ITSELF.format(folder, BUILT_IN)


def _of_our_group(failures: list[PluginFailure]) -> Iterable[_EntryPoint]:
    """Yield the entry points of other distributions, without importlib.metadata.entry_points().

    That function parses every distribution, of which an image has hundreds, and fails if one file is malformed; from
    Python 3.15 on, also if one line of any group is malformed.
    """
    if installed.others_bring_patches(sys.path) is False:
        return
    import importlib.metadata  # 25 ms

    for distribution in importlib.metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if installed.ENTRY_POINT_GROUP not in text:
                continue
            ours = [_EntryPoint(name, value, distribution) for name, value in _lines_of_our_group(text)]
            others = [entry_point for entry_point in ours if entry_point.value != _OWN.value]
            if others and not _is_shadowed(distribution):
                yield from others
        except no_signal(Exception) as error:
            path = getattr(distribution, "_path", "an installed package")
            failures.append(
                PluginFailure(str(path), f"its entry points cannot be read ({type(error).__name__}: {error})")
            )


def _lines_of_our_group(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and value of each entry point, as importlib.metadata reads them."""
    group = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("[") and line.endswith("]"):
            group = line.strip("[]")
        elif group == installed.ENTRY_POINT_GROUP and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def _is_shadowed(distribution: importlib.metadata.Distribution) -> bool:
    """Whether another distribution of this name comes before it on the path."""
    import importlib.metadata

    name = getattr(distribution, "_normalized_name", None)
    first = next(iter(importlib.metadata.distributions(name=name)), distribution) if name else distribution
    return getattr(first, "_path", None) != getattr(distribution, "_path", None)


def _called(entry_point: _EntryPoint) -> str:
    """Return the name of another distribution's plugin, never the name of the built-in patches."""
    name = _distribution(entry_point)
    if not re.fullmatch(_VALID_NAME, name):
        name = ascii(name)  # letters that look like others, or none that can be seen
    return _CALLS_ITSELF.format(entry_point.value, name) if settings.canonical(name) == BUILT_IN else name


def _distribution(entry_point: _EntryPoint) -> str:
    # A half removed distribution has entry points and no name: None or an exception, depending on the Python.
    try:
        name = entry_point.dist.metadata["Name"] if entry_point.dist and "Name" in entry_point.dist.metadata else None
    except no_signal(Exception):
        name = None
    return name or entry_point.name


def _patches_of(entry_point: _EntryPoint, plugin: str, complain: Callable[[str], None]) -> Iterator[KnownBug | Listed]:
    """Yield a plugin's patches; ``complain`` is called for each item that is not a patch."""
    if plugin == BUILT_IN:
        yield from entry_point.load().listed()
        return
    import pluggy  # and inspect: only where there is a plugin

    from . import hookspecs

    brings = _led_to(entry_point)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(brings, name=plugin)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        places = "; ".join(map(_called_at, _marked(brings)))
        raise _Wrong(
            f"{places} is not as expected, a function rlhf_patches() without arguments: {' '.join(str(error).split())}"
        ) from error
    hooks = manager.hook.rlhf_patches.get_hookimpls()
    if not hooks:
        where = getattr(brings, "__file__", None) or entry_point.value
        raise _Wrong(
            "no hook implementation: expected a function rlhf_patches() marked with "
            f"@{hookspecs.PROJECT}.hookimpl in {where}"
        )
    for hook in hooks:
        yield from _returned(hook.function, complain)


def _led_to(entry_point: _EntryPoint) -> Any:
    """Return the module or object that an entry point names.

    Raises:
        _Wrong: it does not exist.
    """
    path = getattr(entry_point.dist, "_path", None)
    written = f"its entry point '{entry_point.name} = {entry_point.value}'" + (f" ({path})" if path else "")
    module = entry_point.value.partition(":")[0].strip()
    mend = "expected the module with the hook, such as 'your_package.patches'; correct it and install the plugin again"
    if not all(part.isidentifier() for part in module.split(".")):
        raise _Wrong(f"{written} does not name a module: {mend}")
    try:
        target = entry_point.load()
    except (ModuleNotFoundError, AttributeError) as error:
        missing = f"{module}.".startswith(f"{error.name}.") if isinstance(error, ModuleNotFoundError) else True
        if not missing or _place_of(error, module.partition(".")[0]):
            raise
        raise _Wrong(f"{written} does not exist ({type(error).__name__}: {error}): {mend}") from error
    if isinstance(target, types.FunctionType):
        raise _Wrong(f"{written} names the function {_called_at(target)}: {mend}")
    return target


def _marked(brings: object) -> list[Any]:
    """Return the functions of a module that are marked as hooks."""
    from . import hookspecs

    functions = [each for each in getattr(brings, "__dict__", {}).values() if isinstance(each, types.FunctionType)]
    return [each for each in functions if hasattr(each, f"{hookspecs.PROJECT}_impl")]


def _called_at(function: Any) -> str:
    """Return a function's name, with its file and line if it has any."""
    code = getattr(function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__name__', 'the hook')}(){place}"


def _returned(hook: Callable[[], Any], complain: Callable[[str], None]) -> Iterator[KnownBug | Listed]:
    from .bug import KnownBug

    expected = "expected a list of patches: `return [PATCH]`"
    patches = hook()
    if patches is None:
        raise _Wrong(f"{_called_at(hook)} returned None, {expected}")
    if isinstance(patches, (KnownBug, Listed)):
        raise _Wrong(f"{_called_at(hook)} returned the {patches.kind} {patches.name}, {expected}")
    if isinstance(patches, (str, bytes, Mapping)) or not isinstance(patches, Iterable):
        raise _Wrong(f"{_called_at(hook)} returned an object of type {type(patches).__name__}, {expected}")
    for number, patch in enumerate(patches, 1):
        if isinstance(patch, (KnownBug, Listed)):
            yield patch
        else:
            complain(
                f"item {number} of what {_called_at(hook)} returned is of type {type(patch).__name__} and is left out: "
                "expected a rlhf_patches.Patch, Advice or Watch"
            )
