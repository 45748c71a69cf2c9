"""A copy of a framework's module, edited or under another version, and what ``rlhf-patches doctor`` says of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_patches import plugins, sources

# Namespace packages: an __init__.py would hide what else is in them.
NAMESPACES = {"megatron"}


def write_metadata(folder: Path, distribution: str, version: str) -> None:
    """Let a folder on sys.path claim to hold a distribution."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


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
    definition = next(item.patch for item in plugins.load()[0] if item.patch.name == patch)
    (module,) = definition.modules
    *packages, name = module.split(".")
    place = folder
    for package in packages:
        place = place / package
        place.mkdir()
        if package not in NAMESPACES:
            (place / "__init__.py").touch()
    original = source or Path(str(sources.locate(module).origin))
    (place / f"{name}.py").write_text(edit(original.read_text()))
    distribution = definition.guard.distribution
    write_metadata(folder, distribution, version or importlib.metadata.version(distribution))
    command = [sys.executable, "-m", "rlhf_patches.cli", "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    return next(row for row in json.loads(done.stdout) if row["name"] == patch)


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
    definition = next(item.patch for item in plugins.load()[0] if item.patch.name == patch)
    for module in definition.modules:
        path = Path(*module.split(".")).with_suffix(".py")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(edit((release / path).read_text()))
    if version is not None:
        distribution = definition.guard.distribution
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    command = [sys.executable, "-m", "rlhf_patches.cli", "check", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return next(row for row in json.loads(done.stdout) if row["name"] == patch)
