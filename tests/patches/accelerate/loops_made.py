"""What training loops of tests are made of, and how they are checked."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from rlhf_patches.rehearsal.loop import LoopRehearsal
from rlhf_patches.rehearsal.relation import Relation

STEPS = 3
RIGHT: dict[str, Callable[[], Any]] = {}
WRONG: dict[str, tuple[Callable[[], Any], str, str]] = {}
"""By name the loop, the relation that deviates, and what it says."""
NOT_FOLLOWED: dict[str, tuple[Callable[[], Any], str]] = {}
NOT_FOLLOWED_ON_RANKS: dict[str, tuple[Callable[[], Any], str]] = {}
ON_RANKS: dict[str, Callable[[], Any]] = {}
WRONG_ON_RANKS: dict[str, tuple[Callable[[], Any], str, str]] = {}


def right(loop: Callable[[], Any]) -> Callable[[], Any]:
    RIGHT[loop.__name__] = loop
    return loop


def on_ranks(loop: Callable[[], Any]) -> Callable[[], Any]:
    ON_RANKS[loop.__name__] = loop
    return loop


def wrong(relation: str, says: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def noted(loop: Callable[[], Any]) -> Callable[[], Any]:
        WRONG[loop.__name__] = loop, relation, says
        return loop

    return noted


def wrong_on_ranks(relation: str, says: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def noted(loop: Callable[[], Any]) -> Callable[[], Any]:
        WRONG_ON_RANKS[loop.__name__] = loop, relation, says
        return loop

    return noted


def not_followed(says: str, *, ranks: int = 1) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def noted(loop: Callable[[], Any]) -> Callable[[], Any]:
        (NOT_FOLLOWED if ranks == 1 else NOT_FOLLOWED_ON_RANKS)[loop.__name__] = loop, says
        return loop

    return noted


# -- what loops are made of


def model(*, dropout: float = 0.1, norm: bool = False) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.LayerNorm(16), nn.ReLU()]
    return nn.Sequential(*parts, nn.Dropout(dropout), nn.Linear(16, 3))


def rows(size: int = 4, count: int = 64) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(len(os.environ.get("RANK", "")) + int(os.environ.get("RANK", "0")))
    x = torch.randn(count, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (count,), generator=generator)), batch_size=size)


def plainly(net: nn.Module, optimizer: Any, each_step: Callable[[], Any] = lambda: None) -> nn.Module:
    for step, (x, y) in enumerate(rows()):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        each_step()
        optimizer.step()
        if step == STEPS:
            break
    return net


# -- how they are checked


class _Ends(SystemExit):
    pass


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """A loop leaves nothing to the next one."""
    torch.manual_seed(0)
    yield
    if (accelerate := sys.modules.get("accelerate")) is not None:
        group = distributed.is_initialized()
        accelerate.state.AcceleratorState._reset_state(False)
        accelerate.state.GradientState._reset_state()
        assert group == distributed.is_initialized()
    gc.collect()


def rehearsed(loop: Callable[[], Any], *, goes_on: bool = False) -> list[dict[str, str]]:
    """The relations of a loop's first steps."""
    found: list[list[Relation]] = []

    def end(name: str, size: str, relations: list[Relation]) -> None:
        found.append(relations)
        if not goes_on:
            raise _Ends

    rehearsal = LoopRehearsal(torch, end, goes_on=goes_on)
    with _apart():
        rehearsal.begin()
        try:
            with contextlib.suppress(_Ends):
                loop()
        finally:
            if rehearsal.took_a_step:
                with contextlib.suppress(_Ends):
                    rehearsal.finish()
            rehearsal.leave()
    (relations,) = found
    return [each.as_json() for each in relations]


def weights(loop: Callable[[], Any], *, rehearses: bool) -> list[Any]:
    """What a loop comes to, by itself or with a rehearsal that goes on."""
    made: list[Any] = []

    def kept() -> None:
        net = loop()
        made.extend(float(each.detach().double().sum()).hex() for each in net.parameters())
        made.append(torch.rand(1).tolist())

    if rehearses:
        rehearsed(kept, goes_on=True)
    else:
        with _apart():
            kept()
    return made
