"""The make-believe slime as a checkout and as wheels, of a release that is affected."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.harness import toy_slime
from tests.harness.look_alikes import write_metadata
from tests.harness.toy_slime import DEFECT, MODEL, TRAIN


def make_refused(folder: Path) -> None:
    """Let the checkout be of an affected version, and its code another than is recognised."""
    model = folder / MODEL
    model.write_text(model.read_text().replace(DEFECT, "not config.no_sync_func"))
    write_metadata(folder, "slime", "0.1.0")


@pytest.fixture
def slime(tmp_path: Path) -> Path:
    """The checkout."""
    return toy_slime.write(tmp_path)


@pytest.fixture
def slime_wheel(tmp_path: Path) -> Callable[..., str]:
    """Makes wheels of it."""

    def make(
        version: str = "0.1.0",
        change: Callable[[str], str] = str,
        more: Mapping[str, str | bytes] | None = None,
        tag: str = "py3-none-any",
        folder: str = "wheels",
    ) -> str:
        path = tmp_path / folder / f"slime-{version}-{tag}.whl"
        path.parent.mkdir(exist_ok=True)
        files = {
            f"slime-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: slime\nVersion: {version}\n",
            f"slime-{version}.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
            f"slime-{version}.dist-info/RECORD": "",
            "slime/__init__.py": "",
            MODEL: change(TRAIN),
            **(more or {}),
        }
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return str(path)

    return make
