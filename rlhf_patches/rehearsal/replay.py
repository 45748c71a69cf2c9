"""Replays the micro-batches of a window, each from the state before its first run."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import labels, pieces, ranks, sharding, sketches, states

_OF_ROUTERS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
"""The coefficients of a router's loss in the models of transformers and in TRL's trainers."""

_OF_MODELS = ("input_ids", "attention_mask", "position_ids")


@dataclass
class Call:
    """One call of ``compute_loss`` in the window."""

    inputs: Any
    more: dict[str, Any]
    random: states.Random
    buffers: states.Buffers
    loss: float = float("nan")


@dataclass
class Step:
    """One call of ``training_step``."""

    inputs: Any
    random: states.Random
    calls: list[Call] = field(default_factory=list)


class Kept:
    """A snapshot of all state that a replay may change."""

    def __init__(self, trainer: Any, model: torch.nn.Module) -> None:
        self._buffers, self._counters = states.Buffers(model), states.Counters(model)
        self._attributes = [states.Attributes(each) for each in (trainer, trainer.state)]
        self._random = states.Random.now()

    def put_back(self) -> None:
        self._buffers.put_back()
        self._counters.put_back()
        for each in self._attributes:
            each.put_back()
        self._random.put_back()


class Replay:
    """Replays micro-batches of one trainer.

    Args:
        trainer: a ``transformers.Trainer``.
        model: the model that ``training_step`` receives.
        where: where the model's parameters and gradients are.
        step: the trainer's own ``training_step``.
        loss: the trainer's own ``compute_loss``.
        little: whether to keep no whole gradients (``--memory low``).
    """

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        where: sharding.Whole,
        step: Callable[..., Any],
        loss: Callable[..., Any],
        little: bool = False,
    ) -> None:
        self.little = little
        self._trainer, self._model, self._where, self._step, self._loss = trainer, model, where, step, loss
        self._inner = where.inner
        self._start = Kept(trainer, where.inner)
        self._of_its_own_tokens = False

    def again(self, call: Call, more: Mapping[str, Any]) -> torch.Tensor:
        """Compute a call's loss again, from the state before the call."""
        more = {name: value for name, value in more.items() if name != "return_outputs"}
        with self.restored(call):
            made = self._loss(self._inner, states.copy_of(call.inputs), **more)
        loss = made[0] if isinstance(made, tuple) else made
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(f"compute_loss returns a {type(loss).__name__}, not a scalar tensor")
        return loss.reshape(())

    def restored(self, call: Call) -> contextlib.AbstractContextManager[Any]:
        """Restore the state before a call."""
        call.buffers.put_back()
        call.random.put_back()
        context: contextlib.AbstractContextManager[Any] = self._trainer.compute_loss_context_manager()
        return context

    def logits(self, call: Call, inputs: Any = None, random: states.Random | None = None) -> torch.Tensor:
        """Compute the logits of inputs from the state before a call; by default of the call's, without labels."""
        if inputs is None:
            inputs = {name: value for name, value in call.inputs.items() if name in _OF_MODELS}
        with torch.no_grad(), self.restored(call):
            if random is not None:
                random.put_back()
            made: torch.Tensor = self._inner(**states.copy_of(inputs)).logits
        return made

    def draws(self, call: Call) -> bool:
        """Whether a micro-batch's loss depends on random numbers."""
        losses = []
        for random in (call.random, call.random.another()):
            losses.append(float(self.alone(replace(call, random=random)).detach()))
            self._where.after_forward()
        return losses[0] != losses[1]

    def alone(self, call: Call) -> torch.Tensor:
        """Compute the loss of a micro-batch alone."""
        with self.one_micro_batch():
            try:
                if self._of_its_own_tokens:
                    return self.again(self._with_its_own_total(call), {}) / self._trainer.accelerator.num_processes
                return self.again(call, {})
            except TypeError:  # the loss divides by num_items_in_batch, also if it is None
                count = labels.counts(call.inputs).get(labels.PREDICTED)
                if count is None or "num_items_in_batch" not in call.more:
                    raise
                number = torch.tensor(count, device=self._trainer.args.device)
                ranks_of = self._trainer.accelerator.num_processes if self._averages() else 1
                return self.again(call, {"num_items_in_batch": number}) / ranks_of

    def _averages(self) -> bool:
        return bool(getattr(self._trainer.args, "average_tokens_across_devices", False))

    @contextlib.contextmanager
    def one_micro_batch(self) -> Iterator[None]:
        """Set the trainer's numbers of micro-batches to 1 within the context."""
        args, trainer = self._trainer.args, self._trainer
        # TRL's GRPO multiplies by steps_per_generation.
        names = ("gradient_accumulation_steps", "steps_per_generation")
        before = {name: getattr(args, name) for name in names if hasattr(args, name)}
        current = getattr(trainer, "current_gradient_accumulation_steps", None)
        trainer.current_gradient_accumulation_steps = 1
        try:
            for name in before:
                setattr(args, name, 1)
            yield
        finally:
            trainer.current_gradient_accumulation_steps = current
            for name, value in before.items():
                setattr(args, name, value)

    def own(self, call: Call, scale: float = 1.0) -> list[torch.Tensor | None]:
        """Compute the gradients of a micro-batch alone, with its loss times ``scale``."""
        return self._where.own(lambda: self.alone(call) * scale)

    def own_sketch(self, call: Call, scale: float = 1.0) -> torch.Tensor:
        """Reduce the gradients of a micro-batch alone to a few numbers."""
        if not self.little:
            return self.sketch(self.own(call, scale))
        parts = sketches.Parts(self._where.sizes)
        self._where.own(lambda: self.alone(call) * scale, parts)
        return parts.whole()

    def sketch(self, gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """Reduce gradients to a few numbers, by the same map on each rank."""
        return sketches.sketch(gradients, self._where.sizes)

    def entries(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the number of a sketch's entries of each parameter, and the parameters' names."""
        trained = {id(each): name for name, each in self._where.named.items()}
        names = tuple(trained[id(each)] for each in self._where.parameters)
        return tuple(min(size, sketches.BUCKETS) for size in self._where.sizes), names

    def grad_scale(self) -> float:
        """Return the float16 gradient scaler's factor; 1 without a scaler."""
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    def carries_its_total(self, call: Call) -> bool:
        """Whether the loss divides by a number from the micro-batch's inputs, as TRL's losses do."""
        if _total(call) is None:
            return False
        with self.one_micro_batch():
            one = float(self.again(call, {}).detach())
            half = float(self.again(_with_total(call, _total(call) * 2), {}).detach())
        self._where.after_forward()
        return abs(half * 2 - one) <= 1e-3 * abs(one)

    def generations(self, calls: list[Call]) -> ranks.Generations | None:
        """Return the generations of micro-batches that give the number of tokens; None if they are not known.

        Later replays give each micro-batch the number of its own tokens instead. TRL's losses that are sums over
        tokens divide by the tokens of a whole generation, and multiply by the number of ranks.
        """
        kind = type(self._trainer)
        functions = [each for each in (getattr(kind, "_compute_loss", None), kind.compute_loss) if each is not None]
        masks = [mask for call in calls if (mask := labels.completion(call.inputs)) is not None]
        if len(masks) < len(calls) or not all(pieces.written_in(each).startswith("trl.") for each in functions):
            return None
        self._of_its_own_tokens = True
        size = getattr(self._trainer.args, "steps_per_generation", None) or len(calls)
        totals = tuple(float(_total(call)) for call in calls)
        return ranks.Generations(size, tuple(float(mask.sum()) for mask in masks), totals)

    def _with_its_own_total(self, call: Call) -> Call:
        mask, total = labels.completion(call.inputs), _total(call)
        count = 1 if mask is None else max(1, int(mask.sum()))
        return _with_total(call, torch.full_like(total, count) if isinstance(total, torch.Tensor) else count)

    def of_routers(self, calls: list[Call], own: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the part of the own gradients that comes from the routers' loss, a mean independent of the tokens."""
        with self.without_routers_loss() as has_loss:
            if not has_loss:
                return None
            without = [self.own_sketch(call) for call in calls]
        return torch.stack(own) - torch.stack(without)

    def without_routers_loss(self) -> contextlib.AbstractContextManager[bool]:
        """Disable the routers' loss within the context; yields whether there was one."""
        owners = [vars(each) for each in (self._trainer, *self._inner.modules())]
        return states.zeroed([(own, name) for own in owners for name in _OF_ROUTERS if name in own])

    def of_pieces(self, call: Call, cut: pieces.Cut, most: int) -> ranks.Mine:
        """Return the pieces' own gradients without dropout, and as ``used`` the gradient of all pieces together."""

        def of(inputs: Any) -> Call:
            return Call(inputs, {}, call.random, call.buffers)

        with self.calm():
            own = [self.own_sketch(of(each)) for each in cut.pieces]
            for _ in range(most - len(own)):  # a rank with more pieces may need this rank's shards
                self.own_sketch(of(cut.pieces[-1]))
            whole = self.own_sketch(of(cut.whole))
            drawn = self.draws(of(cut.whole))
        if drawn:
            return ranks.Mine(problem="the loss uses random numbers")
        return ranks.Mine(whole, torch.stack(own), counts=labels.counts_of(cut.pieces))

    def rounding(self, call: Call, inputs: Any) -> ranks.Mine:
        """Return as ``noise`` how far the gradient moves if the embeddings move by a unit in the last place."""
        again = Call(inputs, {}, call.random, call.buffers)
        with self.calm():
            one = self.own_sketch(again)
            with pieces.embeddings_moved(self._inner):
                other = self.own_sketch(again)
        return ranks.Mine(one, noise=float((other - one).norm()) / (float(one.norm()) or 1.0))

    @contextlib.contextmanager
    def calm(self) -> Iterator[None]:
        """Disable dropout and the routers' loss within the context."""
        with pieces.without_dropout(self._inner), self.without_routers_loss():
            yield

    def made(self, steps: list[Step], alone: bool = False, calm: bool = False) -> torch.Tensor:
        """Return the gradient of a window by the trainer's own steps.

        Args:
            alone: of this rank only.
            calm: without dropout and the routers' loss.
        """
        trainer, accelerator, args = self._trainer, self._trainer.accelerator, self._trainer.args
        self._start.put_back()
        state = accelerator.gradient_state
        before = args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps, state.sync_gradients
        args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = len(steps)
        if before[1] > 1:
            accelerator.gradient_accumulation_steps = len(steps)
        try:
            with self._where.aside(), self.calm() if calm else contextlib.nullcontext():
                taken = len(inspect.signature(trainer.get_batch_samples).parameters)
                batches = iter([states.copy_of(step.inputs) for step in steps])
                samples, items = trainer.get_batch_samples(*(batches, len(steps), args.device)[:taken])
                counted = (items,) if len(inspect.signature(self._step).parameters) > 2 else ()
                for place, (step, sample) in enumerate(zip(steps, samples, strict=True)):
                    last = place == len(steps) - 1
                    state._set_sync_gradients(last)
                    reduces = (last and not alone) or self._model is self._inner
                    apart = contextlib.nullcontext() if reduces else self._model.no_sync()
                    step.random.put_back()
                    with apart:
                        self._step(self._model, sample, *counted)
                return self.sketch(self._where.window()) / self.grad_scale()
        finally:
            args.gradient_accumulation_steps = before[0]
            if before[1] > 1:
                accelerator.gradient_accumulation_steps = before[1]
            state._set_sync_gradients(before[2])


def _total(call: Call) -> Any:
    """Return the micro-batch's own ``num_items_in_batch``; None if it has none."""
    total = call.inputs.get("num_items_in_batch") if isinstance(call.inputs, Mapping) else None
    return total if isinstance(total, (int, float, torch.Tensor)) else None


def _with_total(call: Call, total: Any) -> Call:
    return Call({**call.inputs, "num_items_in_batch": total}, {}, call.random, call.buffers)
