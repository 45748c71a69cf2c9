"""A list of patches: the metadata that is needed before a patch is imported.

Every process that calls `apply` imports this module, so it does not import `patch`, whose classes take 7 ms to create.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from .errors import DefinitionError

if TYPE_CHECKING:
    from .guard import CoInstalled, Guard
    from .patch import Advice, Patch, Watch
    from .variant import Variant

PATCH, ADVICE, WATCH = "patch", "advice", "watch"
"""The kinds: a known bug that is repaired, a known bug that is reported, and a check of a run for signs of bugs."""


class ListedCoInstalled(NamedTuple):
    """The fields of a `CoInstalled`, before the patch is imported.

    Attributes:
        distribution, versions, package: as in the `CoInstalled`.
    """

    distribution: str
    versions: str
    package: str


class ListedGuard(NamedTuple):
    """The fields of a `Guard`, before the patch is imported.

    Attributes:
        distribution, versions, may_be_missing, co_installed: as in the `Guard`.
    """

    distribution: str
    versions: str
    may_be_missing: str | None = None
    co_installed: ListedCoInstalled | None = None


class ListedVariant(NamedTuple):
    """The fields of a variant that are needed before its modules are imported.

    Attributes:
        distribution, versions, may_be_missing, co_installed: as in its `Guard`.
        modules, independent, rewrites, is_advice: as in the `Variant`.
    """

    distribution: str
    versions: str
    modules: tuple[str, ...]
    independent: bool = False
    rewrites: bool = False
    may_be_missing: str | None = None
    is_advice: bool = False
    co_installed: ListedCoInstalled | None = None

    @property
    def guard(self) -> ListedGuard:
        """The fields of its `Guard`."""
        return ListedGuard(self.distribution, self.versions, self.may_be_missing, self.co_installed)


class Listed(NamedTuple):
    """The metadata of a patch or an advice that is not imported yet.

    Attributes:
        name, contested: as in the `Patch`.
        path: the patch's location, ``module:NAME``.
        variants: the patch's variants.
        watches: whether it is a `Watch`.
    """

    name: str
    path: str
    variants: tuple[ListedVariant, ...]
    contested: str = ""
    watches: bool = False

    @property
    def kind(self) -> str:
        """``patch``, ``advice`` or ``watch``."""
        if self.watches:
            return WATCH
        return ADVICE if self.variants[0].is_advice else PATCH

    @property
    def distribution(self) -> str:
        """The framework's name on PyPI."""
        return self.variants[0].distribution

    @property
    def versions(self) -> str:
        """The releases that have the bug: the ranges of all variants."""
        return ranges_of(variant.guard for variant in self.variants)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of all variants."""
        # Each import of a watched module asks all entries, most of which have one variant.
        return self.variants[0].modules if len(self.variants) == 1 else modules_of(self.variants)

    def load(self) -> Patch | Advice | Watch:
        """Import the patch.

        Raises:
            DefinitionError: the path leads to another object.
        """
        module, _, name = self.path.partition(":")
        patch: Patch | Advice | Watch = getattr(importlib.import_module(module), name)
        # Not by its class: the module that defines it imports this module.
        if not hasattr(type(patch), "listed") or patch.listed(self.path) != self:
            raise DefinitionError(f"{self.path} is not the patch that is listed as {self}; regenerate the list")
        return patch


def range_of(guard: Guard | ListedGuard) -> str:
    """Return a guard's range, with that of the other distribution: ">=0.15,<0.29 with transformers >=5.1"."""
    return guard.versions + (f" with {co_installed_text(guard.co_installed)}".rstrip() if guard.co_installed else "")


def co_installed_text(other: CoInstalled | ListedCoInstalled) -> str:
    """Return the other distribution and its range."""
    return f"{other.distribution} {other.versions}".rstrip()


def ranges_of(guards: Iterable[Guard | ListedGuard]) -> str:
    """Return the ranges of several guards as one text; another distribution of several guards is named once."""
    by_other: dict[str, list[str]] = {}
    for guard in guards:
        by_other.setdefault(co_installed_text(guard.co_installed) if guard.co_installed else "", []).append(
            guard.versions
        )
    texts = {other: any_of(dict.fromkeys(versions)) for other, versions in by_other.items()}
    return any_of(f"{text}{',' * (' or ' in text)} with {other}" if other else text for other, text in texts.items())


def any_of(versions: Iterable[str]) -> str:
    """Join several ranges into one text."""
    return " or ".join(versions)


def modules_of(variants: Iterable[Variant | ListedVariant]) -> tuple[str, ...]:
    """Return the modules of several variants, without repetition."""
    return tuple(dict.fromkeys(module for variant in variants for module in variant.modules))
