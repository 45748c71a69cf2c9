"""Names of distributions: conda's for frameworks, and those that are nearly a framework's."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.utils import canonicalize_name

CONDAS = {"pytorch": "torch", "pytorch-gpu": "torch", "pytorch-cpu": "torch"}
"""conda's packages, by the distribution of the same contents and versions on PyPI."""

_LONG = 8  # characters from which one more, one less or another one is a mistake; packages of 3 and 4 resemble many


def of_conda(name: str) -> str:
    """The distribution's normalized name on PyPI."""
    normalized = canonicalize_name(name)
    return CONDAS.get(normalized, normalized)


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that a name is nearly: other separators, two letters exchanged, in a long name one mistake."""
    return next((each for each in known if each != name and _is_nearly(name.replace("-", ""), each)), None)


def _is_nearly(name: str, known: str) -> bool:
    known = known.replace("-", "")
    if name == known:
        return True
    begin = next((n for n, (one, other) in enumerate(zip(name, known, strict=False)) if one != other), None)
    if begin is None:
        return abs(len(name) - len(known)) == 1 and len(known) >= _LONG
    one, other = name[begin:], known[begin:]
    if len(one) == len(other) and one[:2] == other[1::-1] and one[2:] == other[2:]:
        return True
    return len(known) >= _LONG and (one[1:] == other or one == other[1:] or one[1:] == other[1:])
