"""Environment variables, and selection of patches by name. An unknown name is an error.

=========================  ==============================================================================
RLHF_PATCHES_AUTOLOAD      1 patches this environment's processes without an import (read by the site hook)
RLHF_PATCHES_WATCH         further top-level modules whose first import loads the engine; not of the standard library
RLHF_PATCHES_DISABLE       names or globs, comma-separated: never apply these
RLHF_PATCHES_ONLY          names or globs, comma-separated: apply nothing else
RLHF_PATCHES_ENABLE        names, comma-separated: apply these contested patches
RLHF_PATCHES_PLUGINS       distributions, comma-separated, whose patches are used with the built-in ones; or none
RLHF_PATCHES_ACKNOWLEDGED  names or globs, comma-separated: do not log that the bugs of these patches occur
RLHF_PATCHES_LIMITS        FIGURE=NUMBER, comma-separated: the limit above which a watch warns; inf: never
RLHF_PATCHES_OBSERVE       1 changes nothing, and counts how often bugs occur
RLHF_PATCHES_REHEARSE      1 checks the first window of a Trainer and ends the program; go-on continues the training;
                           without keeps the patches off; save tries a checkpoint; memory=low; time-limit=SECONDS;
                           of `rehearse --against`: against=TP=1+EP=1, and other-layout in the second run
RLHF_PATCHES_REHEARSED     set by `rlhf-patches rehearse`: the file for the results
RLHF_PATCHES_STRICT        1 raises if a patch is refused or fails, instead of warning
RLHF_PATCHES_LOG           debug, info, warning, error or off; with ":all", on every rank instead of rank 0;
                           unset: one line, the first problem
RLHF_PATCHES_REPORT        a file in which each process keeps one line of JSON about itself
RLHF_PATCHES_VERIFY        1 compares the ranks once torch.distributed is initialized (`rlhf_patches.verify`)
RLHF_PATCHES_RUN           set by ``rlhf-patches run``: a file whose time shows that a process loaded the site hook
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
# Variables that, without AUTOLOAD, do not mean that the user wants patches.
_NEUTRAL = ("AUTOLOAD", "LIMITS", "LOG", "REHEARSED", "RUN")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
LINE = "\n  "
"""The separator of a message's lines."""
FIGURES = (
    *("log-probabilities", "equal-completions", "short-completions", "long-completions"),
    *("other-prompts", "unused-adapters"),
)
"""The figures of rollouts that watches record and RLHF_PATCHES_LIMITS limits."""
MEMORY_LOW = "memory=low"
OTHER_LAYOUT = "other-layout"
REHEARSALS = ("go-on", "without", "save", MEMORY_LOW)
AGAINST = "against="
_TIME_LIMIT = "time-limit="
PARALLEL = {"TP": "tensor_model", "PP": "pipeline_model", "EP": "expert_model", "ETP": "expert_tensor"}
"""The kinds of ranks that divide a model of megatron-core, by the words of a layout."""
_LAYOUT = re.compile(rf"({'|'.join(PARALLEL)})=([1-9][0-9]*)")
LEVELS = ("debug", "info", "warning", "error", "off")


class SettingsError(ValueError):
    """A name, an environment variable or an argument is invalid. Nothing was changed."""


class Settings(NamedTuple):
    """The current environment variables that select patches."""

    disable: tuple[str, ...]
    only: tuple[str, ...]
    strict: bool
    named: frozenset[str] = frozenset()
    """The patches that are enabled by their names, not by globs."""
    observe: bool = False
    """Whether nothing is changed, and calls are only counted."""

    def unasked(self, name: str, contested: str) -> str | None:
        """Return why a contested patch is off; None if it is not off. ``contested`` has the positions."""
        if not contested or name in self.named:
            return None
        return f"off by default (RLHF_PATCHES_ENABLE={name} enables it): {contested}"

    def switched_off(self, name: str) -> str | None:
        """Return why a patch is disabled, None if it is not. See `unasked` for contested patches."""
        if name in self.disable:
            return "disabled by RLHF_PATCHES_DISABLE"
        if self.only and name not in self.only:
            return "not among RLHF_PATCHES_ONLY"
        return None


def from_environment(names: Sequence[str], hint: str = "", environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the environment; ``names`` are the registered patches, ``hint`` ends an error about a name.

    Args:
        environment: this process's environment, or that of another process.

    Raises:
        SettingsError: a variable has an invalid value, or is unknown.
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
            "Modules of the standard library and rlhf_patches itself are not allowed: the engine imports them"
        )
    # Not used here, but a typo is reported before anything is changed.
    checked(lambda: truth("AUTOLOAD", environment))
    checked(lambda: expand(_listed("ACKNOWLEDGED", environment), names, PREFIX + "ACKNOWLEDGED", hint))
    checked(lambda: truth("VERIFY", environment))
    checked(lambda: log_level(environment))
    checked(lambda: limits(environment))
    checked(lambda: rehearse(environment))
    chosen = Settings(
        disable=checked(lambda: expand(_listed("DISABLE", environment), names, PREFIX + "DISABLE", hint)),
        only=checked(lambda: expand(_listed("ONLY", environment), names, PREFIX + "ONLY", hint)),
        strict=checked(lambda: truth("STRICT", environment)),
        named=checked(lambda: _named(names, hint, environment)),
        observe=checked(lambda: truth("OBSERVE", environment)),
    )
    if problems:
        raise SettingsError(LINE.join(problems))
    return chosen


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Return an error for each variable with our prefix and an unknown name."""
    known = [PREFIX + name for name in KNOWN]
    wrong = [name for name in environment if name.startswith(PREFIX) and name not in known]
    return [f"environment variable {name} is unknown{nearest(name, known)}" for name in wrong]


def asking(environment: Mapping[str, str]) -> list[str]:
    """Return the set variables that mean that the user wants patches; none if RLHF_PATCHES_LOG is off."""
    values = {name: environment.get(PREFIX + name, "").strip().lower() for name in KNOWN}
    if values["LOG"].startswith("off"):
        return []
    return [PREFIX + name for name, value in values.items() if name not in _NEUTRAL and value not in (*_FALSE, "none")]


def named(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the names in RLHF_PATCHES_ENABLE and RLHF_PATCHES_ONLY, also of unknown patches."""
    return frozenset((*_listed("ENABLE", environment), *_listed("ONLY", environment)))


def _named(names: Sequence[str], hint: str, environment: Mapping[str, str]) -> frozenset[str]:
    """Return the same names, checked.

    Raises:
        SettingsError: ENABLE has an item that is not a patch's name, such as a glob.
    """
    wrong = [name for name in _listed("ENABLE", environment) if name not in names]
    if wrong:
        problems = [
            f"{PREFIX}ENABLE names {name!r}, "
            + ("a glob: expected names" if set(name) & set("*?[") else f"which is not a patch{nearest(name, names)}")
            for name in wrong
        ]
        raise SettingsError(LINE.join(problems) + hint)
    return named(environment) & frozenset(names)


def acknowledged(name: str) -> bool:
    """Whether the user has acknowledged a patch, so that its bug is not logged."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in _listed("ACKNOWLEDGED", os.environ))


def watchable(module: str) -> bool:
    """Whether the first import of a module can load the engine, so that RLHF_PATCHES_WATCH may name it."""
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "rlhf_patches"}


def truth(variable: str, environment: Mapping[str, str] = os.environ, default: bool = False) -> bool:
    """Whether RLHF_PATCHES_``variable`` is true; ``default`` if it is unset or empty."""
    value = environment.get(PREFIX + variable, "").strip().lower()
    if not value:
        return default
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    raise SettingsError(
        f"{PREFIX}{variable} is {value!r}: expected one of {', '.join(_TRUE)} or {', '.join(_FALSE[1:])}"
    )


def log_level(environment: Mapping[str, str] = os.environ) -> tuple[str | None, bool]:
    """Return the level of RLHF_PATCHES_LOG (None if unset), and whether every rank logs."""
    value = environment.get(PREFIX + "LOG", "").strip().lower()
    level, _, ranks = value.partition(":")
    if value and (level not in LEVELS or ranks not in ("", "all")):
        raise SettingsError(f"{PREFIX}LOG is {value!r}: expected {', '.join(LEVELS)}, or one of them with ':all'")
    return level or None, ranks == "all"


def limits(environment: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Return the limits of figures in RLHF_PATCHES_LIMITS.

    Raises:
        SettingsError: it names an unknown figure, or a limit is invalid.
    """
    by_figure = {}
    for item in _listed("LIMITS", environment):
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in FIGURES:
            raise SettingsError(f"{PREFIX}LIMITS names {name!r}, which no watch records{nearest(name, FIGURES)}")
        try:
            by_figure[name] = float(number)
        except ValueError:
            by_figure[name] = math.nan
        if not by_figure[name] >= 0:
            raise SettingsError(f"{PREFIX}LIMITS has {item!r}: expected {name}=NUMBER, 0 or more; inf for no limit")
    return by_figure


def rehearse(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the words of RLHF_PATCHES_REHEARSE; empty for no rehearsal.

    Raises:
        SettingsError: it has an unknown word.
    """
    words = [word.lower() for word in split(environment.get(PREFIX + "REHEARSE", "")) if word.lower() not in _FALSE]
    for word in words:
        if word.startswith(_TIME_LIMIT):
            _seconds(word)
        elif word.startswith(AGAINST):
            layout(word.removeprefix(AGAINST))
        elif word not in (*_TRUE, *REHEARSALS, OTHER_LAYOUT):
            expected = f"1, {', '.join(REHEARSALS)} or {_TIME_LIMIT}SECONDS"
            raise SettingsError(f"{PREFIX}REHEARSE has {word!r}: expected {expected}")
    return frozenset("1" if word in _TRUE else word for word in words)


def time_limit(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds that a rehearsal may take; None without a limit."""
    return next((_seconds(word) for word in rehearse(environment) if word.startswith(_TIME_LIMIT)), None)


def against() -> dict[str, int]:
    """Return the sizes of the layout against which a rehearsal compares; empty if none."""
    return next((layout(word.removeprefix(AGAINST)) for word in rehearse() if word.startswith(AGAINST)), {})


def layout(text: str) -> dict[str, int]:
    """Read a layout such as ``TP=1,EP=1``; a plus sign may stand for the comma.

    Raises:
        SettingsError: it is none.
    """
    parts = [_LAYOUT.fullmatch(part.strip()) for part in re.split("[+,]", text.upper())]
    found = {part[1]: int(part[2]) for part in parts if part}
    if not all(parts) or len(found) < len(parts):
        raise SettingsError(f"the layout is {text!r}: expected sizes of TP, PP, EP or ETP, such as TP=1,EP=1")
    return found


def _seconds(word: str) -> float:
    try:
        seconds = float(word.removeprefix(_TIME_LIMIT))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SettingsError(f"{PREFIX}REHEARSE has {word!r}: expected a number of seconds above 0")
    return seconds


def limit(figure: str) -> float | None:
    """Return a figure's limit in RLHF_PATCHES_LIMITS, which was checked when patches were applied; else None."""
    if PREFIX + "LIMITS" not in os.environ:
        return None
    try:
        return limits().get(figure)
    except SettingsError:
        return None


def plugins(known: Iterable[str]) -> frozenset[str]:
    """Return the ``known`` distributions that RLHF_PATCHES_PLUGINS allows; if unset or empty, it allows all.

    Raises:
        SettingsError: it names an unknown distribution.
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
                f"{PREFIX}PLUGINS names {name!r}, which provides no patches here (expected names of distributions, or "
                f"none){nearest(name, list(by_name))}"
            )
    return frozenset(each for name in split(value) for each in by_name[canonical(name)])


def canonical(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def seconds(timeout: float | timedelta) -> float:
    """Return a timeout argument in seconds.

    Raises:
        SettingsError: it is invalid or infinite.
    """
    from datetime import timedelta  # only for a timeout

    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise SettingsError(f"timeout is {timeout!r}: expected seconds, more than 0, or a datetime.timedelta")
    return float(value)


def expand(patterns: Iterable[str] | str | None, names: Sequence[str], what: str, hint: str = "") -> tuple[str, ...]:
    """Return the patch names that match ``patterns`` (names or globs), in registration order.

    Raises:
        SettingsError: a pattern matches no patch; the message names the nearest one.
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
        problems = [f"{what} names {pattern!r}, which is not a patch{nearest(pattern, names)}" for pattern in unknown]
        raise SettingsError(LINE.join(problems) + hint)
    return tuple(name for name in names if name in chosen)


def nearest(wrong: str, known: Sequence[str]) -> str:
    """Return the end of an error message: the nearest known name, or all names if none is near."""
    import difflib  # only for an unknown name

    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return LINE.join(["; known are:", *known]) if known else "; there are none"


def split(text: str) -> list[str]:
    """Return the items of a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _listed(variable: str, environment: Mapping[str, str]) -> list[str]:
    return split(environment.get(PREFIX + variable, ""))
