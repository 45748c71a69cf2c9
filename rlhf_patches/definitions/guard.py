"""The version guard: the releases that have a defect, and the package that must be installed with them."""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import ranges
from .checks import check_types, names_fields, shown
from .errors import DefinitionError
from .listed import ListedCoInstalled, co_installed_text, range_of

if TYPE_CHECKING:
    from packaging.version import Version

_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

OLDER, NEWER = "0.0.0.0.1.dev0", "99999"
"""Versions before and after every release."""


@functools.cache
def _around(base: str) -> tuple[Version, ...]:
    """Return a version, and the versions directly before and after it."""
    from packaging.version import Version

    versions = []
    for text in (base, f"{base}.0.0.0.1", f"{base}.post1", f"{base}.dev1"):
        with contextlib.suppress(ValueError):  # 1.0.post1.post1
            versions.append(Version(text))
    return tuple(versions)


@names_fields
@dataclass(frozen=True)
class CoInstalled:
    """Another distribution and its versions with which the guarded one has the defect.

    The code of the guarded distribution alone does not show the defect.

    Attributes:
        distribution: its name on PyPI, such as ``transformers``.
        versions: as in a `Guard`.
        package: its package to import, to check that the metadata belong to it; if empty, its name in Python.
    """

    distribution: str
    versions: str
    package: str = ""

    def __post_init__(self) -> None:
        check_types(self, "CoInstalled.")
        if not self.distribution:
            raise DefinitionError("CoInstalled.distribution is empty: expected the other package's name on PyPI")
        if not self.versions.strip():
            raise DefinitionError(
                "CoInstalled.versions is empty: expected the versions with which the defect occurs, such as '>=5.1'"
            )
        ranges.check(self.versions, "CoInstalled")
        if not self.package:
            object.__setattr__(self, "package", self.distribution.lower().replace("-", "_"))
        if not _PACKAGE.fullmatch(self.package):
            raise DefinitionError(f"CoInstalled.package is {shown(self.package)}: expected a package, such as 'trl'")

    def __str__(self) -> str:
        return co_installed_text(self)

    def listed(self) -> ListedCoInstalled:
        """Return its part of the variant's entry in a list."""
        return ListedCoInstalled(self.distribution, self.versions, self.package)


@names_fields
@dataclass(frozen=True)
class Guard:
    """The version guard; the shape guard is part of each change, and both must match.

    Attributes:
        distribution: the framework's name on PyPI, such as ``megatron-core``.
        versions: a PEP 440 specifier of the releases that have the defect, such as ``>=0.9.0,<0.17``, including
            pre-releases. An empty one means every version.
        may_be_missing: why such a release may lack the patched modules (a part of the framework that only some copies
            have); the patch is then absent. Without this text it is refused.
        co_installed: another distribution that must be installed with it; None if none matters.
    """

    distribution: str
    versions: str
    may_be_missing: str | None = None
    co_installed: CoInstalled | None = None

    def __post_init__(self) -> None:
        check_types(self, "Guard.")
        if not isinstance(self.co_installed, (CoInstalled, type(None))):
            raise DefinitionError(f"Guard.co_installed is {shown(self.co_installed)}: expected a CoInstalled, or None")
        if self.co_installed is not None and self.co_installed.distribution == self.distribution:
            raise DefinitionError(f"Guard.co_installed is {self.distribution} too: expected another distribution")
        if not self.distribution:
            raise DefinitionError("Guard.distribution is empty: expected the framework's name on PyPI")
        ranges.check(self.versions)
        if self.may_be_missing is not None and not self.may_be_missing.strip():
            raise DefinitionError("Guard.may_be_missing is empty: expected the reason, or None")

    def __str__(self) -> str:
        return f"{self.distribution} {range_of(self)}".rstrip()

    def shares_a_version_with(self, other: Guard) -> str | None:
        """Return a version that is in both ranges; None if there is none.

        Membership changes only at the versions that the ranges name, so those and their neighbors suffice.
        """
        if ranges.plainly_apart(self.versions, other.versions):
            return None
        both = [ranges.parsed(guard.versions) for guard in (self, other)]
        named = {pin.version.removesuffix(".*") for each in both for pin in each}
        for base in [*sorted(named), OLDER, NEWER]:
            for candidate in _around(base):
                if all(each.contains(candidate, prereleases=True) for each in both):
                    return str(candidate)
        return None
