"""Exchanges what the ranks of a training loop saw, and compares it: what was equal on all ranks has to stay equal.

The exchange uses the process group's store and no collective, so a rank that does not come is no hang.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from .loop_windows import Window, expected
from .parameters import shown
from .relation import Relation, Verdict, not_checked
from .weights import RANKS

PARAMETERS = "parameters across ranks"
_PROTOCOL = "rlhf_patches/rehearse/1"
_WAIT = 60.0
_FAREWELL = 10.0
_SAME = 1e-6
_exchanges = itertools.count()  # ranks exchange equally often


@dataclass
class Seen:
    """What one rank saw of a loop.

    Args:
        windows: the windows of each optimizer.
        states: for each optimizer and step the parameters' fingerprints before the first step and after each step.
        averaged: the names of parameters that DistributedDataParallel averages over all ranks.
        local: why ranks may differ on purpose; empty if they may not.
    """

    windows: list[list[Window]]
    states: list[list[dict[str, int]]]
    averaged: frozenset[str]
    local: str


def number() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def failed(name: str, error: Exception) -> Relation:
    """Not checked; raises if other ranks did not fail: they wait for this one in a collective of the framework's."""
    traceback.print_exc(file=sys.stderr)
    if exchanged("failed")[1]:
        raise error
    return not_checked(name, f"{type(error).__name__}: {error}")


def exchanged(mine: Any) -> tuple[list[Any], str]:
    """Return every rank's object in rank order, and why that is not possible; then only this rank's."""
    rank, size = number()
    if size == 1:
        return [mine], ""
    find = getattr(sys.modules["torch.distributed.distributed_c10d"], "_get_default_store", None)
    if find is None:
        return [mine], f"torch {torch.__version__} does not show its store"
    store = sys.modules["torch.distributed"].PrefixStore(f"{_PROTOCOL}/{next(_exchanges)}", find())
    limit = timedelta(seconds=_WAIT)
    try:
        store.set(f"seen/{rank}", pickle.dumps(mine))
        late = ""
        of_ranks = []
        for each in range(size):
            late = f"rank {each}"
            store.wait([f"seen/{each}"], limit)
            of_ranks.append(pickle.loads(store.get(f"seen/{each}")))
        late = ""
        store.set(f"read/{rank}", b"1")
        if rank == 0:  # its process may be the store's host
            store.wait([f"read/{each}" for each in range(size)], timedelta(seconds=_FAREWELL))
        return of_ranks, ""
    except Exception as error:  # torch's DistStoreError or RuntimeError
        if not late:
            return of_ranks, ""
        return [mine], f"{late} did not end its windows within {_WAIT:.0f} s ({type(error).__name__})"


def alike(of_ranks: Sequence[Seen]) -> bool:
    """Whether the ranks hold the same parameters by name, in the same order, in as many windows."""
    shapes = [
        [[[(each.name, each.made.shape) for each in one.gradients] for one in windows] for windows in seen.windows]
        for seen in of_ranks
    ]
    return all(each == shapes[0] for each in shapes)


def began_equal(of_ranks: Sequence[Seen]) -> bool:
    """Whether all ranks began with the same parameters, bit for bit."""
    starts = [[states[0] for states in seen.states] for seen in of_ranks]
    return all(each == starts[0] for each in starts)


def windows_of(of_ranks: Sequence[Seen], rank: int) -> list[list[Window]]:
    """Return a rank's windows, with means over ranks where DistributedDataParallel makes them."""
    return [
        [expected([seen.windows[one][place] for seen in of_ranks], rank) for place in range(len(windows))]
        for one, windows in enumerate(of_ranks[rank].windows)
    ]


def relations(of_ranks: Sequence[Seen]) -> list[Relation]:
    """Return the relations between ranks."""
    if not began_equal(of_ranks):
        if of_ranks[0].averaged:
            return [_beginnings(of_ranks)]
        text = "the ranks began with different parameters (shards, or an initialization by rank)"
        return [Relation(RANKS, Verdict.NOT_CHECKED, "", text)]
    return [_gradients(of_ranks), _parameters(of_ranks)]


def _beginnings(of_ranks: Sequence[Seen]) -> Relation:
    """Parameters that DistributedDataParallel averages are the same on all ranks from the beginning."""
    starts = [{name: each for states in seen.states for name, each in states[0].items()} for seen in of_ranks]
    wrong = [name for name in starts[0] if any(each.get(name) != starts[0][name] for each in starts[1:])]
    wrong = [name for name in wrong if name in of_ranks[0].averaged]
    if not wrong:
        text = "the ranks began with different parameters, none of which is averaged"
        return Relation(PARAMETERS, Verdict.NOT_CHECKED, "", text)
    text = f"{len(wrong)} differ before the first step, although the ranks average their gradients: {shown(wrong)}"
    return Relation(PARAMETERS, Verdict.DEVIATES, f"{len(starts[0]) - len(wrong)} equal", text)


def _gradients(of_ranks: Sequence[Seen]) -> Relation:
    """Ranks that hold the same parameters use the same gradient."""
    apart, worst = [], 0.0
    alike_ones = different = 0
    for one, windows in enumerate(of_ranks[0].windows):
        for place, window in enumerate(windows):
            for index, mine in enumerate(window.gradients):
                all_of_it = [seen.windows[one][place].gradients[index].used for seen in of_ranks]
                first = all_of_it[0]
                if all(_equal(first, each) for each in all_of_it):
                    alike_ones += first is not None and bool(first.any())
                    continue
                apart.append(mine.name)
                factor = all(_along(first, each) for each in all_of_it)
                alike_ones, different = alike_ones + factor, different + (not factor)
                worst = max([worst, *(_distance(first, each) for each in all_of_it)])
    if not apart:
        return Relation(RANKS, Verdict.HOLDS, "0")
    names = list(dict.fromkeys(apart))
    text = f"ranks with the same parameters use different gradients: {shown(names)}"
    verdict = Verdict.DEVIATES
    if local := next((each.local for each in of_ranks if each.local), ""):
        verdict, text = Verdict.NOTE, f"{text}; {local}"
    elif not of_ranks[0].averaged and alike_ones < different:
        verdict, text = Verdict.NOTE, f"{text}; nothing averages them, so each rank trains a model of its own"
    return Relation(RANKS, verdict, f"{worst:.2g}", text)


def _parameters(of_ranks: Sequence[Seen]) -> Relation:
    """Ranks that were equal stay equal."""
    wrong: dict[str, None] = {}
    total = 0
    for one, states in enumerate(of_ranks[0].states):
        total += len(states[0])
        for place, first in enumerate(states):
            others = [seen.states[one][place] for seen in of_ranks[1:] if place < len(seen.states[one])]
            wrong |= {name: None for name in first for each in others if each.get(name) != first[name]}
    if not wrong:
        return Relation(PARAMETERS, Verdict.HOLDS, f"{total} equal")
    text = f"{len(wrong)} were equal on all ranks, and differ after a step: {shown(wrong)}"
    gradients = _gradients(of_ranks)
    return Relation(PARAMETERS, gradients.verdict if gradients.verdict is Verdict.NOTE else Verdict.DEVIATES, "", text)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other) or float((one - other).norm()) <= _SAME * float(one.norm())


def _along(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two gradients differ by a factor that is not 0."""
    if one is None or other is None or one.numel() < 2 or not float(one.norm()) or not float(other.norm()):
        return False
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > 1 - _SAME


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        return 1.0
    return float((one - other).norm()) / (float(one.norm()) or 1.0)
