"""The tensors of a model of megatron-core by their places in the whole model, whichever ranks hold them.

The places are those of megatron-core's own checkpoints: ``sharded_state_dict`` gives for each local tensor the name,
the shape of the whole, and the offset in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .megatron_parameters import shards
from .megatron_window import core

WEIGHTS, GRADIENT = "weights", "gradient"
_METADATA = {"singleton_local_shards": True, "non_homogeneous_layers": True}
"""Names have the numbers of layers and experts."""


class Piece(NamedTuple):
    """A local tensor.

    Args:
        name: in the whole model.
        whole: the shape of the whole tensor.
        offset: in the whole tensor.
        values: the local ones.
        first: whether it is the first of its copies.
    """

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor
    first: bool


def pieces(chunks: list[Any]) -> Iterator[Piece]:
    """Yield this rank's floating-point parameters and saved buffers."""
    mapping, nested = core("dist_checkpointing.mapping"), core("dist_checkpointing.dict_utils")
    for chunk in chunks:
        state = chunk.module.sharded_state_dict(metadata=dict(_METADATA))
        mapping.apply_factories(state)
        for each in nested.nested_values(state):
            if isinstance(each, mapping.ShardedTensor) and each.data is not None and each.data.is_floating_point():
                more = each.prepend_axis_num
                name = each.key + "".join(f"[{place}]" for place in each.global_offset[:more])
                first = mapping.is_main_replica(each.replica_id)
                yield Piece(name, each.global_shape[more:], each.global_offset[more:], each.data, first)


def gradients(chunks: list[Any]) -> Iterator[Piece]:
    """Yield this rank's gradient; NaN where another rank reduces it. Copies of other ranks are among them."""
    reduced, kept = shards(chunks), []
    made: dict[int, torch.nn.Parameter] = {}
    try:
        for module in (module for chunk in chunks for module in chunk.module.modules()):
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is not None and tensor.is_floating_point():
                        kept.append((own, name, tensor))
                        if id(tensor) not in made:
                            made[id(tensor)] = _gradient(tensor, reduced)
                        own[name] = made[id(tensor)]
        for each in pieces(chunks):
            if not bool(each.values.isnan().all()):
                yield each._replace(values=each.values.detach().clone())
    finally:
        for own, name, tensor in kept:
            own[name] = tensor


def _gradient(tensor: Any, reduced: dict[int, tuple[int, int]]) -> torch.nn.Parameter:
    """A parameter that has the tensor's gradient as its values; NaN if that is not trained."""
    values = torch.full((), torch.nan, device=tensor.device).expand(tensor.shape)
    if tensor.requires_grad and hasattr(tensor, "main_grad"):
        whole = tensor.main_grad.detach().view(tensor.shape)
        start, end = reduced.get(id(tensor), (0, tensor.numel()))
        if end - start == tensor.numel():
            values = whole
        else:
            values = values.clone()
            values.view(-1)[start:end] = whole.reshape(-1)[start:end]
    made = torch.nn.Parameter(values, requires_grad=False)
    vars(made).update(vars(tensor))
    return made


def saved(kind: str, found: Iterator[Piece], every: bool) -> list[tuple[str, Piece]]:
    """Return copies on the CPU: the first of several copies, or every one."""
    return [(kind, each._replace(values=each.values.detach().cpu().clone())) for each in found if every or each.first]


def _here(storage: Any, device: str) -> Any:
    """On the CPU what was there, and on this rank's device what was on another's."""
    return storage if device == "cpu" else storage.cuda()


class Whole:
    """The tensors that the ranks of another process group saved, one file each.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        places = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem))
        self.files = [torch.load(path, map_location=_here, mmap=True, weights_only=False) for path in places]
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for file in self.files:
            for kind, piece in file["pieces"]:
                self._pieces.setdefault((kind, piece[0]), []).append(Piece(*piece))

    def names(self, kind: str) -> set[str]:
        return {name for of, name in self._pieces if of == kind}

    def part(self, kind: str, like: Piece) -> torch.Tensor:
        """Return the values at a piece's place; NaN where there are none.

        Raises:
            ValueError: the whole tensor has another shape.
        """
        found = torch.full(like.values.shape, torch.nan)
        for piece in self._pieces.get((kind, like.name), ()):
            if piece.whole != like.whole:
                shapes = f"{'x'.join(map(str, piece.whole))} and {'x'.join(map(str, like.whole))}"
                raise ValueError(f"{like.name} has other sizes in the two layouts: {shapes}")
            mine, theirs = [], []
            for at, size, other, others in zip(
                like.offset, like.values.shape, piece.offset, piece.values.shape, strict=True
            ):
                low, high = max(at, other), min(at + size, other + others)
                mine.append(slice(low - at, high - at))
                theirs.append(slice(low - other, high - other))
            if all(each.start < each.stop for each in mine):
                there = found[tuple(mine)]
                there.copy_(torch.where(there.isnan(), piece.values[tuple(theirs)].float(), there))
        return found


def loaded(chunks: list[Any], whole: Whole) -> str:
    """Give this rank's model the saved values; returns why that is impossible, empty if it is done."""
    with torch.no_grad():
        for each in pieces(chunks):
            values = whole.part(WEIGHTS, each)
            if bool(values.isnan().any()):
                return f"the first layout has no values, or no finite ones, for {each.name}"
            each.values.copy_(values)
        for each in pieces(chunks):
            if not torch.equal(each.values.float().cpu(), whole.part(WEIGHTS, each)):
                return f"{each.name} did not take the values of the first layout"
    return ""
