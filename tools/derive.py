"""Write what follows from the patches and would otherwise be kept by hand: ``python tools/derive.py`` (``make docs``).

- ``patches/catalogue.py``: the list of patches, so that a process imports those whose framework is there;
- ``WATCHED`` in ``rlhf_patches/site_hook.py``: the packages that they patch;
- ``site_hook/``: the ``.pth`` file, which names those packages once more, and the same for PEP 829;
- ``docs/patches``: their pages;
- ``rlhf_patches/offline/releases.json``, from the record of releases: which of them fixes what.

tests/engine/definitions/test_derived.py compares.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf_patches import autoload, site_hook
from rlhf_patches.definitions import pages
from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.definitions.listed import Listed, ListedVariant
from rlhf_patches.proving import lookup

ROOT = Path(__file__).parents[1]
_HEAD = '''\
"""Every built-in patch and advice. Written by tools/derive.py (``make docs``); a test compares."""

from __future__ import annotations

# fmt: off
# ruff: noqa: E501, Q
from rlhf_patches import Listed, ListedCoInstalled, ListedVariant'''
_NAME = re.compile(r"(PATCH|ADVICE|WATCH)(_[A-Z0-9_]+)?")
_WATCHED = re.compile(r"^WATCHED = \(.*?\)$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Write all of it, each from what was written before."""
    (ROOT / "patches" / "catalogue.py").write_text(catalogue(paths(ROOT / "patches")), encoding="utf-8")
    from rlhf_patches.patches import plugin

    patches = plugin.rlhf_patches()
    hook = ROOT / "rlhf_patches" / "site_hook.py"
    hook.write_text(with_watched(hook.read_text(encoding="utf-8"), watched(patches)), encoding="utf-8")
    site_hook.WATCHED = watched(patches)
    for name, text in hook_files().items():
        (ROOT / "site_hook" / name).write_text(text, encoding="utf-8")
    pages.write(patches, ROOT / "docs" / "patches", lookup.how_to_prove)
    sys.path.insert(0, str(ROOT / "release_record"))
    import record
    import shipped

    shipped.PATH.write_text(shipped.text(record.load_all(), patches), encoding="utf-8")


def hook_files() -> dict[str, str]:
    """What a wheel puts beside the package."""
    line = autoload.line("0")
    return {
        "rlhf_patches.pth": line,
        "rlhf_patches.start": autoload.start("rlhf_patches_start"),
        "rlhf_patches_start.py": autoload.module(line),
    }


def paths(folder: Path) -> list[str]:
    """Every patch, as ``module:NAME`` relative to the package of patches, sorted by module.

    A patch is what a module calls ``PATCH`` or ``PATCH_SOMETHING`` at its top level, and an advice ``ADVICE``, a
    watch ``WATCH``, in the same way. Nothing is imported.
    """
    return [
        f"{'.'.join(file.relative_to(folder).with_suffix('').parts)}:{name}"
        for file in sorted(folder.glob("*/*.py"))
        for name in _names(ast.parse(file.read_text(encoding="utf-8")))
    ]


def _names(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.Assign):
            yield from (item.id for item in node.targets if isinstance(item, ast.Name) and _NAME.fullmatch(item.id))


def catalogue(found: Iterable[str]) -> str:
    """The text of ``patches/catalogue.py``."""
    return f"{_HEAD}\n\nLISTED = (\n{''.join(map(_entry, found))})\n"


def _entry(path: str) -> str:
    path = f"rlhf_patches.patches.{path}"
    module, _, name = path.partition(":")
    listed: Listed = getattr(importlib.import_module(module), name).listed(path)
    variants = "".join(f"        {_literal(variant)},\n" for variant in listed.variants)
    more = f", {listed.contested!r}" if listed.contested else ""
    more += ", watches=True" * listed.watches
    return f"    Listed({listed.name!r}, {path!r}, (\n{variants}    ){more}),\n"


def _literal(variant: ListedVariant) -> str:
    """What makes it, without what is as by default."""
    values, defaults = variant._asdict(), variant._field_defaults
    fields = {name: value for name, value in values.items() if value != defaults.get(name, ...)}
    return f"ListedVariant({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def watched(patches: Iterable[KnownBug]) -> tuple[str, ...]:
    """What the site hook waits for: torch, and every package that a patch changes."""
    return "torch", *sorted({module.partition(".")[0] for patch in patches for module in patch.modules} - {"torch"})


def with_watched(text: str, names: tuple[str, ...]) -> str:
    """The text of the site hook with these names."""
    listed = ", ".join(f'"{name}"' for name in names)
    line = f"WATCHED = ({listed})"
    if len(line) > 120:  # as ruff breaks it
        line = "WATCHED = (\n" + "".join(f'    "{name}",\n' for name in names) + ")"
    changed, times = _WATCHED.subn(line, text)
    if times != 1:
        raise SystemExit(f"rlhf_patches/site_hook.py: WATCHED = (...) stands there {times} times, expected once")
    return changed


if __name__ == "__main__":
    main()
