"""A known bug: its description, its signatures in logs, and the shapes of upstream's code that have it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import ClassVar

from .changes import put_to_use
from .checks import check_items, check_name, check_path, check_types, names_fields, of_a_module, shown
from .errors import DefinitionError
from .listed import WATCH, Listed, modules_of, ranges_of
from .variant import Variant

_SETTING = re.compile(r"[a-z_][\w.]*=[^\s|=A-Z]+(?:\|[^\s|=A-Z]+)*")


@names_fields
@dataclass(frozen=True)
class Signature:
    """An exception that identifies a bug in a log.

    Attributes:
        exception: the exception's type, without the module.
        message: a part of the first line of the exception's text, from the beginning of a word; empty for any text.
        frames: functions, ``module:qualified.name``, one of which is in the traceback; if empty, the targets of the
            patch's changes.
        specific: whether the text identifies this bug even without a traceback. An empty text never does.
        raised_below: whether code of other packages raises it that the function calls with wrong values. Otherwise a
            traceback that goes on into another package is of another bug; torch does not count as one.
    """

    exception: str
    message: str = ""
    frames: tuple[str, ...] = ()
    specific: bool = True
    raised_below: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.exception, str) or not self.exception.isidentifier():
            raise DefinitionError(
                f"Signature.exception is {shown(self.exception)}: expected a type's name, such as 'KeyError'"
            )
        check_types(self, f"Signature of {self.exception}: ")
        for path in self.frames:
            if not of_a_module(path):
                check_path(path, "Signature.frames")
        if not self.message:
            object.__setattr__(self, "specific", False)


HARMS = ("wrong gradient", "wrong weights", "wrong data", "wrong metric", "hang", "crash", "memory", "slow")
"""The harms of a bug to a run, the worst first: silent errors, then what stops the run or is visible."""


class KnownBug:
    """The common base of `Patch`, `Advice` and `Watch`. Pages and CLI texts are generated from the fields.

    Attributes:
        name: kebab-case, framework first: ``megatron-core-forward-pre-hook-reentry``.
        summary: one line.
        symptom: what a user sees, including the error message, so that a search for it leads to this page.
        cause: the cause in upstream's code (Markdown).
        references: URLs of upstream issues and pull requests.
        variants: one for each shape of upstream's code that has the bug. All are for the same distribution, and their
            ranges of releases do not overlap.
        obsolete_when: when this entry can be removed.
        signatures: the exceptions by which ``rlhf-patches diagnose`` identifies the bug in a log.
        harm: the worst of `HARMS` that it causes; empty if not stated.
        bug: the defect in one line; for an advice, its summary.
        when: the configuration in which it occurs, in one line.
        excluded_by: settings with which it certainly does not occur: ``zero_optimization.stage=absent|0|3``. Each is a
            key of a configuration file or of the command line, with its dots, and values in lower case; "absent" is
            for keys of DeepSpeed's file and TRL's own command, ``trl`` the trainer of TRL (``trl grpo``),
            ``model_family`` that of all models, where it is sure.
            ``rlhf-patches audit --config`` hides the bug if one of them matches.
        affects_rollouts: whether it concerns the trainer and the inference engine together.
        changes_numbers, contested: fields of a `Patch`.
    """

    kind: ClassVar[str]
    name: str
    summary: str
    symptom: str
    cause: str
    references: tuple[str, ...]
    variants: tuple[Variant, ...]
    obsolete_when: str
    signatures: tuple[Signature, ...]
    harm: str
    bug: str
    when: str
    excluded_by: tuple[str, ...]
    affects_rollouts: bool
    changes_numbers: str | None = None
    contested: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, f"{type(self).__name__}.name")
        check_items(str(self), "references", self.references, str)
        check_types(self, f"{self}: ")
        for text in self._texts():
            if not getattr(self, text).strip():
                raise DefinitionError(f"{self}: {text} is empty; expected a text for users")
        for text in ("summary", "bug", "when"):
            if "\n" in getattr(self, text):
                raise DefinitionError(f"{self}: {text} has several lines; expected one")
        if self.harm not in ("", *HARMS):
            expected = f"{', '.join(HARMS)}, or nothing"
            raise DefinitionError(f"{self}: harm is {shown(self.harm)}; expected one of {expected}")
        check_items(str(self), "variants", self.variants, Variant)
        if self.signatures != ():
            check_items(str(self), "signatures", self.signatures, Signature)
        for setting in self.excluded_by:
            if not _SETTING.fullmatch(setting):
                raise DefinitionError(
                    f"{self}: excluded_by has {shown(setting)}; expected 'key=value|value' in lower case"
                )
        self._check_guards()

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.name}"

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return "summary", "symptom", "cause", "obsolete_when"

    def _check_guards(self) -> None:
        distributions = dict.fromkeys(variant.guard.distribution for variant in self.variants)
        if len(distributions) > 1:
            raise DefinitionError(
                f"{self}: its variants are for {', '.join(distributions)}; expected one distribution, "
                "and a separate patch for each other"
            )
        for one, other in itertools.combinations(self.variants, 2):
            version = one.guard.shares_a_version_with(other.guard)
            if version is not None:
                raise DefinitionError(
                    f"{self}: version {version} is in the range of two variants, {one.guard.versions!r} and "
                    f"{other.guard.versions!r}; expected each release in at most one of them"
                )

    def listed(self, path: str) -> Listed:
        """Return its entry in a list; ``path`` is its location, ``module:NAME``."""
        variants = tuple(variant.listed() for variant in self.variants)
        return Listed(self.name, path, variants, self.contested, self.kind == WATCH)

    @property
    def excluding(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The keys of `excluded_by`, each with its values."""
        pairs = (setting.partition("=") for setting in self.excluded_by)
        return tuple((key, tuple(values.split("|"))) for key, _, values in pairs)

    @property
    def distribution(self) -> str:
        """The framework's name on PyPI."""
        return self.variants[0].guard.distribution

    @property
    def versions(self) -> str:
        """The releases that have the bug: the ranges of all variants."""
        return ranges_of(variant.guard for variant in self.variants)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of all variants."""
        return modules_of(self.variants)

    @property
    def implementations(self) -> tuple[str, ...]:
        """The objects that the changes of all variants use, as ``module:qualified.name``."""
        return put_to_use(change for variant in self.variants for change in variant.changes)
