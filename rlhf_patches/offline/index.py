"""The releases of a distribution on a package index, and their files, by pypi-simple.

pip, which `download` runs, tells neither which releases are withdrawn nor where there is an sdist alone, runs code from
an sdist to fetch it, and takes a second for each file. pypi-simple is no dependency of this package: only who writes
patches needs it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import InvalidVersion, Version

from . import download

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

PYPI = "https://pypi.org/simple/"
_SECONDS = 60
"""Until an index or a file has to say something."""


class IndexProblem(RuntimeError):
    """An index could not be asked, or a file not be fetched; the message says why and what to do."""


class Published(NamedTuple):
    """A release.

    Attributes:
        version: its version.
        file: a wheel, or an sdist where there is none; None where there is neither.
        yanked: why it has been withdrawn, None where it has not.
    """

    version: Version
    file: DistributionPackage | None
    yanked: str | None = None


class Index:
    """One index; a context manager that keeps a connection.

    Raises:
        IndexProblem: pypi-simple is not installed.
    """

    def __init__(self, url: str = PYPI) -> None:
        try:
            import pypi_simple
        except ImportError as error:
            raise IndexProblem(
                f"to list releases, pypi-simple is needed ({error}): pip install 'pypi-simple>=1.8,<2'"
            ) from error
        self.label = _without_password(url)
        self._client = pypi_simple.PyPISimple(url)
        self._unknown: Any = pypi_simple.NoSuchProjectError

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.__exit__(*error)  # type: ignore[arg-type]

    def releases(self, name: str) -> list[Published]:
        """All of a distribution's that have a PEP 440 version, oldest first; withdrawn ones and pre-releases, too.

        Raises:
            IndexProblem: there is no such distribution, or the index does not answer.
        """
        try:
            packages = self._client.get_project_page(name, timeout=_SECONDS).packages
        except self._unknown as error:
            raise IndexProblem(f"{self.label} has no distribution {name!r}") from error
        except Exception as error:  # of the network, of HTTP, or a page that is none
            raise IndexProblem(f"{self.label} could not be asked for {name}: {_said(error)}") from error
        found: dict[Version, list[DistributionPackage]] = {}
        for package in packages:
            try:
                files = found.setdefault(Version(package.version or ""), [])
            except InvalidVersion:
                continue
            if package.package_type in ("wheel", "sdist"):
                files.append(package)
        return [_published(version, found[version]) for version in sorted(found)]

    def fetch(self, package: DistributionPackage, folder: Path) -> Path:
        """The file, in ``folder``, unless it is there already. Whole and as the index describes it, or not at all.

        Raises:
            IndexProblem: it could not be fetched, or has another checksum.
        """
        place = folder / package.filename
        if place.exists() and hashlib.sha256(place.read_bytes()).hexdigest() == package.digests.get("sha256"):
            return place
        place.unlink(missing_ok=True)

        def get(incoming: Path) -> Path:
            file = incoming / package.filename
            self._client.download_package(
                package, file, verify=bool(package.digests), keep_on_error=True, timeout=_SECONDS
            )
            return file

        try:
            return download.put(folder, get)
        except Exception as error:
            raise IndexProblem(f"{package.filename} could not be fetched: {_said(error)}") from error


def _published(version: Version, files: list[DistributionPackage]) -> Published:
    if not files:
        return Published(version, None)
    best = _best(files)
    return Published(version, best, (best.yanked_reason or "no reason given") if best.is_yanked else None)


def _best(packages: list[DistributionPackage]) -> DistributionPackage:
    """A wheel, because that is what gets installed; of several, the one that most people here would get."""
    order = ("py3-none-any", "cp311-cp311-manylinux", "-cp311-", ".whl")
    ranks = {package.filename: [mark not in package.filename for mark in order] for package in packages}
    return min(packages, key=lambda package: (ranks[package.filename], package.filename))


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//", url)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
