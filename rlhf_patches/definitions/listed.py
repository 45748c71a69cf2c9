"""A list of patches: the metadata that is needed before a patch is imported.

Every process that calls `apply` imports this, so it stands on nothing of `patch`, whose classes take 7 ms to be made.
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
"""The kinds: a known bug that is repaired, one that is told, and a look at a run that knows its signs."""


class ListedCoInstalled(NamedTuple):
    """What is asked of a `CoInstalled`, before one is made.

    Attributes:
        distribution, versions, package: as those of the `CoInstalled`.
    """

    distribution: str
    versions: str
    package: str


class ListedGuard(NamedTuple):
    """What is asked of a `Guard`, before one is made.

    Attributes:
        distribution, versions, may_be_missing, co_installed: as those of the `Guard`.
    """

    distribution: str
    versions: str
    may_be_missing: str | None = None
    co_installed: ListedCoInstalled | None = None


class ListedVariant(NamedTuple):
    """What has to be known of a variant as long as none of its modules is imported.

    Attributes:
        distribution, versions, may_be_missing, co_installed: as those of its `Guard`.
        modules, independent, rewrites, is_advice: as those of the `Variant`.
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
        """What its `Guard` says."""
        return ListedGuard(self.distribution, self.versions, self.may_be_missing, self.co_installed)


class Listed(NamedTuple):
    """A patch or an advice that is not imported yet: the metadata that is needed before it is imported.

    Attributes:
        name, contested: as those of the `Patch`.
        path: the patch, ``module:NAME``.
        variants: those of the patch.
        watches: whether it is a `Watch`.
    """

    name: str
    path: str
    variants: tuple[ListedVariant, ...]
    contested: str = ""
    watches: bool = False

    @property
    def kind(self) -> str:
        """Whether it is a patch, an advice or a watch."""
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
        return modules_of(self.variants)

    def load(self) -> Patch | Advice | Watch:
        """Import the patch.

        Raises:
            DefinitionError: what is there is another one, or none.
        """
        module, _, name = self.path.partition(":")
        found: Patch | Advice | Watch = getattr(importlib.import_module(module), name)
        # Not by its class: what defines that stands on this module.
        if not hasattr(type(found), "listed") or found.listed(self.path) != self:
            raise DefinitionError(f"{self.path} is not the patch that is listed as {self}; write the list anew")
        return found


def range_of(guard: Guard | ListedGuard) -> str:
    """A guard's range, and that of the distribution beside it: ">=0.15,<0.29 beside transformers >=5.1"."""
    return guard.versions + (f" beside {co_installed_text(guard.co_installed)}".rstrip() if guard.co_installed else "")


def co_installed_text(beside: CoInstalled | ListedCoInstalled) -> str:
    """A distribution beside the patched one, and its range."""
    return f"{beside.distribution} {beside.versions}".rstrip()


def ranges_of(guards: Iterable[Guard | ListedGuard]) -> str:
    """The ranges of several guards as one text; what is beside several of them is named once."""
    found: dict[str, list[str]] = {}
    for guard in guards:
        found.setdefault(co_installed_text(guard.co_installed) if guard.co_installed else "", []).append(guard.versions)
    texts = {other: any_of(dict.fromkeys(versions)) for other, versions in found.items()}
    return any_of(f"{text}{',' * (' or ' in text)} beside {other}" if other else text for other, text in texts.items())


def any_of(versions: Iterable[str]) -> str:
    """Several ranges as one text."""
    return " or ".join(versions)


def modules_of(variants: Iterable[Variant | ListedVariant]) -> tuple[str, ...]:
    """The modules of several variants, each once."""
    return tuple(dict.fromkeys(module for variant in variants for module in variant.modules))
