"""Reads a run's gradients: whole on each rank, or sharded by DeepSpeed's ZeRO or by FSDP.

``torch.autograd.grad`` computes a micro-batch's own gradient: it adds to no ``.grad``, so nothing is reduced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import sketches

_KNOWN = ("BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


class Whole:
    """Each rank holds all gradients: one process, or DistributedDataParallel.

    Args:
        model: the model that ``training_step`` receives.
    """

    steps_in_backward: Any = None
    """The object whose ``step`` the backward pass calls; afterwards the gradients are gone."""
    shows_ranks = True
    """Whether `window` yields this rank's gradients, not the gradients gathered from all ranks."""

    def __init__(self, model: Any) -> None:
        inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        self.inner: torch.nn.Module = inner
        self.named = dict(inner.named_parameters())
        self.parameters = [each for each in self.named.values() if each.requires_grad]
        self.sizes = [self._size(each) for each in self.parameters]

    def _size(self, parameter: Any) -> int:
        return int(parameter.numel())

    def cannot(self) -> str:
        """Return why the gradients cannot be read or computed; empty if they can."""
        if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in self.parameters):
            return "the backward pass consumes the gradients (layer-wise optimizer)"
        return ""

    def coarse(self) -> str:
        """Return why a small step of the weights cannot be tried; empty if it can."""
        kinds = {str(each.dtype) for each in self.parameters} - {"torch.float32", "torch.float64"}
        return f"weights in {', '.join(sorted(kinds))} are too coarse for a small step" if kinds else ""

    def window(self) -> Iterator[torch.Tensor | None]:
        """Yield the window's full gradient of each parameter. Every rank must consume all of them."""
        yield from (each.grad for each in self.parameters)

    def own(self, loss: Callable[[], torch.Tensor], parts: sketches.Parts | None = None) -> list[torch.Tensor | None]:
        """Return this rank's gradient of a loss, for each parameter.

        Args:
            loss: computes the loss.
            parts: takes each gradient as soon as it is computed. The result then has no numbers.
        """
        try:
            return self._by_autograd(loss, parts)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
        with self.aside():  # re-entrant checkpointing supports only backward()
            loss().backward()
            made = [each.grad for each in self.parameters]
            return made if parts is None else _into(parts, made)

    def _by_autograd(
        self, loss: Callable[[], torch.Tensor], parts: sketches.Parts | None = None
    ) -> list[torch.Tensor | None]:
        made = loss()  # first: FSDP2's leaves exist only after the forward pass
        refuse_reentrant(made)
        leaves = self.leaves()
        hooks = []
        if parts is not None:
            hooks = [each.register_hook(functools.partial(_taken, parts, at)) for at, each in enumerate(leaves)]
        try:
            return list(torch.autograd.grad(made, leaves, allow_unused=True))
        finally:
            for each in hooks:
                each.remove()

    def leaves(self) -> Sequence[torch.Tensor]:
        """Return the tensors that the model computes with."""
        return self.parameters

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the parameters' gradients within the context, and restore them."""
        kept = [each.grad for each in self.parameters]
        for each in self.parameters:
            each.grad = None
        try:
            yield
        finally:
            for each, gradient in zip(self.parameters, kept, strict=True):
                each.grad = gradient

    def after_forward(self) -> None:
        """Clean up after a forward pass without a backward pass."""


class Zero(Whole):
    """DeepSpeed's engine: accelerate calls its step within the backward pass.

    Args:
        engine: a ``DeepSpeedEngine``.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.module)
        self.steps_in_backward = engine
        self._stage = int(engine.zero_optimization_stage())
        self.shows_ranks = not self._stage or type(engine.optimizer).__name__ == "BF16_Optimizer"

    def _size(self, parameter: Any) -> int:
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    def cannot(self) -> str:
        kind = type(self.steps_in_backward.optimizer)
        if self.steps_in_backward.fp16_enabled():
            return "DeepSpeed's engine scales the loss (fp16)"
        if self._stage == 3 and any(getattr(each, "_z3_leaf", False) for each in self.inner.modules()):
            return "ZeRO-3 handles an MoE model's experts in its own backward hooks (z3_leaf)"
        if kind.__module__.startswith("deepspeed.") and kind.__name__ not in _KNOWN:
            return f"DeepSpeed's {kind.__name__} is not known: its gradient buffers cannot be read"
        return ""

    def coarse(self) -> str:
        return "weights are sharded (ZeRO-3)" if self._stage == 3 else super().coarse()

    def window(self) -> Iterator[torch.Tensor | None]:
        # `deepspeed.utils.safe_get_full_grad` prefers an existing `.grad` to the optimizer's own sums.
        for each in self.parameters:
            if (sums := getattr(each, "_hp_grad", None)) is not None:
                yield sums
            elif hasattr(each, "ds_id"):
                yield each._z3_optimizer.get_fp32_grad_for_param(each)
            elif hasattr(each, "_hp_mapping"):
                yield each.get_full_hp_grad()
            else:
                yield each.grad

    def own(self, loss: Callable[[], torch.Tensor], parts: sketches.Parts | None = None) -> list[torch.Tensor | None]:
        return self._by_autograd(loss, parts)  # backward() would reduce


class FullyShard(Whole):
    """FSDP2: the model computes with parameters that are gathered temporarily."""

    shows_ranks = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._modules = [each for each in model.modules() if is_fully_sharded(each)]

    def coarse(self) -> str:
        return "weights are sharded (FSDP2)"

    def window(self) -> Iterator[torch.Tensor | None]:
        yield from (None if each.grad is None else _full(each.grad) for each in self.parameters)

    def leaves(self) -> Sequence[torch.Tensor]:
        together = {
            id(one.sharded_param): one.unsharded_param
            for module in self._modules
            for group in _groups(module._get_fsdp_state())
            for one in group.fsdp_params
        }
        return [together.get(id(each), each) for each in self.parameters]

    def own(self, loss: Callable[[], torch.Tensor], parts: sketches.Parts | None = None) -> list[torch.Tensor | None]:
        with self.aside():  # unused parameters may get zeros
            try:
                return self._by_autograd(loss, parts)
            finally:
                self.after_forward()

    def after_forward(self) -> None:
        for module in self._modules:
            module.reshard()


class FlatShards(Whole):
    """FSDP1: each wrapped module's parameters are one flat parameter, of which a rank holds a part.

    Args:
        model: the outermost ``FullyShardedDataParallel``.
    """

    shows_ranks = False

    def __init__(self, model: Any) -> None:
        self._modules = model.fsdp_modules(model)
        self._handles = [each._handle for each in self._modules if each._handle is not None]
        super().__init__(model)
        self.named = {name.replace("_fsdp_wrapped_module.", ""): each for name, each in self.named.items()}

    def _size(self, parameter: Any) -> int:
        flats = [each.flat_param for each in self._handles if each.flat_param._params is not None]
        sizes = [each for flat in flats for each in zip(flat._params, flat._numels, strict=True)]
        return next((int(size) for own, size in sizes if own is parameter), super()._size(parameter))

    def cannot(self) -> str:
        if any(each.flat_param._params is None for each in self._handles):
            return "FSDP1 without use_orig_params"
        if any(each._offload_params for each in self._handles):
            return "FSDP1 offloads the gradients to the CPU"
        known = {id(own) for each in self._handles for own in each.flat_param._params}
        if not known.issuperset(map(id, self.parameters)):
            return "FSDP1 leaves out some of the parameters"
        return super().cannot()

    def coarse(self) -> str:
        return "weights are sharded (FSDP1)"

    def window(self) -> Iterator[torch.Tensor | None]:
        yield from self._split([self._gathered(each) for each in self._handles])

    def _gathered(self, handle: Any) -> torch.Tensor | None:
        flat, mine = handle.flat_param, handle.flat_param.grad
        if not handle.uses_sharded_strategy:
            return mine
        part = torch.zeros_like(flat._local_shard) if mine is None else mine
        parts = part.new_empty(part.numel() * handle.world_size)
        torch.distributed.all_gather_into_tensor(parts, part.contiguous(), group=handle.process_group)
        return parts

    def _split(self, flats: list[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        parts: dict[int, torch.Tensor] = {}
        for handle, flat in zip(self._handles, flats, strict=True):
            if flat is not None:
                sizes = handle.flat_param._numels_with_padding
                pieces = flat[: sum(sizes)].split(sizes)
                kept = [each for each, pad in zip(pieces, handle.flat_param._is_padding_mask, strict=True) if not pad]
                parts |= {id(own): each for own, each in zip(handle.flat_param._params, kept, strict=True)}
        yield from (parts.get(id(each)) for each in self.parameters)

    def own(self, loss: Callable[[], torch.Tensor], parts: sketches.Parts | None = None) -> list[torch.Tensor | None]:
        trained = set(map(id, self.parameters))
        flats = [each.flat_param for each in self._handles]
        used = [each for each in flats if not trained.isdisjoint(map(id, each._params))]
        with self.aside():
            made = loss()
            refuse_reentrant(made)
            kept = [each.requires_grad for each in used]
            for each in used:  # a forward pass without adapters, which are frozen in it, freezes the flat parameter
                each.requires_grad_(True)
            made_of = dict(zip(map(id, used), torch.autograd.grad(made, used, allow_unused=True), strict=True))
            for each, requires in zip(used, kept, strict=True):
                each.requires_grad_(requires)
        self.after_forward()
        gradients = list(self._split([made_of.get(id(each)) for each in flats]))
        return gradients if parts is None else _into(parts, gradients)

    def after_forward(self) -> None:
        from torch.distributed.fsdp import _runtime_utils

        for module in self._modules:  # the outermost one stays gathered, so that an update of it would be lost
            handle = module._handle
            if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                _runtime_utils._reshard(module, handle, True)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        flats = [each.flat_param for each in self._handles]
        kept = [each.grad for each in flats]
        with super().aside():
            try:
                for each in flats:
                    each.grad = None
                yield
            finally:
                for each, gradient in zip(flats, kept, strict=True):
                    each.grad = gradient


def refuse_reentrant(loss: torch.Tensor) -> None:
    """Raise if a loss's graph has re-entrant checkpointing: parameters within it are no leaves of the graph.

    ``torch.autograd.grad`` refuses it only if another leaf is before it. Adapters within it just get no gradient.
    """
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise RuntimeError("re-entrant checkpointing (use_reentrant=True) supports only backward()")
        left += [each for each, _ in node.next_functions]


def _into(parts: sketches.Parts, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    parts.clear()  # of a backward pass that was not complete
    for place, each in enumerate(gradients):
        parts.add(place, each)
    return [None] * len(gradients)


def _taken(parts: sketches.Parts, place: int, gradient: torch.Tensor) -> torch.Tensor:
    """Take a gradient, and leave one number of memory in its place."""
    parts.add(place, gradient)
    return gradient.new_zeros(()).expand_as(gradient)


def _groups(state: Any) -> Sequence[Any]:
    """Return the groups of parameters that are gathered together; torch before 2.13 has one or none per module."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups  # type: ignore[no-any-return]
    return [each for each in (state._fsdp_param_group,) if each is not None]


def is_fully_sharded(module: Any) -> bool:
    """Whether a module is one of FSDP2's."""
    return hasattr(module, "set_requires_gradient_sync") and hasattr(module, "_get_fsdp_state")


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def of(trainer: Any, model: Any) -> tuple[Whole, str]:
    """Return how to read the trainer's gradients, and why that is impossible; empty if it is possible."""
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    if kind == "DEEPSPEED":
        where: Whole = Zero(model)
    elif kind == "FSDP" and getattr(trainer.accelerator, "is_fsdp2", False):
        where = FullyShard(model)
    elif kind == "FSDP" and hasattr(model, "fsdp_modules") and hasattr(model, "_handle"):
        where = FlatShards(model)
    else:
        where = Whole(model)
        if kind in ("FSDP", "MEGATRON_LM", "TP"):
            return where, f"the gradients are sharded ({kind})"
        if trainer.args.n_gpu > 1:
            return where, "several GPUs in one process (torch.nn.DataParallel)"
    return where, where.cannot()
