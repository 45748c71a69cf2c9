"""What each of megatron-core's ranks holds of the model's parameters and gradients, and which of them are copies.

Megatron takes a parameter without the mark ``tensor_model_parallel`` for a copy that all tensor-parallel ranks hold,
and counts the first rank's in the norm; a parameter with the mark is a part that no other rank holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .megatron_window import core
from .sketches import sketch


@dataclass(frozen=True)
class Place:
    """A rank's places among those that divide the model: tensor, pipeline, context, data, expert parallel ranks."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int

    @classmethod
    def mine(cls) -> Place:
        state = core("parallel_state")
        kinds = ("tensor_model", "pipeline_model", "context", "data", "expert_model", "expert_tensor")
        return cls(*(int(getattr(state, f"get_{kind}_parallel_rank")()) for kind in kinds))


@dataclass
class Held:
    """What one rank holds of a parameter.

    Args:
        name: with the layer's number in the whole model.
        chunk: the place of the model's chunk on this rank.
        size: the number of elements.
        marked: whether Megatron takes it for a part that no other tensor-parallel rank holds.
        counted: whether Megatron counts this rank's in the norm, by the mark or because it is the first such rank.
        expert: whether expert-parallel ranks hold others.
        shared: whether Megatron leaves it out of the norm as another stage's copy.
        tied: whether first and last stage hold it.
        summed: whether its gradient is a sum over other ranks, too, as with sequence parallelism.
        coarse: whether it is in 16 bits.
        gradient: of this rank's shard, as a sketch.
        squares: of this rank's shard.
        before: the values, as a sketch.
        after: the values after the step.
        local: the gradient of this rank's own window, before ranks reduce it.
        optimized: whether this rank's optimizer holds it.
    """

    name: str
    chunk: int
    size: int
    marked: bool
    counted: bool
    expert: bool
    shared: bool
    tied: bool
    summed: bool
    coarse: bool
    gradient: torch.Tensor
    squares: float
    before: torch.Tensor
    after: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    local: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    optimized: bool = True


@dataclass
class Mine:
    """The measurements of one rank."""

    place: Place
    held: list[Held]
    sharded: bool
    tokens: list[float]


def named(chunks: list[Any]) -> Iterator[tuple[int, str, torch.nn.Parameter]]:
    """Yield the trained parameters of this rank's chunks, with the numbers that layers have in the whole model."""
    for place, chunk in enumerate(chunks):
        numbers = {
            name: module.layer_number - 1
            for name, module in chunk.module.named_modules()
            if re.search(r"\blayers\.\d+$", name) and isinstance(getattr(module, "layer_number", None), int)
        }
        for name, parameter in chunk.module.named_parameters():
            if parameter.requires_grad:
                found = re.match(r"(?:.*?\.)?layers\.\d+(?=\.)", name)
                if found and found[0] in numbers:
                    name = re.sub(r"\d+$", str(numbers[found[0]]), found[0]) + name[found.end() :]
                yield place, name.removeprefix("module."), parameter


def shards(chunks: list[Any]) -> dict[int, tuple[int, int]]:
    """Return which elements of each parameter's gradient this rank reduces, by the parameter's id; empty if all."""
    found: dict[int, tuple[int, int]] = {}
    for chunk in chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            number = group.intra_distributed_optimizer_instance_size
            rank = group.intra_distributed_optimizer_instance_rank
            for bucket in group.buckets:
                size = bucket.grad_data.numel() // number
                for parameter in bucket.params:
                    start = parameter.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                    first, last = max(start, rank * size), min(start + parameter.numel(), (rank + 1) * size)
                    found[id(parameter)] = (first - start, last - start) if first < last else (0, 0)
    return found


def gradients(chunks: list[Any]) -> Iterator[torch.Tensor]:
    """Yield each parameter's gradient; elements that another rank reduces are 0."""
    parts = shards(chunks)
    for _, _, parameter in named(chunks):
        gradient = parameter.main_grad.detach().reshape(-1)
        if id(parameter) in parts:
            start, end = parts[id(parameter)]
            whole = torch.zeros_like(gradient)
            whole[start:end] = gradient[start:end]
            gradient = whole
        yield gradient


def sketched(chunks: list[Any]) -> torch.Tensor:
    """The sketch of this rank's gradient."""
    sizes = [parameter.numel() for _, _, parameter in named(chunks)]
    return sketch(gradients(chunks), sizes)


def of_one(tensor: torch.Tensor) -> torch.Tensor:
    """The sketch of a tensor by itself: equal for equal tensors, wherever they are in a model."""
    return sketch([tensor], [tensor.numel()])


def measured(chunks: list[Any]) -> list[Held]:
    """Measure what this rank holds before the step."""
    made, first = [], Place.mine().tensor == 0
    for (chunk, name, parameter), gradient in zip(named(chunks), gradients(chunks), strict=True):
        held: Any = parameter
        marked = bool(getattr(held, "tensor_model_parallel", False))
        made.append(
            Held(
                name,
                chunk,
                parameter.numel(),
                marked,
                marked or first,
                not getattr(held, "allreduce", True),
                bool(getattr(held, "shared", False)),
                bool(getattr(held, "shared_embedding", False)),
                bool(getattr(held, "sequence_parallel", False) or getattr(held, "pipeline_parallel", False)),
                parameter.dtype in (torch.bfloat16, torch.float16),
                of_one(gradient),
                float(gradient.double().pow(2).sum()),
                of_one(parameter),
            )
        )
    return made


@dataclass
class Part:
    """A parameter, or the part of it that one tensor-parallel or expert-parallel rank holds, with its copies.

    Args:
        name: the parameter's.
        copies: what data-parallel ranks hold.
        gradient: the whole one, as a sketch.
        squares: of the whole one.
    """

    name: str
    copies: list[Held]
    gradient: torch.Tensor
    squares: float

    @property
    def first(self) -> Held:
        return self.copies[0]

    @property
    def nonzero(self) -> bool:
        return self.squares > 0


def parts(of_ranks: list[Mine]) -> list[list[Part]]:
    """Return, for each parameter of the whole model, what its tensor-parallel ranks hold; experts one by one."""
    found: dict[tuple[Any, ...], dict[int, list[Held]]] = {}
    for each in of_ranks:
        place = each.place
        for held in each.held:
            at, over = (place.expert, place.expert_tensor) if held.expert else (None, place.tensor)
            found.setdefault((place.pipeline, held.chunk, at, held.name), {}).setdefault(over, []).append(held)
    sharded = of_ranks[0].sharded

    def part(name: str, copies: list[Held]) -> Part:
        of: Callable[[list[Any]], Any] = sum if sharded else (lambda each: each[0])
        return Part(name, copies, of([each.gradient for each in copies]), of([each.squares for each in copies]))

    return [
        [part(name, over[rank]) for rank in sorted(over)] for (_, _, _, name), over in sorted(found.items(), key=_order)
    ]


def _order(item: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    (pipeline, chunk, at, name), _ = item
    return pipeline, chunk, -1 if at is None else at, name
