"""One window of megatron-core in two layouts: the command's own, and one that divides the model among fewer ranks.

The first run keeps its weights, its gradient and its micro-batches in a folder. The second run has the same ranks. Of
these, several compute what one data-parallel rank of the first run computed; so the gradient must be the same.
"""

from __future__ import annotations

import functools
import inspect
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import settings
from . import loop_ranks, ranks, results, sketches, window
from .megatron_shards import GRADIENT, WEIGHTS, Whole, gradients, loaded, pieces, saved
from .megatron_window import Window, core
from .parameters import shown
from .relation import OTHER_LAYOUT, Relation, Verdict, not_checked

_SMALL = 1e-2
"""A parameter's gradient that is smaller than this part of the whole may be rounding errors that cancel."""
_TIMES_NOISE = 5.0
_RANDOM = 0.1
_AT_ONCE = 2**24
_EQUAL = 1e-4
"""Below this difference, a factor is the same for all elements."""


def kept(run: Window, against: Mapping[str, int], folder: Path) -> str:
    """Save what the second run needs; returns why that is impossible, empty if all ranks have done so."""
    why, found, sharded = _cannot_divide(run, against), [], run.chunks[0].ddp_config.use_distributed_optimizer
    if not why:
        try:
            found = saved(GRADIENT, gradients(run.chunks), bool(sharded))
            run.began.put_back()
            found += saved(WEIGHTS, pieces(run.chunks), False)
        except Exception as error:  # a module of the user may have no sharded_state_dict that works
            why = f"sharded_state_dict: {type(error).__name__}: {error}"
    size = sum(piece.values.numel() * piece.values.element_size() for _, piece in found)
    free = shutil.disk_usage(folder).free if folder.is_dir() else None
    every = ranks.gathered((why, size, free))  # before a rank writes, so that all decide alike
    if any(each[2] is None for each in every):
        return "the ranks have no temporary folder in common"
    why = next((each[0] for each in every if each[0]), "")
    if not why and 2 * sum(each[1] for each in every) > min(each[2] or 0 for each in every):
        return f"the weights and the gradient need more than half of what is free in {folder}"
    if not why:
        mine = _written(run, [(kind, tuple(piece)) for kind, piece in found], folder)
        why = next((each for each in ranks.gathered(mine) if each), "")
    if not why and loop_ranks.number()[0] == 0:
        (folder / results.COMPLETE).touch()
    return why


def _written(run: Window, found: list[Any], folder: Path) -> str:
    state = core("parallel_state")
    reads = not (state.get_tensor_model_parallel_rank() or state.get_pipeline_model_parallel_rank())
    content = {
        "pieces": found,
        "items": {at: items for (_, at), items in run.items.items()} if reads else None,
        "at": (state.get_data_parallel_rank(), state.get_context_parallel_rank()),
        "ranks": state.get_data_parallel_world_size(),
        "call": _call(run),
    }
    try:
        torch.save(content, folder / f"{loop_ranks.number()[0]}.pt")
    except Exception as error:  # what the user's iterator yields may not be possible to save
        return f"{type(error).__name__}: {error}"
    return ""


def _call(run: Window) -> dict[str, Any]:
    """What both layouts must have in common."""
    given = {name: run.named.get(name) for name in ("seq_length", "micro_batch_size", "decoder_seq_length")}
    return {**given, "calculate_per_token_loss": bool(run.config.calculate_per_token_loss)}


def _cannot_divide(run: Window, against: Mapping[str, int]) -> str:
    """Why the window cannot be computed in the other layout."""
    mine = {name: _size(name) for name in against}
    if any(size % against[name] for name, size in mine.items()) or mine == against:
        return f"this run has {shown_as(mine)}; expected a smaller size that divides it"
    if run.config.virtual_pipeline_model_parallel_size is not None:
        return "interleaved pipeline stages"
    if getattr(run.config, "moe_expert_capacity_factor", None) is not None:
        return "moe_expert_capacity_factor: which tokens are dropped depends on the layout"
    kinds = getattr(run.config, "moe_router_load_balancing_type", None)
    if "sinkhorn" in (kinds if isinstance(kinds, list) else [kinds]):
        return "sinkhorn: the router's choice depends on all tokens of a rank"
    return ""


# -- the second run


def wrapped(module: ModuleType, against: Mapping[str, int]) -> None:
    """Have megatron-core's own functions take the other layout's sizes, whatever sizes the script gives.

    Args:
        module: ``parallel_state``, or ``model_parallel_config``.
        against: the sizes.
    """
    sizes = {f"{settings.PARALLEL[name]}_parallel_size": size for name, size in against.items()}
    if hasattr(module, "initialize_model_parallel"):
        initialize = module.initialize_model_parallel
        signature = inspect.signature(initialize)

        @functools.wraps(initialize)
        def initialized(*given: Any, **named: Any) -> Any:
            bound = signature.bind(*given, **named)
            bound.arguments.update(sizes)
            return initialize(*bound.args, **bound.kwargs)

        module.initialize_model_parallel = initialized  # type: ignore[attr-defined]
        return
    kind: Any = vars(module)["ModelParallelConfig"]
    check = kind.__post_init__

    @functools.wraps(check)
    def checked(config: Any) -> None:
        vars(config).update(sizes)
        if config.tensor_model_parallel_size == 1:  # which megatron-core refuses or warns of
            config.sequence_parallel = config.tp_comm_overlap = False
        check(config)

    kind.__post_init__ = checked


def compared(run: Window, against: Mapping[str, int], folder: Path) -> list[Relation]:
    """Compute the first run's window in this layout, and compare the gradients.

    First each rank computes all micro-batches of the rank of the first run in whose place it is. A loss that is a sum
    over the data-parallel ranks is then larger; so if the gradient is another, such ranks divide the micro-batches.
    """
    why, whole = "", Whole(folder)
    try:
        why = _another_layout(run, against) or _given(run, whole) or loaded(run.chunks, whole)
    except Exception as error:  # a module of the user may have no sharded_state_dict that works
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if why := next((each for each in ranks.gathered(why) if each), ""):
        return [not_checked(OTHER_LAYOUT, why)]
    state, places = core("parallel_state"), [*range(len(run.items))]
    copies = state.get_data_parallel_world_size() // whole.files[0]["ranks"]
    found = _measured(run, whole, places, copies, shown_as(against))
    if found.verdict in (Verdict.DEVIATES, Verdict.NOTE) and copies > 1 and not len(places) % copies:
        loaded(run.chunks, whole)
        mine = places[state.get_data_parallel_rank() % copies :: copies]
        divided = _measured(run, whole, mine, 1, shown_as(against))
        if divided.verdict is Verdict.HOLDS or found.verdict is Verdict.NOTE:
            found = divided
    return [found]


def _measured(run: Window, whole: Whole, places: list[int], copies: int, layout: str) -> Relation:
    """Compare the gradient of these micro-batches, of which as many ranks compute copies, with the first run's."""
    run.replay(places)
    sums: dict[str, torch.Tensor] = {}
    second = {}
    for each in gradients(run.chunks):
        held = ~each.values.isnan().cpu()
        mine, first = each.values.cpu().double()[held], whole.part(GRADIENT, each).double()[held]
        numbers = [held.sum() / math.prod(each.whole), mine @ mine, first @ first, _squares(first - mine), first @ mine]
        sums[each.name] = sums.get(each.name, 0) + torch.tensor([*numbers, 0.0], dtype=torch.float64)
        second[each.name, each.offset] = each.values.cpu()
    _perturb(run.chunks)
    run.replay(places, scaled=True)
    for each in gradients(run.chunks):
        apart = (each.values.cpu() / window.SCALE - second[each.name, each.offset]).nan_to_num(0.0)
        sums[each.name][5] += _squares(apart)
    every = ranks.gathered((run.drew, sums))
    if any(drew for drew, _ in every):
        why = "the forward step draws random numbers (dropout), and they depend on the layout"
        return not_checked(OTHER_LAYOUT, why)
    return _relation([each for _, each in every], whole.names(GRADIENT), layout, copies)


def _squares(values: torch.Tensor) -> float:
    return float(values.double().pow(2).sum())


def _another_layout(run: Window, against: Mapping[str, int]) -> str:
    """Why this is not the layout that was asked for."""
    for name, size in against.items():
        own = getattr(run.config, f"{settings.PARALLEL[name]}_parallel_size", size)
        if {_size(name), size if own is None else own} != {size}:
            return f"the script does not take {name} from initialize_model_parallel and the model's configuration"
    return ""


def _given(run: Window, whole: Whole) -> str:
    """Give the window the micro-batches of the first run's data-parallel rank in whose place this one is."""
    state = core("parallel_state")
    number, mine = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    theirs = whole.files[0]["ranks"]
    if number % theirs:
        return f"there are {number} data-parallel ranks, and {theirs} in the first layout"
    if whole.files[0]["call"] != _call(run):
        return "the script gives the schedule other sizes, or another kind of loss"
    at = mine * theirs // number, state.get_context_parallel_rank()
    items: dict[int, Any] = next((file["items"] for file in whole.files if file["at"] == at and file["items"]), {})
    run.take(items)
    return "" if run.reads else "the first tensor-parallel rank's forward step does not read from its data iterator"


def _perturb(chunks: list[Any]) -> None:
    """Change each weight by its rounding error; copies on other ranks alike."""
    with torch.no_grad():
        for each in pieces(chunks):
            flat = each.values.reshape(-1)
            # Copies have the same places in the whole.
            start = sum(each.offset) + len(each.name)
            for place in range(0, flat.numel(), _AT_ONCE):
                part = flat[place : place + _AT_ONCE]
                signs = sketches.signs(start + place, part.numel(), 0, part.device)
                part.mul_(1 + signs * torch.finfo(part.dtype).eps / 2)
            each.values.copy_(flat.view_as(each.values))


def _relation(every: list[dict[str, torch.Tensor]], names: set[str], layout: str, copies: int) -> Relation:
    """What all ranks measured, put together; an element that several ranks hold counts once."""
    sums: dict[str, Any] = {}
    for measured in every:
        for name, values in measured.items():
            sums[name] = sums.get(name, 0) + values
    sums = {name: values[1:] / values[0] for name, values in sums.items()}
    only = sorted(names ^ {*sums})
    if only:
        text = f"{len(only)} are trained in one of the layouts only: {shown(only)}"
        return Relation(OTHER_LAYOUT, Verdict.DEVIATES, f"{len(only)}", text)
    _, first, apart, _, noise = sum(sums.values())
    whole = float(first.sqrt()) or 1.0
    rounding, deviation = float(noise.sqrt()) / whole, float(apart.sqrt()) / whole
    if not math.isfinite(deviation + rounding):
        return not_checked(OTHER_LAYOUT, "a gradient is not finite")
    if rounding > _RANDOM:
        return not_checked(OTHER_LAYOUT, f"rounding errors of the weights change the gradient by {rounding:.2g}")
    wrong = [name for name, each in sums.items() if not _near(each, whole)]
    if not wrong:
        text = f"equal with {layout} ({deviation:.0e}, noise {rounding:.0e})"
        return Relation(OTHER_LAYOUT, Verdict.HOLDS, f"{len(sums)} parameters", text)
    text = f"{len(wrong)} of {len(sums)} parameters have another gradient with {layout}: {shown(wrong)}"
    mine, first, _, product, _ = sum(sums[name] for name in wrong)
    factor = float(product / mine)
    verdict = Verdict.DEVIATES
    if factor > 0 and float(first - factor * product) <= float(first) * max(_EQUAL, _TIMES_NOISE * rounding) ** 2:
        text += f"; here {factor:.3f} x that gradient"
        if len(wrong) == len(sums) and abs(factor * copies - 1) < max(_EQUAL, _TIMES_NOISE * rounding) and copies > 1:
            verdict, text = Verdict.NOTE, f"{text}, as of a loss that is a sum over data-parallel ranks"
    return Relation(OTHER_LAYOUT, verdict, f"{deviation:.2g}", text)


def _near(sums: torch.Tensor, whole: float) -> bool:
    _, first, apart, _, noise = (math.sqrt(abs(float(each))) for each in sums)
    return apart <= max(window.FLOOR * max(first, _SMALL * whole), _TIMES_NOISE * noise)


# -- of both runs


def shown_as(sizes: Mapping[str, int]) -> str:
    """Return a text such as ``TP 1, EP 1``."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _size(name: str) -> int:
    return int(getattr(core("parallel_state"), f"get_{settings.PARALLEL[name]}_parallel_world_size")())
