"""The first window of a ``transformers.Trainer``, or of whatever stands on it, as its own loop takes it.

Each call of ``compute_loss`` is noted with the random state that it found. When the window's gradient is made, before
it is clipped or used, each micro-batch is taken once more by itself. The window stays the run's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import labels, parameters, pieces, ranks, sharding, sketches, states, window
from .relation import Relation, Verdict, micro_batches, not_held

WINDOW = "the window's weights"
COPIES = "copies of a micro-batch"
SLOPE = "the loss's slope"
RANKS = "one gradient on all ranks"
_SCALE = 0.7310585786300049
"""A loss times this, its gradient divided by it: the same but for rounding."""
_SAME = 1e-6
_SMOOTH = 0.03
_OF_ROUTERS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
"""By what models of transformers, and TRL's trainers, multiply a router's loss."""
_FINE = 1e-5


class Ended(SystemExit):
    """The rehearsal is over, and the program with it."""


@dataclass
class _Call:
    """One call of ``compute_loss`` in the window."""

    inputs: Any
    more: dict[str, Any]
    random: states.Random
    buffers: states.Buffers
    loss: float = float("nan")


@dataclass
class _Step:
    """One call of ``training_step``."""

    inputs: Any
    random: states.Random
    calls: list[_Call] = field(default_factory=list)


class _Kept:
    """All that a replay may change, as it is now."""

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


class Rehearsal:
    """Of one trainer.

    Args:
        trainer: a ``transformers.Trainer``; it is given two attributes until its first window is over.
        end: called on each rank with the relations; what it raises ends the training.
        goes_on: whether the run trains afterwards, so that nothing may be different then.
    """

    def __init__(self, trainer: Any, end: Callable[[list[Relation]], None], *, goes_on: bool = False) -> None:
        self._trainer, self._end, self._goes_on = trainer, end, goes_on
        self._steps: list[_Step] = []
        self._start: _Kept | None = None
        self._model: Any = None
        self._records = False
        self.trained_on: labels.Trained | None = None

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Until the first window of what is trained meanwhile is over."""
        mine = vars(self._trainer)
        before = {name: mine[name] for name in ("training_step", "compute_loss") if name in mine}
        self._engine: tuple[Any, Any] | None = None
        self._step, self._loss = self._trainer.training_step, self._trainer.compute_loss

        @functools.wraps(self._step)
        def training_step(*given: Any, **named: Any) -> Any:
            return self._in_step(*given, **named)

        @functools.wraps(self._loss)
        def compute_loss(*given: Any, **named: Any) -> Any:
            return self._in_loss(*given, **named)

        # What it stands for, to whoever looks for the class's own: patches do.
        if (function := getattr(self._loss, "__func__", None)) is not None:
            compute_loss.__func__ = function  # type: ignore[attr-defined]
        self._trainer.training_step, self._trainer.compute_loss = training_step, compute_loss
        self._before = before
        try:
            yield
        finally:
            self._take_off()

    def _take_off(self) -> None:
        if self._engine is not None:
            engine, before = self._engine
            vars(engine).pop("step", None)
            vars(engine).update(before)
            self._engine = None
        for name in ("training_step", "compute_loss"):
            if name in self._before:
                setattr(self._trainer, name, self._before[name])
            else:
                vars(self._trainer).pop(name, None)

    # -- what the loop calls

    def _in_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        if self._start is None:
            self._model = model
            self._where, self._why_not = sharding.of(self._trainer, model)
            self._inner = self._where.inner
            self._start = _Kept(self._trainer, self._inner)
            if (engine := self._where.steps_in_backward) is not None:
                self._hold_back(engine)
        self._steps.append(_Step(states.copy_of(inputs), states.Random.now()))
        self._records = True
        try:
            made = self._step(model, inputs, *more, **named)
        finally:
            self._records = False
        if self._trainer.accelerator.sync_gradients and self._where.steps_in_backward is None:
            self._finish()
        return made

    def _hold_back(self, engine: Any) -> None:
        """Have an engine's step wait until its window's gradient was read."""
        before, step = {name: value for name, value in vars(engine).items() if name == "step"}, engine.step

        def after_the_window(*given: Any, **named: Any) -> Any:
            if self._records and engine.is_gradient_accumulation_boundary():
                self._records = False
                self._finish()
            return step(*given, **named)

        vars(engine)["step"] = after_the_window
        self._engine = engine, before

    def _finish(self) -> None:
        self._take_off()
        try:
            relations = self._held()
        except Exception as error:  # of the user's code, in calls that the run itself does not make
            traceback.print_exc(file=sys.stderr)
            relations = [not_held(WINDOW, f"{type(error).__name__}: {error}")]
        self._end(relations)

    @property
    def size(self) -> str:
        """Of the window."""
        each, number = micro_batches(len(self._steps)), self._trainer.accelerator.num_processes
        return f"{each} on each of {number} ranks" if number > 1 else each

    def _in_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        if not self._records:
            return self._loss(model, inputs, *more, **named)
        given = {**dict(zip(("return_outputs", "num_items_in_batch"), more, strict=False)), **named}
        call = _Call(states.copy_of(inputs), given, states.Random.now(), states.Buffers(self._inner))
        self._steps[-1].calls.append(call)
        made = self._loss(model, inputs, *more, **named)
        loss = made[0] if isinstance(made, tuple) else made
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            call.loss = float(loss.detach())
        return made

    # -- what is held

    def _held(self) -> list[Relation]:
        """All relations; the same on each rank."""
        found: list[Relation] = []
        if why := self._cannot():
            found.append(not_held(WINDOW, why))
        else:
            found += self._of_the_window()
            found.append(parameters.optimizers(self._trainer.optimizer, self._where.named))
        calls = self._steps[0].calls
        tokenizer = getattr(self._trainer, "processing_class", None)
        self.trained_on = labels.read(calls[0].inputs if calls else self._steps[0].inputs, tokenizer)
        return [*found, self.trained_on.relation()] if self.trained_on is not None else found

    def _cannot(self) -> str:
        if self._why_not:
            return self._why_not
        calls = sum(len(step.calls) for step in self._steps)
        if calls != len(self._steps):
            return f"compute_loss was called {calls} times in {micro_batches(len(self._steps))}"
        return ""

    def _of_the_window(self) -> list[Relation]:
        end = _Kept(self._trainer, self._inner)
        calls = [step.calls[0] for step in self._steps]
        try:
            told = parameters.Told(self._where.named)
            self._used = self._sketch(told.noted(self._where.window())) / self._grad_scale()
            mine = self._attempt(lambda: self._own_of(calls))
            of_ranks = ranks.gathered(mine)
            problem = next((f"rank {rank}: {each.problem}" for rank, each in enumerate(of_ranks) if each.problem), "")
            if problem:
                return [not_held(WINDOW, problem), told.relation()]
            self._noise = max(each.noise for each in of_ranks)
            found = [self._judged(WINDOW, of_ranks)]
            if len(of_ranks) > 1 and self._where.shows_ranks:
                found.append(self._agree(of_ranks))
            found.append(self._copies(of_ranks))
            slope = self._attempt(self._slope)
            found.append(slope if isinstance(slope, Relation) else not_held(SLOPE, slope.problem))
            found.append(self._one_by_one(calls[0]))
            return [*found, told.relation()]
        finally:
            end.put_back()

    def _attempt(self, what: Callable[[], Any]) -> Any:
        """What a replay gives; what it raises is said, and stops no rank."""
        try:
            return what()
        except Exception as error:  # of the user's code, in a call that the run itself does not make
            traceback.print_exc(file=sys.stderr)
            return ranks.Mine(problem=f"{type(error).__name__}: {error}")

    def _own_of(self, calls: list[_Call]) -> ranks.Mine:
        """What this rank's micro-batches give by themselves."""
        # Each rank makes the same calls, whatever it finds: a loss may gather from all of them.
        problem = ""
        for place, call in enumerate(calls):
            again = float(self._again(call, call.more).detach())
            self._where.after_forward()
            if not abs(again - call.loss) <= _SAME * max(1.0, abs(call.loss)) and not problem:
                why = f"{again:.6g} after {call.loss:.6g} for micro-batch {place}"
                problem = f"this loss does not repeat itself from the same state ({why})"
        own = [self._sketch(self._own(call)) for call in calls]
        first = own[0]
        other = self._sketch(self._own(calls[0], scale=_SCALE)) / _SCALE
        noise = float((other - first).norm()) / (float(first.norm()) or 1.0)
        counts = labels.counts_of([call.inputs for call in calls])
        carries = [self._carries_its_total(call) for call in calls]
        evenly = self._of_routers(calls, own)
        return ranks.Mine(self._used, torch.stack(own), evenly, counts, noise, all(carries), problem)

    def _again(self, call: _Call, more: Mapping[str, Any]) -> torch.Tensor:
        """The loss of a call, from the state that it found."""
        call.buffers.put_back()
        call.random.put_back()
        more = {name: value for name, value in more.items() if name != "return_outputs"}
        with self._trainer.compute_loss_context_manager():
            made = self._loss(self._inner, states.copy_of(call.inputs), **more)
        loss = made[0] if isinstance(made, tuple) else made
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(f"compute_loss returns {type(loss).__name__}, no scalar tensor")
        return loss.reshape(())

    def _alone(self, call: _Call) -> torch.Tensor:
        """The loss of a micro-batch by itself."""
        with self._one_micro_batch():
            try:
                return self._again(call, {})
            except TypeError:  # it divides by the number, whatever it is
                count = labels.counts(call.inputs).get(labels.PREDICTED)
                if count is None or "num_items_in_batch" not in call.more:
                    raise
                number = torch.tensor(count, device=self._trainer.args.device)
                ranks_of = self._trainer.accelerator.num_processes if self._averages() else 1
                return self._again(call, {"num_items_in_batch": number}) / ranks_of

    def _averages(self) -> bool:
        return bool(getattr(self._trainer.args, "average_tokens_across_devices", False))

    @contextlib.contextmanager
    def _one_micro_batch(self) -> Iterator[None]:
        args, trainer = self._trainer.args, self._trainer
        before = args.gradient_accumulation_steps, getattr(trainer, "current_gradient_accumulation_steps", None)
        args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = 1
        try:
            yield
        finally:
            args.gradient_accumulation_steps, trainer.current_gradient_accumulation_steps = before

    def _own(self, call: _Call, scale: float = 1.0) -> list[torch.Tensor | None]:
        return self._where.own(lambda: self._alone(call) * scale)

    def _sketch(self, gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
        return sketches.sketch(gradients, self._where.sizes)

    def _grad_scale(self) -> float:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    def _carries_its_total(self, call: _Call) -> bool:
        """Whether the loss divides by a number that its micro-batch brings: of the whole window, as TRL's do."""
        total = call.inputs.get("num_items_in_batch") if isinstance(call.inputs, Mapping) else None
        if not isinstance(total, (int, float, torch.Tensor)):
            return False
        with self._one_micro_batch():
            one = float(self._again(call, {}).detach())
            twice = {**call.inputs, "num_items_in_batch": total * 2}
            half = float(self._again(_Call(twice, {}, call.random, call.buffers), {}).detach())
        self._where.after_forward()
        return abs(half * 2 - one) <= 1e-3 * abs(one)

    def _judged(
        self,
        name: str,
        of_ranks: list[ranks.Mine],
        used: torch.Tensor | None = None,
        laws: dict[str, list[float]] | None = None,
    ) -> Relation:
        own = torch.cat([each.own for each in of_ranks])
        laws = laws or ranks.laws(of_ranks)
        parts = [each.evenly for each in of_ranks if each.evenly is not None]
        evenly = torch.cat(parts) if len(parts) == len(of_ranks) else None
        found = window.judge(self._used if used is None else used, own, laws, self._noise, evenly)
        weights = "[" + " ".join(f"{round(each, 3) + 0.0:.3f}" for each in found.weights[:8]) + "]"
        if found.law:
            text = f"{found.law} ({found.deviation:.0e}, noise {self._noise:.0e})"
            return Relation(name, Verdict.HOLDS, weights, text)
        if found.factor is not None:
            text = f"{found.factor:.3f} x {found.nearest}"
            if found.factor < 1 and ranks.counts_what_nothing_predicts(of_ranks, found.factor):
                text += ": the count has each row's first label, too, which nothing predicts"
            return Relation(name, Verdict.DEVIATES, weights, text)
        if found.of_the_even is not None:
            text = f"the router's loss counts {found.of_the_even:.3f} x; the rest is {found.nearest}"
            return Relation(name, Verdict.DEVIATES, weights, text)
        if found.residual > window.limit(self._noise):
            text = (
                f"{found.residual:.2g} of the gradient comes from no micro-batch's own loss (noise {self._noise:.0e})"
            )
            return Relation(name, Verdict.DEVIATES, weights, text)
        text = f"no law of weights gives these; they sum to {sum(found.weights):.3f}"
        nothing = sum(1 for each in found.weights if abs(each) < 1e-3 * max(map(abs, found.weights)))
        if nothing:
            text += f", and {nothing} of {micro_batches(len(found.weights))} count for nothing"
        return Relation(name, Verdict.DEVIATES, weights, text)

    def _agree(self, of_ranks: list[ranks.Mine]) -> Relation:
        size = float(of_ranks[0].used.norm()) or 1.0
        apart = max(float((each.used - of_ranks[0].used).norm()) / size for each in of_ranks)
        if apart == 0:
            return Relation(RANKS, Verdict.HOLDS, "0")
        return Relation(RANKS, Verdict.DEVIATES, f"{apart:.2g}", "data-parallel ranks are to hold the same gradient")

    # -- windows that the trainer makes once more

    def _copies(self, of_ranks: list[ranks.Mine]) -> Relation:
        """Two copies of the first micro-batch in a window: a mean of equal things is that thing."""
        if why := self._no_second_window():
            return not_held(COPIES, why)
        first = self._steps[0]
        made = self._attempt(lambda: self._made([first, first]))
        of_all = ranks.gathered(made if isinstance(made, ranks.Mine) else ranks.Mine(used=made))
        if why := ranks.problem(of_all):
            return not_held(COPIES, why)
        firsts = [each.only(0) for each in of_ranks]
        laws = ranks.laws(firsts) if len(firsts) > 1 else {"its own gradient": [1.0]}
        return self._judged(COPIES, firsts, made, laws)

    def _no_second_window(self) -> str:
        import transformers

        trainer, base = type(self._trainer), transformers.Trainer
        if trainer._prepare_inputs is not base._prepare_inputs:
            return f"{trainer.__name__} makes its inputs itself (rollouts)"
        if self._where.steps_in_backward is not None:
            return "DeepSpeed's engine counts micro-batches itself"
        if self._goes_on and self._model is not self._inner:
            return "the run goes on, and DistributedDataParallel would count one more window"
        return ""

    def _made(self, steps: list[_Step]) -> torch.Tensor:
        """The gradient that the trainer makes of a window."""
        assert self._start is not None
        trainer, accelerator, args = self._trainer, self._trainer.accelerator, self._trainer.args
        self._start.put_back()
        state = accelerator.gradient_state
        before = args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps, state.sync_gradients
        args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = len(steps)
        if before[1] > 1:
            accelerator.gradient_accumulation_steps = len(steps)
        try:
            with self._where.aside():
                taken = len(inspect.signature(trainer.get_batch_samples).parameters)
                batches = iter([states.copy_of(step.inputs) for step in steps])
                samples, items = trainer.get_batch_samples(*(batches, len(steps), args.device)[:taken])
                counted = (items,) if len(inspect.signature(self._step).parameters) > 2 else ()
                for place, (step, sample) in enumerate(zip(steps, samples, strict=True)):
                    last = place == len(steps) - 1
                    state._set_sync_gradients(last)
                    apart = contextlib.nullcontext() if last or self._model is self._inner else self._model.no_sync()
                    step.random.put_back()
                    with apart:
                        self._step(self._model, sample, *counted)
                return self._sketch(self._where.window()) / self._grad_scale()
        finally:
            args.gradient_accumulation_steps = before[0]
            if before[1] > 1:
                accelerator.gradient_accumulation_steps = before[1]
            state._set_sync_gradients(before[2])

    def _of_routers(self, calls: list[_Call], own: list[torch.Tensor]) -> torch.Tensor | None:
        """What of the micro-batches' own gradients is their routers' loss, which is a mean whatever the tokens are."""
        with self._without_routers_loss() as found:
            if not found:
                return None
            without = [self._sketch(self._own(call)) for call in calls]
        return torch.stack(own) - torch.stack(without)

    def _without_routers_loss(self) -> contextlib.AbstractContextManager[bool]:
        """Meanwhile there is none; whether there was one."""
        owners = [vars(each) for each in (self._trainer, *self._inner.modules())]
        return states.zeroed([(own, name) for own in owners for name in _OF_ROUTERS if name in own])

    # -- a micro-batch in pieces

    def _one_by_one(self, call: _Call) -> Relation:
        """Of each rank's first micro-batch, without dropout."""
        cut = pieces.cut(call.inputs)
        why = cut.why or pieces.unknown(self._trainer, self._inner)
        asked = ranks.gathered(ranks.Mine(used=torch.tensor(float(len(cut.pieces))), problem=why))
        most = max(int(each.used) for each in asked)
        if why := ranks.problem(asked):
            return not_held(cut.name, why)
        of_ranks = ranks.gathered(self._attempt(lambda: self._of_pieces(call, cut, most)))
        if why := ranks.problem(of_ranks):
            return not_held(cut.name, why)
        found = [pieces.judge(cut.name, each, self._noise) for each in of_ranks]
        return next((each for each in found if each.verdict is Verdict.DEVIATES), found[0])

    def _of_pieces(self, call: _Call, cut: pieces.Cut, most: int) -> ranks.Mine:
        """Their own gradients, and as ``used`` that of all of them at once."""

        def of(inputs: Any, random: states.Random = call.random) -> _Call:
            return _Call(inputs, {}, random, call.buffers)

        with pieces.without_dropout(self._inner), self._without_routers_loss():
            own = [self._sketch(self._own(of(each))) for each in cut.pieces]
            for _ in range(most - len(own)):  # a rank that has more may need this one's shards
                self._own(of(cut.pieces[-1]))
            whole = self._sketch(self._own(of(cut.whole)))
            losses = []
            for random in (call.random, call.random.another()):
                losses.append(float(self._alone(of(cut.whole, random)).detach()))
                self._where.after_forward()
        if losses[0] != losses[1]:
            return ranks.Mine(problem="the loss draws random numbers")
        return ranks.Mine(whole, torch.stack(own), counts=labels.counts_of(cut.pieces))

    # -- the loss along its gradient

    def _slope(self) -> Relation:
        if why := self._where.coarse():
            return not_held(SLOPE, why)
        if self._noise > _FINE:
            return not_held(SLOPE, f"the loss is too coarse (noise {self._noise:.0e})")
        call = self._steps[0].calls[0]
        gradients = self._own(call)
        size = sum(float(each.double().pow(2).sum()) for each in gradients if each is not None) ** 0.5
        step = 1e-3 * max(abs(call.loss), 0.1) / size / size if size else 0.0
        kept = [each.detach().clone() for each in self._where.parameters]

        def at(along: float) -> float:
            with torch.no_grad():
                for parameter, value, gradient in zip(self._where.parameters, kept, gradients, strict=True):
                    parameter.copy_(value if gradient is None else value + along * gradient)
            return float(self._alone(call).detach().double())

        try:
            rise = at(step) - at(-step)
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._where.parameters, kept, strict=True):
                    parameter.copy_(value)
        if not size:
            return not_held(SLOPE, "the gradient is 0")
        ratio = rise / (2 * step) / size**2
        if abs(ratio - 1) <= _SMOOTH:
            return Relation(SLOPE, Verdict.HOLDS, f"{ratio:.3f}")
        text = "of what the gradient says: a part of the loss is detached or not smooth, or a backward pass is wrong"
        return Relation(SLOPE, Verdict.NOTE, f"{ratio:.3f}", text)
