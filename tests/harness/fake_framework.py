"""A make-believe framework on disk, with metadata, for tests of the engine alone.

The engine's tests need no real framework: what they patch is what they write.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_patches import Advice, Guard, Patch, Shape, Variant, Watch, Wrap
from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.definitions.changes import Change
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.engine import log
from rlhf_patches.engine.engine import Engine

_numbers = itertools.count(1)


class Framework:
    """A package in a site-packages-like folder of its own. ``name`` is unique, so no test meets another's modules."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.name = f"framework{next(_numbers)}"
        self.distribution = f"dist-{self.name}"

    def write(self, module: str, text: str) -> Path:
        """Write module ``module`` (dotted, below the package; "" for the package itself)."""
        package = self.site / self.name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        if not module:
            file = package / "__init__.py"
        else:
            *parents, last = module.split(".")
            for parent in parents:
                package = package / parent
                package.mkdir(exist_ok=True)
                (package / "__init__.py").touch()
            file = package / f"{last}.py"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        importlib.invalidate_caches()
        return file

    def metadata(self, version: str | None, folder: str | None = None) -> Path:
        """Write metadata of the distribution; ``version`` None leaves the field out."""
        path = self.site / (folder or f"{self.distribution.replace('-', '_')}-{version}.dist-info")
        path.mkdir(exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {self.distribution}"] + ([f"Version: {version}"] if version else [])
        (path / "METADATA").write_text("\n".join(lines) + "\n")
        importlib.invalidate_caches()
        return path

    def load(self, module: str = "mod") -> ModuleType:
        """Import a module of the package."""
        return importlib.import_module(f"{self.name}.{module}" if module else self.name)

    def path(self, target: str) -> str:
        """``mod:f`` as a full target."""
        return f"{self.name}.{target}"

    def patch(self, *changes: Change, name: str | None = None, versions: str = "") -> Patch:
        """A patch of this framework."""
        return Patch(repair="a fix", **self._of_any(changes, name, versions))

    def advice(self, *shapes: Shape, name: str | None = None, versions: str = "") -> Advice:
        """An advice about this framework."""
        return Advice(what_to_do="Do\nsomething else. ", **self._of_any(shapes, name, versions))

    def watch(self, *wraps: Wrap, name: str | None = None, versions: str = "", **fields: Any) -> Watch:
        """A watch of this framework."""
        defaults = {
            "looks_at": "a call",
            "limits": "none",
            "points_to": (),
            "observations": self.path("fixes:observed"),
        }
        return Watch(**{**defaults, **self._of_any(wraps, name, versions), **fields})

    def _of_any(self, changes: tuple[Change, ...], name: str | None, versions: str) -> dict[str, Any]:
        return {
            "name": name or f"{self.name}-bug",
            "summary": "a bug",
            "symptom": "it breaks",
            "cause": "a mistake",
            "references": ("https://example.invalid/1",),
            "variants": (Variant(Guard(self.distribution, versions), changes),),
            "obsolete_when": "never",
        }


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a new process to the log, which says each thing once and warns once."""
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setattr(log, "_warned", False)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of refusals are wanted here; their warnings would bury a real failure's report."""
    monkeypatch.setattr(logging.getLogger("rlhf_patches"), "disabled", True)


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Framework]:
    """A fresh make-believe framework, version 1.0, whose modules are forgotten afterwards."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    made = Framework(site)
    made.metadata("1.0")
    yield made
    for module in [name for name in sys.modules if name.partition(".")[0] == made.name]:
        del sys.modules[module]
    # Or every invalidate_caches() goes through the folders of all tests before it.
    for path in [path for path in sys.path_importer_cache if path.startswith(str(tmp_path))]:
        del sys.path_importer_cache[path]


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines that know the given patches only; each is reverted afterwards."""
    made: list[Engine] = []

    def make(*patches: KnownBug) -> Engine:
        made.append(Engine(load=lambda: ([Registered(patch, "tests") for patch in patches], [])))
        return made[-1]

    yield make
    for one in made:
        one.revert()
