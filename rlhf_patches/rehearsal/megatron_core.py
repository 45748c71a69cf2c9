"""Checks the first window and step of megatron-core's schedules and optimizers.

The run's own schedule computes the window. Before the optimizer's step, the same schedule computes other windows of the
recorded micro-batches, with the run's own functions. Then the run's state is put back, and the optimizer steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed

from . import megatron_layout, megatron_parameters, ranks, results, window
from .loop_ranks import failed
from .megatron_parameters import Mine, Place, of_one
from .megatron_relations import AFTER, COPIES, Copies, copies
from .megatron_router import Router
from .megatron_router import relation as router_relation
from .megatron_window import Kept, Window, core
from .relation import OTHER_LAYOUT, Relation, micro_batches, not_checked
from .weights import judged

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_STEPPING = ("FP32Optimizer", "MixedPrecisionOptimizer", "ChainedOptimizer")
_LEAVES = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")
_RELEASES = ((0, 15), (0, 19))
_UNKNOWN = ("overlap_moe_expert_parallel_comm", "hybrid_context_parallel", "delay_wgrad_compute", "mtp_num_layers")
"""Settings with which schedules or losses keep a state of their own."""
_WEIGHTS = "micro-batch weights"
_MOST = 32
"""The number of micro-batches above which their weights are not measured."""
_RANDOM = 0.05


class MegatronRehearsal:
    """The rehearsal of the first window that trains, and of the step after it.

    Args:
        end: called on each rank with the name of what is trained, the window's size and the relations.
        goes_on: whether the run trains afterwards, from the same state.
        against: the sizes of another layout in which the window is to be computed.
        second: whether this is the run in that layout.
    """

    def __init__(
        self,
        end: Callable[[str, str, list[Relation]], None],
        *,
        goes_on: bool,
        against: Mapping[str, int] | None = None,
        second: bool = False,
    ) -> None:
        self._end, self._goes_on = end, goes_on
        self._against, self._second = against, second
        self._more: list[Relation] = []
        self._window: Window | None = None
        self.begun = self.over = self._stepping = False
        self._undo = contextlib.ExitStack()

    def schedule(self, original: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Run a window of the run's, and wait for the step after it."""
        if self._window is not None:
            self._publish([not_checked(COPIES, "the schedule ran twice before a step of megatron-core's optimizer")])
            return original(**named)
        why = _cannot(named)
        if why:
            self._publish([not_checked(COPIES, why)])
            return original(**named)
        self._window = Window(original, named)
        if self._second:
            self._publish(self._in_another_layout(self._window))
        found = self._window.record()
        optimizers = core("optimizer.optimizer")
        for name in _STEPPING:
            self._wrap(getattr(optimizers, name))
        return found

    def _wrap(self, kind: Any) -> None:
        own = kind.step

        @functools.wraps(own)
        def step(optimizer: Any) -> Any:
            if self._stepping or self.over:
                return own(optimizer)
            self._stepping = True
            try:
                return self._step(optimizer, lambda: own(optimizer))
            finally:
                self._stepping = False

        kind.step = step
        self._undo.callback(setattr, kind, "step", own)

    def _publish(self, relations: list[Relation]) -> None:
        self.over = True
        relations = relations + self._more
        self._undo.close()
        number = distributed.get_world_size() if distributed.is_initialized() else 1
        size = "not complete" if self._window is None else f"first window of {micro_batches(self._window.size)}"
        name = "megatron-core" if self._window is None else _inner_name(self._window.chunks[0])
        name += f" with {megatron_layout.shown_as(self._against or {})}" if self._second else ""
        self._end(name, size + (f" on {number} ranks{_layout()}" if number > 1 else ""), relations)

    def _in_another_layout(self, run: Window) -> list[Relation]:
        try:
            return megatron_layout.compared(run, self._against or {}, results.layout())
        except Exception as error:  # the run's own functions may fail with another window
            return [failed(OTHER_LAYOUT, error)]

    # -- the step

    def _step(self, optimizer: Any, own: Callable[[], Any]) -> Any:
        run = self._window
        assert run is not None
        leaves = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        unknown = [type(each).__name__ for each in leaves if type(each).__name__ not in _LEAVES]
        if unknown:
            self._publish([not_checked(COPIES, f"{unknown[0]} is not one of {', '.join(_LEAVES)}")])
            return own()
        if any(getattr(each, "grad_scaler", None) is not None for each in leaves):
            self._publish([not_checked(COPIES, "float16: the optimizer scales the loss")])
            return own()
        if not _any(run.reads):
            why = "the forward step does not read from the data iterator that the schedule gets"
            self._publish([not_checked(COPIES, why)])
            return own()
        kept = Kept(run.chunks)
        router = Router(run.chunks, run.config)
        try:
            with router.nothing_logged():
                held, relate = self._before(run, router, leaves)
        except Exception as error:  # the run's own functions may fail with another window
            kept.put_back()
            self._publish([failed(COPIES, error)])
            return own()
        kept.put_back()
        rate = _rate(leaves)
        found = own()
        self._publish(self._after(run, held, relate, optimizer, found, rate))
        return found

    def _before(self, run: Window, router: Router, leaves: list[Any]) -> Any:
        """Measure the window and its replays; returns what this rank holds, and what rank 0 makes of all."""
        chunks = run.chunks
        used = megatron_parameters.sketched(chunks)
        held = megatron_parameters.measured(chunks)
        own, strangers = _held_by(leaves, chunks)
        for each, is_optimized in zip(held, own, strict=True):
            each.optimized = is_optimized
        if self._against:
            why = megatron_layout.kept(run, self._against, results.layout())
            self._more = [not_checked(OTHER_LAYOUT, why)] if why else []

        def replayed(choice: list[int], scaled: bool = False) -> torch.Tensor:
            run.replay(choice, scaled=scaled)
            return megatron_parameters.sketched(chunks)

        several = [0] * max(run.size, 2)
        interleaved = run.config.virtual_pipeline_model_parallel_size is not None
        again = replayed([*range(run.size)], scaled=True) / window.SCALE
        if run.waits:
            run.replay([*range(run.size)], reduces=False)
            for each, (_, _, parameter) in zip(held, megatron_parameters.named(chunks), strict=True):
                each.local = of_one(parameter.main_grad)
        of_copies = replayed(several)
        with router.collecting():
            base = replayed(several * 2 if interleaved else [0])
        whole = router.gradient()
        without = None
        if router.present:
            with router.without_losses():
                replayed(several * 2 if interleaved else [0])
            without = router.gradient()
        alone = []
        if 1 < run.size <= _MOST and not router.depends_on_others:
            times = run.size if interleaved else 1
            alone = [base, *(replayed([place] * times) for place in range(1, run.size))]
        mine = (
            Mine(Place.mine(), held, bool(chunks[0].ddp_config.use_distributed_optimizer), run.tokens),
            torch.stack([used, again, of_copies, base, *alone]),
            router.seen(whole, without),
            strangers,
        )
        return held, functools.partial(_relations, _gathered(mine), run, router)

    def _after(
        self, run: Window, held: list[Any], relate: Any, optimizer: Any, found: Any, rate: float
    ) -> list[Relation]:
        """Measure the step, and return the relations on every rank."""
        gathers_later = any(chunk.ddp_config.overlap_param_gather for chunk in run.chunks)
        if gathers_later and not self._goes_on:
            for chunk in run.chunks:
                chunk.start_param_sync(force_sync=True)
        for each, (_, _, parameter) in zip(held, megatron_parameters.named(run.chunks), strict=True):
            each.after = of_one(parameter)
        skipped = isinstance(found, tuple) and not found[0]
        norm = found[1] if isinstance(found, tuple) and len(found) == 3 else None
        clip = float(getattr(optimizer.config, "clip_grad", 0.0) or 0.0)
        norm = None if norm is None or (not norm and not clip) else float(norm)
        if norm and 0 < clip < norm:
            rate *= clip / norm
        every = _gathered(([each.after for each in held], rate))
        later = gathers_later and self._goes_on
        relations = relate(every, norm, skipped, later) if every is not None else None
        return _everywhere(relations)


def _relations(
    every: list[Any] | None,
    run: Window,
    router: Router,
    stepped: list[Any],
    norm: float | None,
    skipped: bool,
    later: bool,
) -> list[Relation]:
    """The relations, on rank 0, from what all ranks measured before the step and after it."""
    assert every is not None
    of_ranks: list[Mine] = [each[0] for each in every]
    used, again, of_copies, base, *alone = torch.cat([each[1] for each in every], 1)
    size = float(used.norm()) or 1.0
    noise = float((again - used).norm()) / size
    if not bool(torch.isfinite(used).all() and used.any()):
        return [not_checked(COPIES, "the window's gradient is not finite, or 0")]
    if noise > _RANDOM:
        why = f"the window's gradient does not repeat itself from the same data and random state ({noise:.2g})"
        return [not_checked(COPIES, why)]
    found = [copies(of_copies, base, max(run.size, 2), noise)]
    per_token = bool(run.config.calculate_per_token_loss)
    if alone:
        found.append(_weights(of_ranks, used, torch.stack(alone), noise, per_token))
    elif run.size > 1:
        why = f"more than {_MOST} micro-batches" if run.size > _MOST else "global_aux_loss depends on all micro-batches"
        found.append(not_checked(_WEIGHTS, why))
    if router.present:
        found.append(router_relation(of_ranks, [each[2] for each in every], noise, per_token))
    for mine, (after, _) in zip(of_ranks, stepped, strict=True):
        for held, values in zip(mine.held, after, strict=True):
            held.after = values
    held_copies = Copies(of_ranks, noise)
    if len(of_ranks) > 1:
        tokens = sum(sum(mine.tokens) for mine in of_ranks if mine.place.tensor == 0) if per_token else None
        between = [held_copies.mean(tokens, noise), held_copies.across_ranks(), held_copies.relation()]
        found += [each for each in between if each is not None]
    found.append(held_copies.norm(norm, "the optimizer computes no norm (clip_grad is 0)"))
    found += [held_copies.trained(), held_copies.optimizer(max(each[3] for each in every))]
    if skipped or later:
        why = "the optimizer skipped the step" if skipped else "ranks gather parameters later (overlap_param_gather)"
        return [*found, not_checked(AFTER, why)]
    found.append(held_copies.moved(min(rate for _, rate in stepped)))
    return [*found, held_copies.after()] if len(of_ranks) > 1 else found


def _weights(of_ranks: list[Mine], used: torch.Tensor, alone: torch.Tensor, noise: float, per_token: bool) -> Relation:
    """The window's gradient is the mean over micro-batches, or over their tokens."""
    from . import ranks

    number = len(alone)
    laws = {"the mean over micro-batches": [1 / number] * number}
    if per_token:
        columns = [each.tokens for each in of_ranks if each.place.tensor == 0 and len(each.tokens) == number]
        counts = [sum(column) for column in zip(*columns, strict=True)]
        if not sum(counts):
            return not_checked(_WEIGHTS, "the loss function returns no number of tokens")
        laws = {"the mean over tokens": [each / sum(counts) for each in counts]}
    return judged(_WEIGHTS, [ranks.Mine(used, alone)], used, noise, laws)


def _held_by(leaves: list[Any], chunks: list[Any]) -> tuple[list[bool], int]:
    """Whether the optimizer holds each of this rank's parameters, and how many others it holds."""
    theirs: set[int] = set()
    for each in leaves:
        if getattr(each, "is_stub_optimizer", False):
            continue
        kind = type(each).__name__
        names = {"FP32Optimizer": (), "DistributedOptimizer": ("model_float16_groups", "model_fp32_groups")}
        for name in names.get(kind, ("float16_groups", "fp32_from_fp32_groups")):
            theirs |= {id(parameter) for group in getattr(each, name) for parameter in group}
        if kind == "FP32Optimizer":
            theirs |= {id(parameter) for group in each.param_groups for parameter in group["params"]}
    model = {id(parameter) for chunk in chunks for parameter in chunk.module.parameters()}
    return [id(parameter) in theirs for _, _, parameter in megatron_parameters.named(chunks)], len(theirs - model)


def _rate(leaves: list[Any]) -> float:
    groups = [group for each in leaves for group in each.param_groups if group["params"]]
    return min((float(group.get("lr", 0.0)) for group in groups), default=float("inf"))


def _cannot(named: dict[str, Any]) -> str:
    """Return why the window cannot be checked; empty if it can."""
    release = tuple(core("package_info").VERSION[:2])
    if not _RELEASES[0] <= release <= _RELEASES[1]:
        return f"megatron-core {'.'.join(map(str, release))} is not one of 0.15 to 0.19"
    model = named["model"]
    chunks = list(model) if isinstance(model, list) else [model]
    own = core("distributed").DistributedDataParallel
    other = [type(each).__name__ for each in chunks if type(each) is not own]
    if other:
        return f"{other[0]} is not megatron-core's DistributedDataParallel"
    if not core("parallel_state").model_parallel_is_initialized():
        return "megatron-core's parallel_state is not initialized: process groups of your own"
    config = core("utils").get_model_config(chunks[0])
    if config.fp8 or getattr(config, "fp4", None):
        return "the model keeps states of 8-bit formats between its forward passes"
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none") or getattr(config, "enable_cuda_graph", False):
        return "CUDA graphs"
    for name in _UNKNOWN:
        if getattr(config, name, None):
            return f"{name} of the configuration"
    for name in ("delay_wgrad_compute", "reuse_grad_buf_for_mxfp8_param_ag"):
        if any(getattr(each.ddp_config, name, False) for each in chunks):
            return f"{name} of DistributedDataParallel's configuration"
    if any(getattr(each.ddp_config, "num_distributed_optimizer_instances", 1) > 1 for each in chunks):
        return "num_distributed_optimizer_instances is above 1"
    return "" if isinstance(named.get("num_microbatches"), int) else "the number of micro-batches is not known"


def _inner_name(module: Any) -> str:
    while hasattr(module, "module"):
        module = module.module
    return type(module).__name__


def _layout() -> str:
    """The sizes that divide the model, such as `` (TP 2, CP 2)``."""
    state = core("parallel_state")
    kinds = {"TP": "tensor_model", "PP": "pipeline_model", "CP": "context", "EP": "expert_model", "DP": "data"}
    sizes = {name: getattr(state, f"get_{kind}_parallel_world_size")() for name, kind in kinds.items()}
    text = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f" ({text})" if text else ""


def _gathered(mine: Any) -> list[Any] | None:
    """What all ranks give, on rank 0; None on the others."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [mine]
    of_ranks: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
    distributed.gather_object(mine, of_ranks)
    return of_ranks


def _any(mine: bool) -> bool:
    """Whether any rank says so."""
    return any(ranks.gathered(mine))


def _everywhere(relations: Any) -> list[Relation]:
    """What rank 0 found, on every rank."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return list(relations)
    found = [relations]
    distributed.broadcast_object_list(found)
    return list(found[0])


def wrapped(begin: Callable[[], MegatronRehearsal | None], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a schedule that the rehearsal follows, if there is one.

    Args:
        begin: returns the rehearsal of this process; None if there is none.
        original: megatron-core's function.
    """

    @functools.wraps(original)
    def schedule(*given: Any, **named: Any) -> Any:
        rehearsal = None if given or named.get("forward_only") else begin()
        if rehearsal is None or rehearsal.over:
            return original(*given, **named)
        return rehearsal.schedule(original, named)

    schedule._rehearses = True  # type: ignore[attr-defined]
    return schedule


def interposed(module: Any, begin: Callable[[], MegatronRehearsal | None]) -> None:
    """Wrap the schedules of megatron-core's module."""
    for name in SCHEDULES:
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, "_rehearses"):
            setattr(module, name, wrapped(begin, original))
