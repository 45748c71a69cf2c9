"""Of a large wheel on an index only what patches read: its directory, its metadata, a few modules.

By HTTP's range requests, so the checksum that the index states, which is that of the whole file, is not compared; zip
has one of each member's own.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from rlhf_patches.offline import index

_SECONDS = 60


def fetch(file: index.File, modules: Iterable[str], folder: Path) -> Path:
    """A wheel with what tells these modules of one on an index, and no more, in ``folder``, unless it is there already.

    Raises:
        OSError, zipfile.BadZipFile: it could not be fetched.
    """
    from remotezip import RemoteZip  # of the survey's own environment (tests/environments/survey.txt)

    wanted = {module.replace(".", "/") for module in modules}
    wanted |= {f"{path}/__init__" for path in wanted} | {f"{path.partition('/')[0]}/__init__" for path in wanted}
    key = repr((file.filename, file.hashes.get("sha256"), sorted(wanted)))
    folder = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    if (folder / file.filename).exists():
        return folder / file.filename

    def made(incoming: Path) -> Path:
        place = incoming / file.filename
        with RemoteZip(file.url, timeout=_SECONDS) as whole, zipfile.ZipFile(place, "x", zipfile.ZIP_DEFLATED) as part:
            for name in whole.namelist():
                if _module(name) in wanted or name.endswith(".dist-info/METADATA"):
                    # Of an extension, which hides the text beside it, that it is there.
                    text = name.endswith((".py", "METADATA"))
                    part.writestr(name, whole.read(name) if text else b"")
        return place

    return index.put(folder, made)


def _module(name: str) -> str:
    """What a member may be the module of, as a path."""
    folder, _, file = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name).rpartition("/")
    return f"{folder}/{file.partition('.')[0]}".removeprefix("/")
