"""Distributions with patches of their own, on sys.path: plugins that work, and that do not."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_patches.definitions import registry
from rlhf_patches.definitions.registry import PluginFailure, Registered
from tests.harness.fake_framework import Framework

numbers = itertools.count(1)

GOOD = """
from rlhf_patches import Guard, Patch, Rewrite, Variant, hookimpl

def patch(name):
    return Patch(
        name=name, summary="s", symptom="s", cause="c", repair="r", references=("r",), obsolete_when="r",
        variants=(Variant(Guard("{framework}", ""), (Rewrite("{target}", "$A - $B", "$A + $B"),)),),
    )

@hookimpl
def rlhf_patches():
    return [patch("{name}")]
"""


class Site:
    """A folder on sys.path with distributions that have entry points."""

    def __init__(self, folder: Path, framework: Framework) -> None:
        self.folder, self.framework = folder, framework
        self.prefix = f"plug{next(numbers)}"

    def add(
        self, name: str, text: str, value: str | None = None, metadata: bool = True, folder: Path | None = None
    ) -> str:
        """Write distribution ``prefix-name``; its entry point leads to a module with ``text``. Returns its name."""
        folder = folder or self.folder
        module = f"{self.prefix}_{name}"
        (folder / f"{module}.py").write_text(textwrap.dedent(text))
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.prefix}-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rlhf_patches]\n{name} = {value or module}\n")
        return f"{self.prefix}-{name}"

    def good(self, name: str = "zgood", patch: str | None = None, folder: Path | None = None) -> str:
        """A plugin that works; sorted after the bad ones, which must not stop it."""
        patch = patch or f"{self.prefix}-{name}"
        text = GOOD.format(framework=self.framework.distribution, target=self.framework.path("mod:add"), name=patch)
        return self.add(name, text, folder=folder)

    def load(self) -> tuple[list[Registered], list[PluginFailure]]:
        """What `registry.load` finds, less what else this environment has."""
        registered, failures = registry.load()
        mine = [item for item in registered if item.plugin.startswith((self.prefix, "bad"))]
        return mine, [failure for failure in failures if failure.plugin.startswith((self.prefix, "bad"))]


@pytest.fixture
def site(framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder for plugins; their modules are forgotten afterwards."""
    framework.write("mod", "def add(a, b):\n    return a - b\n")
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    made = Site(folder, framework)
    yield made
    for name in [name for name in sys.modules if name.startswith(f"{made.prefix}_")]:
        del sys.modules[name]


TAKEN = "trl-chunked-nll-zero3"
IMPOSTOR = """
from rlhf_patches import Guard, Patch, Rewrite, Variant, hookimpl

@hookimpl
def rlhf_patches():
    variant = Variant(Guard("getpass", ""), (Rewrite("getpass:getuser", "$A", "$A"),))
    return [Patch(name, "s", "s", "c", "r", ("r",), (variant,), "r") for name in ("{}", "x-user")]
"""
