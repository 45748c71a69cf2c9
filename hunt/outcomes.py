"""What a run hands over, how it is kept, and how two of them are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Outcome = Mapping[str, Mapping[str, Any]]
"""By part (``loss``, ``gradient``, ``state``, ``samples``, ...) and name: numbers, arrays, tensors, or text.

Texts are compared as they are, all else as arrays in float64.
"""

FLOOR = 1e-2
"""A tensor's deviation counts relative to itself, or to this share of the whole part where it is smaller than that:
sums that should be zero have no relative precision."""
EMPTY = 1e-9
"""A part whose norm is smaller on both sides says nothing: nothing was trained."""


class Deviation(NamedTuple):
    """How far two outcomes are apart.

    Attributes:
        size: largest over all tensors: norm of the difference, relative to the larger norm; inf where one has more.
        ratio: of the other one's norm to the first one's, where the difference is a factor and nothing else.
        where: part and name of the largest.
    """

    size: float
    ratio: float | None
    where: str

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"{self.ratio:.3f} x"
        return f"{self.size:.1e}"


class Nothing(Exception):
    """Neither outcome has anything of what is to be compared, so agreeing means nothing."""


def save(outcome: Outcome, folder: Path) -> None:
    """Write it into the folder."""
    arrays, texts = {}, {}
    for part, found in outcome.items():
        for name, value in found.items():
            if isinstance(value, str):
                texts[f"{part}:{name}"] = value
            else:
                if hasattr(value, "detach"):  # a tensor; NumPy has no bfloat16
                    value = value.detach().double().cpu().numpy()
                arrays[f"{part}:{name}"] = np.asarray(value, dtype=np.float64)
    np.savez(folder / "outcome.npz", **arrays)
    (folder / "outcome.json").write_text(json.dumps(texts))


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Read it again."""
    found: dict[str, dict[str, Any]] = {}
    with np.load(folder / "outcome.npz") as arrays:
        everything = {**arrays, **json.loads((folder / "outcome.json").read_text())}
    for key, value in everything.items():
        part, _, name = key.partition(":")
        found.setdefault(part, {})[name] = value
    return found


def compare(one: Outcome, other: Outcome, parts: Iterable[str] | None = None) -> Deviation:
    """The largest deviation in these parts, of those that both have; in all of them if None is named.

    Raises:
        Nothing: both are zero throughout, or have none of the parts.
    """
    names = [part for part in (parts if parts is not None else {**one, **other}) if part in one and part in other]
    largest, says_something = Deviation(0.0, None, ""), False
    for part in names:
        found = _compare_part(part, one[part], other[part])
        if found is not None:
            says_something = True
            if found.size > largest.size or math.isnan(found.size):
                largest = found
    if not says_something:
        raise Nothing(f"nothing to compare: {', '.join(names) or 'no common part'} is zero or empty on both sides")
    return largest


def _compare_part(part: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Deviation | None:
    for name in sorted(one.keys() ^ other.keys()):
        value = one.get(name, other.get(name))
        if isinstance(value, str) or np.linalg.norm(value) > EMPTY:  # no gradient and one of zero are the same
            return Deviation(math.inf, None, f"{part} {name}: only on one side")
    arrays: list[tuple[str, Any, Any]] = []
    for name in sorted(one.keys() & other.keys()):
        left, right = one[name], other[name]
        if isinstance(left, str) or isinstance(right, str):
            if left != right:
                return Deviation(math.inf, None, f"{part} {name}: {left} != {right}")
        elif left.shape != right.shape:
            return Deviation(math.inf, None, f"{part} {name}: shapes {left.shape} and {right.shape}")
        else:
            arrays.append((name, left.ravel(), right.ravel()))
    if not arrays:
        return Deviation(0.0, None, part) if one.keys() & other.keys() else None
    for name, left, right in arrays:
        if (np.isfinite(left) != np.isfinite(right)).any():
            return Deviation(math.inf, None, f"{part} {name}: not finite on one side")
    whole = max(_norm(left for _, left, _ in arrays), _norm(right for _, _, right in arrays))
    if whole <= EMPTY:
        return None
    largest = Deviation(0.0, None, part)
    for name, left, right in arrays:
        scale = max(_norm([left]), _norm([right]), FLOOR * whole)
        size = _norm([left - right]) / scale
        if size > largest.size:
            largest = Deviation(size, None, f"{part} {name}")
    return largest._replace(ratio=_ratio(arrays, largest.size))


def _norm(arrays: Iterable[Any]) -> float:
    return math.sqrt(sum(float(np.square(np.nan_to_num(array)).sum()) for array in arrays))


def _ratio(arrays: list[tuple[str, Any, Any]], size: float) -> float | None:
    """The factor between the two, if that is all that differs."""
    first, second = _norm(left for _, left, _ in arrays), _norm(right for _, _, right in arrays)
    if first <= EMPTY or second <= EMPTY:
        return None
    ratio = second / first
    rest = _norm(ratio * left - right for _, left, right in arrays)
    return ratio if rest < 1e-2 * size * max(first, second) else None
