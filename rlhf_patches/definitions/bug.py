"""A known bug: what is said of it, how it shows in a log, and the shapes of upstream's code that have it."""

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
    """An exception by which a bug shows in a log.

    Attributes:
        exception: its type, without the module.
        message: what the first line of its text contains; empty for any text.
        frames: functions, ``module:qualified.name``, one of which is in the traceback; empty for the targets of the
            patch's changes.
        specific: whether the text is this bug's own, so that it is likely even without a traceback. An empty text
            never is.
    """

    exception: str
    message: str = ""
    frames: tuple[str, ...] = ()
    specific: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.exception, str) or not self.exception.isidentifier():
            raise DefinitionError(
                f"Signature.exception is {shown(self.exception)}: expected a type's name, 'KeyError' say"
            )
        check_types(self, f"Signature of {self.exception}: ")
        for path in self.frames:
            if not of_a_module(path):
                check_path(path, "Signature.frames")
        if not self.message:
            object.__setattr__(self, "specific", False)


HARMS = ("wrong gradient", "wrong weights", "wrong data", "wrong metric", "hang", "crash", "memory", "slow")
"""What a bug does to a run, the worst first: what goes on and is found weeks later, then what stops or is seen."""


class KnownBug:
    """What a `Patch`, an `Advice` and a `Watch` have in common. Pages and CLI texts are generated from their fields.

    Attributes:
        name: kebab-case, framework first: ``megatron-core-forward-pre-hook-reentry``.
        summary: one line.
        symptom: what a user sees, error message included, so that a search for it finds this page.
        cause: why upstream does that (Markdown).
        references: addresses of upstream issues and pull requests.
        variants: one for each shape of upstream's code that has the bug. All are for the same distribution, and no
            release is in the range of two.
        obsolete_when: when this entry can be removed.
        signatures: for a bug that raises: the exceptions by which ``rlhf-patches diagnose`` tells it in a log.
        harm: one of `HARMS`, the worst that it does; nothing where that is not said.
        bug: what is wrong, in one line; of an advice its summary.
        when: the configuration in which it bites, in one line.
        excluded_by: settings with which it cannot, for certain: ``zero_optimization.stage=absent|0|3``. Each is a key
            of a configuration file or of the command line, with its dots, and values of it, in lower case; "absent" is
            for keys of DeepSpeed's file. One that holds is enough for ``rlhf-patches audit --config`` to hide the bug.
        affects_rollouts: whether it lies between the trainer and the engine that samples.
        changes_numbers, contested: of a `Patch`.
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
                raise DefinitionError(f"{self}: {text} is empty; users read it, so write it")
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
                "and a patch of its own for each other"
            )
        for one, other in itertools.combinations(self.variants, 2):
            version = one.guard.shares_a_version_with(other.guard)
            if version is not None:
                raise DefinitionError(
                    f"{self}: version {version} is in the range of two variants, {one.guard.versions!r} and "
                    f"{other.guard.versions!r}; expected each release in one of them at most"
                )

    def listed(self, path: str) -> Listed:
        """Its entry in a list; ``path`` is where it is, as ``module:NAME``."""
        variants = tuple(variant.listed() for variant in self.variants)
        return Listed(self.name, path, variants, self.contested, self.kind == WATCH)

    @property
    def excluding(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The settings of `excluded_by`: each key with its values."""
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
        """What the changes of all variants put to use, as ``module:qualified.name``."""
        return put_to_use(change for variant in self.variants for change in variant.changes)
