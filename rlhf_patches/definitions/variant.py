"""One shape of upstream's code that has a bug: its guard and the changes."""

from __future__ import annotations

from dataclasses import dataclass

from .changes import Change, Replace, Rewrite, Shape, Wrap
from .checks import check_items, check_path, check_types, names_fields, shown
from .errors import DefinitionError
from .guard import Guard
from .listed import ListedVariant


@names_fields
@dataclass(frozen=True)
class Variant:
    """One shape of upstream's code that has the bug, and its repair.

    Attributes:
        guard: the releases whose code has the bug in this shape.
        changes: the changes, applied all or none, once all their modules have been imported. For an `Advice`, only
            shapes, all of which must match.
        independent: whether the changes of each module are independent of the others. They are then applied when that
            module is imported, whether or not the others are; none is applied if any is not recognized.
        where_defined, unless_defined: functions, ``module:name``, of the changes' own modules, all of which must be
            defined, or none of which may be: for identical code on different dependencies.
    """

    guard: Guard
    changes: tuple[Change, ...]
    independent: bool = False
    where_defined: tuple[str, ...] = ()
    unless_defined: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.guard, Guard):
            raise DefinitionError(f"Variant.guard is {shown(self.guard)}; expected a Guard")
        check_types(self, "Variant.")
        check_items(f"Variant of {self.guard}", "changes", self.changes, (Rewrite, Replace, Wrap, Shape))
        if len({isinstance(change, Shape) for change in self.changes}) > 1:
            raise DefinitionError("Variant.changes mixes a Shape with other changes; expected only shapes, or none")
        for name, path in (
            *(("where_defined", path) for path in self.where_defined),
            *(("unless_defined", path) for path in self.unless_defined),
        ):
            check_path(path, f"Variant.{name}")
            if path.partition(":")[0] not in self.modules:
                raise DefinitionError(
                    f"Variant.{name} names {path}: expected functions of the changed modules, {', '.join(self.modules)}"
                )

    @property
    def is_advice(self) -> bool:
        """Whether it belongs to an `Advice` and changes nothing."""
        return isinstance(self.changes[0], Shape)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that must be imported before it can be applied, in the order of the changes."""
        return tuple(dict.fromkeys(change.target.partition(":")[0] for change in self.changes))

    @property
    def rewrites(self) -> bool:
        """Whether a change has a pattern: a `Rewrite` or a `Shape`."""
        return any(isinstance(change, (Rewrite, Shape)) for change in self.changes)

    def listed(self) -> ListedVariant:
        """Return its part of the patch's entry in a list."""
        guard = self.guard
        return ListedVariant(
            distribution=guard.distribution,
            versions=guard.versions,
            modules=self.modules,
            independent=self.independent,
            rewrites=self.rewrites,
            may_be_missing=guard.may_be_missing,
            is_advice=self.is_advice,
            co_installed=guard.co_installed.listed() if guard.co_installed else None,
        )
