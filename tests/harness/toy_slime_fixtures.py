"""The make-believe slime as a checkout and as wheels, of a release that is affected."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.harness import toy_slime
from tests.harness.look_alikes import write_metadata
from tests.harness.toy_slime import DEFECT, MODEL, TRAIN


def make_refused(folder: Path) -> None:
    """Let the checkout be of an affected version, and its code another than is recognized."""
    model = folder / MODEL
    model.write_text(model.read_text().replace(DEFECT, "not config.no_sync_func"))
    write_metadata(folder, "slime", "0.1.0")


def repaired(text: str) -> str:
    """The module without the defect."""
    return text.replace(DEFECT, "True")


def unpacked(wheel: str, folder: Path) -> str:
    """A wheel's files in a folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return str(folder)


def as_sdist(wheel: str, path: Path) -> str:
    """The same files and metadata as an sdist."""
    folder = unpacked(wheel, path.with_suffix(".unpacked"))
    (metadata,) = Path(folder).glob("*.dist-info/METADATA")
    (Path(folder) / "PKG-INFO").write_bytes(metadata.read_bytes())
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "slime-0.1.0")
    return str(path)


def make_other(folder: Path) -> str:
    """A wheel of something that no patch is for."""
    path = folder / "other-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other-1.dist-info/METADATA", "Name: other\nVersion: 1\n")
    return str(path)


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
