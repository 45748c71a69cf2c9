"""A copy of a framework's module, edited or under another version, and what ``rlhf-patches check`` says of it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_patches.definitions import registry
from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.definitions.variant import Variant
from rlhf_patches.guards import locating
from rlhf_patches.offline import facts
from rlhf_patches.testing import cases
from rlhf_patches.testing.cases import write_metadata

# Namespace packages: an __init__.py would hide what else is in them.
NAMESPACES = {"megatron"}


def replacing(old: str = "", new: str = "") -> Callable[[str], str]:
    """An edit that puts ``new`` for ``old``, which has to be there."""

    def edit(text: str) -> str:
        assert old in text, f"nothing to edit: no {old!r}"
        return text.replace(old, new) if old else text

    return edit


def doctor_row(
    folder: Path,
    patch: str,
    *,
    version: str | None = None,
    edit: Callable[[str], str] = str,
    source: Path | None = None,
) -> dict[str, Any]:
    """The patch's row for a copy of the installed module that it changes.

    Args:
        folder: empty; the copy and its metadata go there.
        patch: the patch's name.
        version: what the metadata states; None for the installed version.
        edit: makes the copy's text from the original's.
        source: the original, if it is not the installed module.
    """
    definition = _registered(patch)
    (module,) = (_installed(definition) if source is None else definition).modules
    *packages, name = module.split(".")
    place = folder
    for package in packages:
        place = place / package
        place.mkdir()
        if package not in NAMESPACES:
            (place / "__init__.py").touch()
    original = source or Path(str(locating.locate(module).origin))
    (place / f"{name}.py").write_text(edit(original.read_text()))
    distribution = definition.distribution
    write_metadata(folder, distribution, version or importlib.metadata.version(distribution))
    return row_of(folder, patch)


def _installed(definition: KnownBug) -> Variant:
    """The variant of the installed release."""
    number = facts.claimed(definition, importlib.metadata.version(definition.distribution))
    assert number is not None, f"{definition} is not for the installed release"
    return definition.variants[number]


def checked_copy(
    folder: Path, release: Path, patch: str, *, version: str | None = None, edit: Callable[[str], str] = str
) -> dict[str, Any]:
    """What ``rlhf-patches check`` says of a patch for a copy of all modules that it changes.

    Args:
        folder: empty; the copy and its metadata go there.
        release: where the installed release is.
        patch: the patch's name.
        version: what the metadata states; None for no metadata.
        edit: makes each copy's text from the original's.
    """
    definition = _registered(patch)
    for module in definition.modules:
        path = Path(*module.split(".")).with_suffix(".py")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(edit((release / path).read_text()))
    if version is not None:
        write_metadata(folder, definition.distribution, version)
    return row_of(folder, patch)


def row_of(folder: Path, patch: str) -> dict[str, Any]:
    """What ``rlhf-patches check FOLDER`` says of a registered patch."""
    return cases.row_of(folder, _registered(patch)).to_dict()


def _registered(patch: str) -> KnownBug:
    return next(item.patch for item in registry.load()[0] if item.patch.name == patch)
