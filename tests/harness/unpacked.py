"""Releases beside the environment's own that no session installs: wheels, fetched when a test wants them, unpacked."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from rlhf_patches.offline import download

CACHE = Path(os.environ.get("RLHF_PATCHES_TEST_CACHE", Path(__file__).parents[2] / ".cache" / "rlhf-patches"))


def folders(*releases: str) -> str:
    """What goes first on PYTHONPATH for these, each ``NAME==VERSION``: the wheels alone, not what they depend on."""
    return os.pathsep.join(str(_unpacked(release)) for release in releases)


def _unpacked(release: str) -> Path:
    """The same folder each time, for the bytecode that imports leave in it."""
    place = CACHE / "unpacked" / release
    if not place.is_dir():
        wheel = download.fetch(release, CACHE)
        place.parent.mkdir(parents=True, exist_ok=True)
        incoming = tempfile.mkdtemp(prefix=".incoming-", dir=place.parent)
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(incoming)
            os.rename(incoming, place)
        except OSError:  # another process was faster
            if not place.is_dir():
                raise
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
    return place
