"""Environment variables, and selection of patches by name. An unknown name is an error, never ignored.

=========================  ==============================================================================
RLHF_PATCHES_AUTOLOAD      1 patches this environment's processes without an import (read by the site hook)
RLHF_PATCHES_WATCH         top-level modules, beside the built-in list, whose first import loads the engine; none of
                           the standard library's
RLHF_PATCHES_DISABLE       names or globs, comma-separated: never apply these
RLHF_PATCHES_ONLY          names or globs, comma-separated: apply nothing else
RLHF_PATCHES_ENABLE        names, comma-separated: apply these although upstream contests that they are repairs
RLHF_PATCHES_PLUGINS       distributions, comma-separated, whose patches may be used beside the built-in ones; or none
RLHF_PATCHES_ACKNOWLEDGED  names or globs, comma-separated, of patches whose bugs are known to be met: not to be said
RLHF_PATCHES_LIMITS        FIGURE=NUMBER, comma-separated: above which a watch says so; inf: never
RLHF_PATCHES_OBSERVE       1 leaves everything as released, and counts how often a bug's place was reached
RLHF_PATCHES_REHEARSE      1 holds the first window of a Trainer against itself and ends the program; go-on trains on;
                           without leaves the patches off
RLHF_PATCHES_REHEARSED     set by `rlhf-patches rehearse`: the file that gets what was found
RLHF_PATCHES_STRICT        1 raises where a patch is refused or fails, instead of warning
RLHF_PATCHES_LOG           debug, info, warning, error or off; with ":all", on every rank instead of rank 0;
                           unset: one line, the first problem
RLHF_PATCHES_REPORT        a file in which each process keeps one line of JSON about itself
RLHF_PATCHES_VERIFY        1 compares the ranks once torch.distributed is initialised (`rlhf_patches.verify`)
RLHF_PATCHES_RUN           set by ``rlhf-patches run``: a file whose time says that a process has loaded the site hook
=========================  ==============================================================================
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from datetime import timedelta

PREFIX = "RLHF_PATCHES_"
KNOWN = (
    "AUTOLOAD",
    "WATCH",
    "DISABLE",
    "ONLY",
    "ENABLE",
    "PLUGINS",
    "ACKNOWLEDGED",
    "LIMITS",
    "OBSERVE",
    "REHEARSE",
    "REHEARSED",
    "STRICT",
    "LOG",
    "REPORT",
    "VERIFY",
    "RUN",
)
# Set without AUTOLOAD, these do not tell that anybody wants patches.
_NEUTRAL = ("AUTOLOAD", "LIMITS", "LOG", "REHEARSED", "RUN")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
LINE = "\n  "
"""Between the lines of a message that has several."""
FIGURES = (
    *("log-probabilities", "equal-completions", "short-completions", "long-completions"),
    *("other-prompts", "unused-adapters"),
)
"""What watches note of rollouts, and RLHF_PATCHES_LIMITS sets limits of."""
REHEARSALS = ("go-on", "without")
LEVELS = ("debug", "info", "warning", "error", "off")


class SettingsError(ValueError):
    """A name, an environment variable or an argument is wrong. Nothing was changed."""


class Settings(NamedTuple):
    """The environment variables that decide about patches, as they are now."""

    disable: tuple[str, ...]
    only: tuple[str, ...]
    strict: bool
    named: frozenset[str] = frozenset()
    """What is asked for by its name, and not by a glob."""
    observe: bool = False
    """Whether everything is left as released, and only counted."""

    def unasked(self, name: str, contested: str) -> str | None:
        """Why a patch is off that upstream contests, and who holds what is ``contested``; None when it is not off."""
        if not contested or name in self.named:
            return None
        return f"off by default (RLHF_PATCHES_ENABLE={name} enables it): {contested}"

    def switched_off(self, name: str) -> str | None:
        """Why a patch is switched off, None when it is not. Of what is contested, `unasked` says more."""
        if name in self.disable:
            return "disabled by RLHF_PATCHES_DISABLE"
        if self.only and name not in self.only:
            return "not among RLHF_PATCHES_ONLY"
        return None


def from_environment(names: Sequence[str], hint: str = "", environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the environment; ``names`` are those of the registered patches, ``hint`` ends an error about a name.

    Args:
        environment: this process's, or the one that another process is to get.

    Raises:
        SettingsError: a variable has a value that cannot be meant, or is not one of ours.
    """
    problems: list[str] = []

    def checked(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except SettingsError as error:
            problems.append(str(error))

    problems += unknown(environment)
    wrong = [name for name in _listed("WATCH", environment) if not watchable(name)]
    if wrong:
        problems.append(
            f"{PREFIX}WATCH names {', '.join(wrong)}: expected top-level modules of frameworks, such as transformers. "
            "What the standard library has, and rlhf_patches itself, cannot wait for the engine, which imports it"
        )
    # Nothing here depends on these, but a typo is told before anything is changed.
    checked(lambda: truth("AUTOLOAD", environment))
    checked(lambda: expand(_listed("ACKNOWLEDGED", environment), names, PREFIX + "ACKNOWLEDGED", hint))
    checked(lambda: truth("VERIFY", environment))
    checked(lambda: log_level(environment))
    checked(lambda: limits(environment))
    checked(lambda: rehearse(environment))
    found = Settings(
        disable=checked(lambda: expand(_listed("DISABLE", environment), names, PREFIX + "DISABLE", hint)),
        only=checked(lambda: expand(_listed("ONLY", environment), names, PREFIX + "ONLY", hint)),
        strict=checked(lambda: truth("STRICT", environment)),
        named=checked(lambda: _named(names, hint, environment)),
        observe=checked(lambda: truth("OBSERVE", environment)),
    )
    if problems:
        raise SettingsError(LINE.join(problems))
    return found


def unknown(environment: Mapping[str, str]) -> list[str]:
    """What is wrong with each variable that looks like one of ours and is none."""
    known = [PREFIX + name for name in KNOWN]
    wrong = [name for name in environment if name.startswith(PREFIX) and name not in known]
    return [f"environment variable {name} is unknown{nearest(name, known)}" for name in wrong]


def asking(environment: Mapping[str, str]) -> list[str]:
    """The variables that somebody sets who wants patches; none where RLHF_PATCHES_LOG wants to hear nothing."""
    values = {name: environment.get(PREFIX + name, "").strip().lower() for name in KNOWN}
    if values["LOG"].startswith("off"):
        return []
    return [PREFIX + name for name, value in values.items() if name not in _NEUTRAL and value not in (*_FALSE, "none")]


def named(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """What RLHF_PATCHES_ENABLE and RLHF_PATCHES_ONLY name, whether there is such a patch or not."""
    return frozenset((*_listed("ENABLE", environment), *_listed("ONLY", environment)))


def _named(names: Sequence[str], hint: str, environment: Mapping[str, str]) -> frozenset[str]:
    """The same, checked.

    Raises:
        SettingsError: ENABLE has what is no name of a patch, a glob say.
    """
    wrong = [name for name in _listed("ENABLE", environment) if name not in names]
    if wrong:
        said = [
            f"{PREFIX}ENABLE names {name!r}, "
            + ("a glob: expected names" if set(name) & set("*?[") else f"which is not a patch{nearest(name, names)}")
            for name in wrong
        ]
        raise SettingsError(LINE.join(said) + hint)
    return named(environment) & frozenset(names)


def acknowledged(name: str) -> bool:
    """Whether the user knows that a patch changes numbers, and need not be told."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in _listed("ACKNOWLEDGED", os.environ))


def watchable(module: str) -> bool:
    """Whether the first import of a module can be what loads the engine, so that RLHF_PATCHES_WATCH may name it."""
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "rlhf_patches"}


def truth(variable: str, environment: Mapping[str, str] = os.environ, default: bool = False) -> bool:
    """Whether RLHF_PATCHES_``variable`` is switched on; ``default`` where it is not set, or empty."""
    value = environment.get(PREFIX + variable, "").strip().lower()
    if not value:
        return default
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    raise SettingsError(
        f"{PREFIX}{variable} is {value!r}: expected one of {', '.join(_TRUE)} or {', '.join(_FALSE[1:])}"
    )


def log_level(environment: Mapping[str, str] = os.environ) -> tuple[str | None, bool]:
    """The level asked for with RLHF_PATCHES_LOG (None when unset), and whether every rank shall log."""
    value = environment.get(PREFIX + "LOG", "").strip().lower()
    level, _, ranks = value.partition(":")
    if value and (level not in LEVELS or ranks not in ("", "all")):
        raise SettingsError(f"{PREFIX}LOG is {value!r}: expected {', '.join(LEVELS)}, or one of them with ':all'")
    return level or None, ranks == "all"


def limits(environment: Mapping[str, str] = os.environ) -> dict[str, float]:
    """The limits of figures that RLHF_PATCHES_LIMITS sets.

    Raises:
        SettingsError: it names no figure, or its limit is none.
    """
    found = {}
    for item in _listed("LIMITS", environment):
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in FIGURES:
            raise SettingsError(f"{PREFIX}LIMITS names {name!r}, which no watch notes{nearest(name, FIGURES)}")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if not found[name] >= 0:
            raise SettingsError(f"{PREFIX}LIMITS has {item!r}: expected {name}=NUMBER, 0 or more; inf for no limit")
    return found


def rehearse(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """How RLHF_PATCHES_REHEARSE asks for a rehearsal: empty where it does not.

    Raises:
        SettingsError: it has a word that is none of those.
    """
    words = [word.lower() for word in split(environment.get(PREFIX + "REHEARSE", "")) if word.lower() not in _FALSE]
    for word in words:
        if word not in (*_TRUE, *REHEARSALS):
            raise SettingsError(f"{PREFIX}REHEARSE has {word!r}: expected 1, or {' or '.join(REHEARSALS)}")
    return frozenset("1" if word in _TRUE else word for word in words)


def limit(figure: str) -> float | None:
    """That of a figure, where RLHF_PATCHES_LIMITS sets it; it was checked when patches were applied."""
    if PREFIX + "LIMITS" not in os.environ:
        return None
    try:
        return limits().get(figure)
    except SettingsError:
        return None


def plugins(known: Iterable[str]) -> frozenset[str]:
    """Those of the ``known`` distributions that RLHF_PATCHES_PLUGINS allows; unset or empty, it allows all.

    Raises:
        SettingsError: it names one that is not known.
    """
    value = os.environ.get(PREFIX + "PLUGINS", "").strip()
    if not value or value.lower() == "none":
        return frozenset() if value else frozenset(known)
    by_name: dict[str, list[str]] = {}
    for name in sorted(known):
        by_name.setdefault(canonical(name), []).append(name)
    for name in split(value) or [value]:
        if canonical(name) not in by_name:
            raise SettingsError(
                f"{PREFIX}PLUGINS names {name!r}, which brings no patches here (expected names of distributions, or "
                f"none){nearest(name, list(by_name))}"
            )
    return frozenset(each for name in split(value) for each in by_name[canonical(name)])


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def seconds(timeout: float | timedelta) -> float:
    """A time to wait at most, as an argument gives it.

    Raises:
        SettingsError: it is none; for ever is none either.
    """
    from datetime import timedelta  # only where somebody waits

    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise SettingsError(f"timeout is {timeout!r}: expected seconds, more than 0, or a datetime.timedelta")
    return float(value)


def expand(patterns: Iterable[str] | str | None, names: Sequence[str], what: str, hint: str = "") -> tuple[str, ...]:
    """The patch names that ``patterns`` (names or globs) stand for, in registration order.

    Raises:
        SettingsError: a pattern stands for no patch; the message names the nearest one.
    """
    if patterns is None:
        return ()
    if isinstance(patterns, str):
        patterns = [patterns]
    elif not isinstance(patterns, Iterable):
        raise SettingsError(f"{what} is {patterns!r}: expected names of patches or globs, as strings")
    chosen: set[str] = set()
    unknown: list[str] = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SettingsError(f"{what} has {pattern!r}: expected names of patches or globs, as strings")
        matching = fnmatch.filter(names, pattern)
        chosen.update(matching)
        unknown += [] if matching else [pattern]
    if unknown:
        said = [f"{what} names {pattern!r}, which is not a patch{nearest(pattern, names)}" for pattern in unknown]
        raise SettingsError(LINE.join(said) + hint)
    return tuple(name for name in names if name in chosen)


def nearest(wrong: str, known: Sequence[str]) -> str:
    """The end of an error message: the nearest known name, or all of them when none is near."""
    import difflib  # only where a name is wrong

    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return LINE.join(["; known are:", *known]) if known else "; there are none"


def split(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _listed(variable: str, environment: Mapping[str, str]) -> list[str]:
    return split(environment.get(PREFIX + variable, ""))
