"""Locates a module's file without importing anything, and reads its text."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..import_system import no_signal
from .memory import remembered
from .places import NotFound, Source, Unreadable


def locate(module: str) -> ModuleSpec:
    """Return the spec of a module; nothing is imported, not even a parent package.

    Raises:
        NotFound: there is no such module.
    """
    spec = spec_of(sys.modules.get(module))
    if spec is not None:
        return spec
    path: list[str] | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        located = remembered(("found", name, *(path or ())), functools.partial(_find, name, path), small=True)
        if located is None:
            raise NotFound(f"there is no module {name}")
        spec, path = located
        if path is None and name != module:
            raise NotFound(f"there is no module {module}: {name} is not a package")
    assert spec is not None
    return spec


def exists(module: str) -> bool:
    """Whether `locate` can locate a module."""
    try:
        locate(module)
    except NotFound:
        return False
    return True


def parents_of(module: str) -> list[str]:
    """Return the file of the nearest parent package of a missing module, or the folders of a namespace package.

    Empty if there is no parent package.
    """
    while module := module.rpartition(".")[0]:
        with contextlib.suppress(NotFound):
            spec = locate(module)
            return [spec.origin] if spec.has_location and spec.origin else [*(spec.submodule_search_locations or ())]
    return []


def real_path(path: str) -> str:
    """Return `os.path.realpath`; the folders, which most files share and which take most time, are remembered."""
    folder, name = os.path.split(path)
    if name in ("", os.curdir, os.pardir) or os.path.islink(path):
        return os.path.realpath(path)
    return os.path.join(remembered(("real", folder), functools.partial(real_path, folder), small=True), name)


def namespace_of(module: object) -> dict[str, Any]:
    """Return a module's own names without attribute access, which loads a lazy module and may raise."""
    try:
        return object.__getattribute__(module, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:  # anything can be put into sys.modules
        return {}


def spec_of(module: object) -> ModuleSpec | None:
    """Return ``module.__spec__`` without attribute access; None if there is none."""
    return namespace_of(module).get("__spec__")


def _find(name: str, path: list[str] | None) -> tuple[ModuleSpec, list[str] | None] | None:
    loaded = sys.modules.get(name)
    spec = spec_of(loaded)
    if spec is not None:
        return spec, list(namespace_of(loaded).get("__path__") or ()) or None
    # PathFinder cannot search a namespace package whose parent is not imported; a walk over the path entries can.
    portions: list[str] = []
    for entry in path if path is not None else sys.path:
        try:
            finder = pkgutil.get_importer(entry or os.getcwd())
            spec = finder.find_spec(name) if finder is not None else None
        except no_signal(ImportError, OSError):
            continue
        if spec is None:
            continue
        if spec.loader is not None:
            return spec, list(spec.submodule_search_locations or ()) or None
        portions.extend(spec.submodule_search_locations or ())
    # Editable installs add their own finders. Only classes and modules are queried: ours and wrapt's are instances,
    # and wrapt's imports the parent package.
    for meta_finder in sys.meta_path:
        if meta_finder is importlib.machinery.PathFinder or not isinstance(meta_finder, (type, ModuleType)):
            continue
        try:
            spec = meta_finder.find_spec(name, path)
        except no_signal(Exception):
            continue
        if spec is not None:
            return spec, list(spec.submodule_search_locations or ()) or None
    if portions:
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = portions
        return namespace, portions
    return None


def read(spec: ModuleSpec) -> Source:
    """Return the source text of a spec.

    Raises:
        Unreadable: there is no source (bytecode only, an extension module), or it cannot be decoded.
    """
    return remembered(("text", spec.name, spec.origin), lambda: _read(spec), small=True)


def read_module(module: str) -> Source:
    """Return the source text of a module that need not be imported.

    Raises:
        NotFound, Unreadable: see `locate` and `read`.
    """
    return read(locate(module))


def _read(spec: ModuleSpec) -> Source:
    origin, loader = spec.origin, spec.loader
    if origin is None or not spec.has_location:
        raise Unreadable(f"module {spec.name} has no source file")
    if origin.endswith((".pyc", ".so", ".pyd")):
        kind = "bytecode" if origin.endswith(".pyc") else "a compiled extension"
        raise Unreadable(f"module {spec.name} is installed as {kind} only ({origin})")
    try:
        if loader is not None and hasattr(loader, "get_data"):
            data = loader.get_data(origin)
        else:
            with open(origin, "rb") as file:
                data = file.read()
        return Source(spec.name, origin, importlib.util.decode_source(data))
    except no_signal(OSError, SyntaxError, UnicodeError, LookupError) as error:  # LookupError: not a text codec
        raise Unreadable(f"the source of {spec.name} cannot be read: {error} ({origin})") from error
