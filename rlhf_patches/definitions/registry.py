"""Loading of patches from entry points. A plugin that breaks is reported by name and stops no other.

What is built-in is not asked of metadata, which any distribution can write: it is this package's own module, by its
name and its folder, and comes first. Whatever else calls itself rlhf-patches is named by what its entry point leads to.
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
    """As an `importlib.metadata.EntryPoint`, which from Python 3.15 on cannot be made of a value that is malformed."""

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
    """A plugin, or one of its patches, that could not be used: ``plugin`` names it, ``reason`` says why.

    ``partly``: others of its patches are used.
    """

    plugin: str
    reason: str
    partly: bool = False

    def __str__(self) -> str:
        return f"plugin {self.plugin} could not be used{' in full' if self.partly else ''}: {self.reason}"


class _Wrong(Exception):
    """A plugin is not as it has to be; the text is the whole reason."""


class Registered(NamedTuple):
    """A patch or an advice with the distribution that brought it: BUILT_IN, or what that of a plugin calls itself."""

    patch: KnownBug
    plugin: str


def credit(plugin: str) -> str:
    """What to add to a line about a patch: who brings it, where that is not this package."""
    return "" if plugin == BUILT_IN else f" (plugin {plugin})"


def hint(failures: Sequence[PluginFailure]) -> str:
    """What else to say when a patch's name is unknown: it may be in a plugin that did not load."""
    broken = ", ".join(dict.fromkeys(failure.plugin for failure in failures))
    return f" (plugins that could not be used: {broken})" if broken else ""


def load() -> tuple[list[Registered], list[PluginFailure]]:
    """All patches of all plugins, as `listed`, and imported."""
    found, failures = listed()
    registered = []
    for patch, plugin in found:
        try:
            registered.append(Registered(patch.load() if isinstance(patch, Listed) else patch, plugin))
        except no_signal(Exception, SystemExit) as error:
            path = patch.path if isinstance(patch, Listed) else ""
            failures.append(_not_loaded(plugin, patch.name, path, error))
    used = {item.plugin for item in registered}
    return registered, [failure._replace(partly=failure.plugin in used) for failure in failures]


def modules_of(patch: KnownBug) -> list[types.ModuleType]:
    """The modules, as far as imported, that have a patch as a global: its own, and one that lists it."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    return [module for module in modules if any(value is patch for value in list(vars(module).values()))]


def listed() -> tuple[list[tuple[KnownBug | Listed, str]], list[PluginFailure]]:
    """All patches of all plugins that are installed and allowed, built-in ones first, then by distribution name.

    The order decides which of two conflicting patches is applied, so it must be the same on every rank:
    it depends on names only, never on the order of ``sys.path``. Of a plugin that is not allowed nothing is imported.
    What is wrong with one patch of a plugin takes none of its others away.

    Raises:
        SettingsError: RLHF_PATCHES_PLUGINS names what is not installed.
    """
    found: dict[str, tuple[KnownBug | Listed, str]] = {}
    failures: list[PluginFailure] = []
    for plugin, entry_point in _entry_points(failures):

        def complain(reason: str, plugin: str = plugin) -> None:
            failures.append(PluginFailure(plugin, reason))

        try:
            for patch in _patches_of(entry_point, plugin, complain):
                if patch.name not in found:
                    found[patch.name] = patch, plugin
                elif found[patch.name][1] == plugin:
                    complain(
                        f"it has two patches named {patch.name!r}, of which the first is used: give each bug one name "
                        "and one Patch, with a Variant for each shape of its code"
                    )
                else:
                    complain(f"its patch {patch.name!r} is ignored: {found[patch.name][1]} has one of that name")
        # A plugin runs foreign code at import; even its sys.exit() must not end a training run.
        except no_signal(Exception, SystemExit) as error:
            failures.append(_not_loaded(plugin, entry_point.value, entry_point.value, error))
    used = {plugin for _, plugin in found.values()}
    return list(found.values()), [failure._replace(partly=failure.plugin in used) for failure in failures]


def _not_loaded(plugin: str, what: str, path: str, error: BaseException) -> PluginFailure:
    if isinstance(error, _Wrong):
        return PluginFailure(plugin, str(error))
    place = _place_of(error, path.partition(".")[0].partition(":")[0])
    reason = f"loading {what!r} raised {type(error).__name__}: {error}{f' (at {place})' if place else ''}"
    return PluginFailure(plugin, reason + (_not_installed() if plugin == BUILT_IN else ""))


def _place_of(error: BaseException, package: str) -> str:
    """File and line of the code in a plugin's own package that led to an exception; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{error.filename}:{error.lineno}"
    found, step = "", error.__traceback__
    while step is not None:
        if str(step.tb_frame.f_globals.get("__name__")).partition(".")[0] == package:
            found = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return found


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
    except no_signal(Exception):
        return BUILT_IN  # it cannot be imported either, which is said then
    # Within the package in a wheel, beside it in a checkout.
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    ours = (os.path.join(here, "patches"), os.path.join(os.path.dirname(here), "patches"))
    return BUILT_IN if folder in ours else _CALLS_ITSELF.format(folder, BUILT_IN)


def _of_our_group(failures: list[PluginFailure]) -> Iterable[_EntryPoint]:
    """The entry points of others. Not by importlib.metadata.entry_points().

    It parses those of every distribution, of which an image has hundreds, and one malformed file fails it as a whole;
    from Python 3.15 on, one malformed line of any group does.
    """
    if installed.others_bring_patches(sys.path) is False:
        return
    import importlib.metadata  # 25 ms

    for distribution in importlib.metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if installed.ENTRY_POINT_GROUP not in text:
                continue
            found = [_EntryPoint(name, value, distribution) for name, value in _lines_of_our_group(text)]
            others = [entry_point for entry_point in found if entry_point.value != _OWN.value]
            if others and not _is_shadowed(distribution):
                yield from others
        except no_signal(Exception) as error:
            path = getattr(distribution, "_path", "an installed package")
            failures.append(
                PluginFailure(str(path), f"its entry points cannot be read ({type(error).__name__}: {error})")
            )


def _lines_of_our_group(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each, as importlib.metadata reads them."""
    group = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("[") and line.endswith("]"):
            group = line.strip("[]")
        elif group == installed.ENTRY_POINT_GROUP and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def _is_shadowed(distribution: importlib.metadata.Distribution) -> bool:
    """Whether another of this name, which is its folder's, comes before it on the path."""
    import importlib.metadata

    name = getattr(distribution, "_normalized_name", None)
    first = next(iter(importlib.metadata.distributions(name=name)), distribution) if name else distribution
    return getattr(first, "_path", None) != getattr(distribution, "_path", None)


def _called(entry_point: _EntryPoint) -> str:
    """What to call a plugin of another distribution: never what the built-in patches are called."""
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
    """What a plugin brings, one after the other; ``complain`` is told of what is no patch."""
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
    """What an entry point names, a module or an object in one.

    Raises:
        _Wrong: there is no such thing.
    """
    path = getattr(entry_point.dist, "_path", None)
    written = f"its entry point '{entry_point.name} = {entry_point.value}'" + (f" ({path})" if path else "")
    module = entry_point.value.partition(":")[0].strip()
    mend = "expected the module that has the hook, 'your_package.patches' say; correct it and install the plugin again"
    if not all(part.isidentifier() for part in module.split(".")):
        raise _Wrong(f"{written} names no module: {mend}")
    try:
        found = entry_point.load()
    except (ModuleNotFoundError, AttributeError) as error:
        missing = f"{module}.".startswith(f"{error.name}.") if isinstance(error, ModuleNotFoundError) else True
        if not missing or _place_of(error, module.partition(".")[0]):
            raise
        raise _Wrong(f"{written} leads nowhere ({type(error).__name__}: {error}): {mend}") from error
    if isinstance(found, types.FunctionType):
        raise _Wrong(f"{written} names {_called_at(found)}: {mend}")
    return found


def _marked(brings: object) -> list[Any]:
    """The functions of a module that are marked as hooks."""
    from . import hookspecs

    functions = [each for each in getattr(brings, "__dict__", {}).values() if isinstance(each, types.FunctionType)]
    return [each for each in functions if hasattr(each, f"{hookspecs.PROJECT}_impl")]


def _called_at(function: Any) -> str:
    """A function's name, with its file and line where it has any."""
    code = getattr(function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__name__', 'the hook')}(){place}"


def _returned(hook: Callable[[], Any], complain: Callable[[str], None]) -> Iterator[KnownBug | Listed]:
    from .bug import KnownBug

    expected = "expected a list of patches: `return [PATCH]`"
    found = hook()
    if found is None:
        raise _Wrong(f"{_called_at(hook)} returned None, {expected}")
    if isinstance(found, (KnownBug, Listed)):
        raise _Wrong(f"{_called_at(hook)} returned the {found.kind} {found.name} by itself, {expected}")
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
        raise _Wrong(f"{_called_at(hook)} returned an object of type {type(found).__name__}, {expected}")
    for number, patch in enumerate(found, 1):
        if isinstance(patch, (KnownBug, Listed)):
            yield patch
        else:
            complain(
                f"item {number} of what {_called_at(hook)} returned is of type {type(patch).__name__} and is left out: "
                "expected a rlhf_patches.Patch, Advice or Watch"
            )
