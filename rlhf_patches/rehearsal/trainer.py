"""Checks the first window of a ``transformers.Trainer`` or of a subclass, in its own training loop.

Each call of ``compute_loss`` is recorded with the random state before it. When the window's gradient is complete and
before it is clipped or used, each micro-batch is replayed alone (`replay`). The run's own window is unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import (
    adapters,
    applied,
    checkpoint,
    evaluation,
    frequencies,
    fused,
    labels,
    parameters,
    ranks,
    rates,
    reference,
    rows,
    sharding,
    slope,
    states,
    switches,
    time_limit,
    weights,
    window,
)
from .checks import Checks, attempted, counted_elsewhere, generates
from .relation import Relation, micro_batches, not_checked
from .replay import Call, Kept, Replay, Step

WINDOW = "micro-batch weights"
_REPLACED = ("training_step", "compute_loss", "create_optimizer")
_SAME = 1e-6


class Ended(SystemExit):
    """Ends the program after the rehearsal."""


class Rehearsal:
    """The rehearsal of one trainer.

    Args:
        trainer: a ``transformers.Trainer``; two of its attributes are replaced until its first window is over.
        end: called on each rank with the relations; an exception of it ends the training.
        goes_on: whether the run trains afterwards, so that its state must not change.
        saves: whether the run makes its first step, and a checkpoint is written to a temporary folder.
        little: whether to keep no whole gradients besides the run's own.
    """

    def __init__(
        self,
        trainer: Any,
        end: Callable[[list[Relation]], None],
        *,
        goes_on: bool = False,
        saves: bool = False,
        little: bool = False,
    ) -> None:
        self._little = little
        self._trainer, self._end, self._goes_on, self._saves = trainer, end, goes_on, saves
        self._steps: list[Step] = []
        self._model: Any = None
        self._records = False
        self.trained_on: labels.Trained | None = None
        self._made: applied.Made | None = None
        self._found: list[Relation] | None = None
        self._held: applied.Held | None = None
        self._stepped: Relation | None = None
        self._after: checkpoint.AfterStep | None = None

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Rehearse the first window that is trained within the context."""
        mine = vars(self._trainer)
        before = {name: mine[name] for name in _REPLACED if name in mine}
        self._engine: tuple[Any, Any] | None = None
        self._step, self._loss = self._trainer.training_step, self._trainer.compute_loss
        create_optimizer = self._trainer.create_optimizer
        self._rates = rates.of_groups(self._trainer.optimizer)

        @functools.wraps(self._step)
        def training_step(*given: Any, **named: Any) -> Any:
            return self._in_step(*given, **named)

        @functools.wraps(self._loss)
        def compute_loss(*given: Any, **named: Any) -> Any:
            return self._in_loss(*given, **named)

        @functools.wraps(create_optimizer)
        def noting_rates(*given: Any, **named: Any) -> Any:
            made = create_optimizer(*given, **named)
            self._rates = rates.of_groups(self._trainer.optimizer)
            return made

        # Patches look for the class's own function.
        if (function := getattr(self._loss, "__func__", None)) is not None:
            compute_loss.__func__ = function  # type: ignore[attr-defined]
        self._trainer.training_step, self._trainer.compute_loss = training_step, compute_loss
        self._trainer.create_optimizer = noting_rates
        self._before = before
        try:
            yield
        finally:
            self._take_off()
            for each in (self._held, self._after):
                if each is not None:
                    each.off()
            if self._found is not None:  # an exception, or a loop that makes no step
                with contextlib.suppress(Ended):
                    self._ended(self._stepped or not_checked(applied.NAME, "the optimizer's step was not reached"))

    def _take_off(self) -> None:
        if self._engine is not None:
            engine, before = self._engine
            vars(engine).pop("step", None)
            vars(engine).update(before)
            self._engine = None
        for name in _REPLACED:
            if name in self._before:
                setattr(self._trainer, name, self._before[name])
            else:
                vars(self._trainer).pop(name, None)

    # -- called by the training loop

    def _in_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        if not self._steps:
            self._model = model
            self._where, self._why_not = sharding.of(self._trainer, model)
            self._inner = self._where.inner
            self._replay = Replay(self._trainer, model, self._where, self._step, self._loss, self._little)
            if (engine := self._where.steps_in_backward) is not None:
                self._hold_back(engine)
        self._steps.append(Step(states.copy_of(inputs), states.Random.now()))
        self._records = True
        try:
            made = self._step(model, inputs, *more, **named)
        finally:
            self._records = False
        if self._trainer.accelerator.sync_gradients and self._where.steps_in_backward is None:
            self._finish()
        return made

    def _hold_back(self, engine: Any) -> None:
        """Delay the engine's step until the window's gradient has been read."""
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
            relations = self._relations()
        except Exception as error:  # the user's code may fail in calls that the run itself does not make
            traceback.print_exc(file=sys.stderr)
            relations = [not_checked(WINDOW, f"{type(error).__name__}: {error}")]
        self._found = relations
        self._until_the_step()

    def _until_the_step(self) -> None:
        """Let the run clip the gradient, and compare it at the optimizer's step."""
        optimizer, scaler = self._trainer.optimizer, getattr(self._trainer.accelerator, "scaler", None)
        why = "" if self._made is not None else "the window was not checked"
        if self._where.steps_in_backward is not None:
            why = "DeepSpeed clips within its own step"
        if why := why or applied.cannot(optimizer, scaler):
            self._ended(not_checked(applied.NAME, why))
            return

        def skipped() -> None:
            self._ended(not_checked(applied.NAME, "the float16 scaler skipped the step: a gradient is infinite"))

        self._held = applied.Held(optimizer, scaler, self._at_step, skipped)

    def _at_step(self, scale: float) -> None:
        made, most = self._made, getattr(self._trainer.args, "max_grad_norm", None)
        assert made is not None
        time_limit.at(applied.NAME)

        def now() -> ranks.Mine:
            used = self._replay.sketch(self._where.window()) / scale
            return ranks.Mine(used=used, own=made.sketch, by=applied.changed_by(self._trainer))

        of_ranks = ranks.gathered(attempted(now))
        if why := ranks.problem(of_ranks):
            self._stepped = not_checked(applied.NAME, why)
        else:
            by = next((each.by for each in of_ranks if each.by), "")
            self._stepped = applied.judge(made, of_ranks, most, self._unit(), by)
        if self._saves:
            self._after = checkpoint.AfterStep(self._trainer, self._saved)
        else:
            self._ended(self._stepped)

    def _saved(self) -> None:
        assert self._stepped is not None
        time_limit.at(checkpoint.NAME)
        calls = [call for step in self._steps for call in step.calls]

        def loss() -> float:
            found = float(self._replay.alone(calls[0]).detach()) if calls else 0.0
            self._where.after_forward()
            return found

        made = attempted(lambda: checkpoint.relation(self._trainer, self._where, loss))
        self._ended(self._stepped, made if isinstance(made, Relation) else not_checked(checkpoint.NAME, made.problem))

    def _ended(self, at_step: Relation, saved: Relation | None = None) -> None:
        relations, self._found = self._found or [], None
        if self._held is not None and not self._goes_on and not self._saves:
            self._held.ended()
        if self._saves:
            saved = saved or not_checked(checkpoint.NAME, "the optimizer's step was not reached by itself")
        last = [self.trained_on.relation()] if self.trained_on is not None else []
        self._end([*relations, at_step, *([saved] if saved else []), *last])

    @property
    def size(self) -> str:
        """The window's size as text."""
        each, number = micro_batches(len(self._steps)), self._trainer.accelerator.num_processes
        return f"{each} on each of {number} ranks" if number > 1 else each

    def _in_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        if not self._records:
            return self._loss(model, inputs, *more, **named)
        given = {**dict(zip(("return_outputs", "num_items_in_batch"), more, strict=False)), **named}
        call = Call(states.copy_of(inputs), given, states.Random.now(), states.Buffers(self._inner))
        self._steps[-1].calls.append(call)
        made = self._loss(model, inputs, *more, **named)
        loss = made[0] if isinstance(made, tuple) else made
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            call.loss = float(loss.detach())
        return made

    # -- the relations

    def _relations(self) -> list[Relation]:
        """Return all relations; they are the same on each rank."""
        relations: list[Relation] = []
        if why := self._cannot():
            relations.append(not_checked(WINDOW, why))
        else:
            relations += self._of_the_window()
            relations.append(parameters.optimizers(self._trainer.optimizer, self._where.named))
            relations += self._of_the_rest()
        calls = self._steps[0].calls
        tokenizer = getattr(self._trainer, "processing_class", None)
        self.trained_on = labels.read(calls[0].inputs if calls else self._steps[0].inputs, tokenizer)
        return relations

    def _of_the_rest(self) -> list[Relation]:
        trainer, inner, known = self._trainer, self._inner, self._rates
        schedule, most = trainer.lr_scheduler, trainer.state.max_steps
        whole, merges = type(self._where) is sharding.Whole, bool(getattr(trainer.args, "use_vllm", False))
        found = self._perhaps(adapters.NAME, lambda: adapters.relation(inner, sharded=not whole, merges=merges))
        found += self._perhaps(frequencies.NAME, lambda: frequencies.relation(inner))
        inputs, by = [step.inputs for step in self._steps], generates(trainer)
        found += self._perhaps(rows.NAME, lambda: rows.relation(trainer, inputs, by))
        if schedule is None or known is None:
            return found
        return self._perhaps(rates.NAME, lambda: rates.relation(trainer.optimizer, schedule, known, most)) + found

    def _perhaps(self, name: str, what: Callable[[], Relation | None]) -> list[Relation]:
        time_limit.at(name)
        made = attempted(what)
        found = not_checked(name, made.problem) if isinstance(made, ranks.Mine) else made
        return [found] if found is not None else []

    def _cannot(self) -> str:
        if self._why_not:
            return self._why_not
        calls = sum(len(step.calls) for step in self._steps)
        if calls and calls != len(self._steps):
            return f"compute_loss was called {calls} times in {micro_batches(len(self._steps))}"
        if not calls and (why := counted_elsewhere(self._model, self._where, self._goes_on)):
            return f"compute_loss was not called; {why}"
        return ""

    def _of_the_window(self) -> list[Relation]:
        end = Kept(self._trainer, self._inner)
        calls = [call for step in self._steps for call in step.calls]
        try:
            seen = parameters.SeenGradients(self._where.named, self._where.parameters)
            time_limit.at(WINDOW)
            norm, scale = applied.Norm(), self._replay.grad_scale()
            self._used = self._replay.sketch(norm.noted(seen.noted(self._where.window()))) / scale
            self._made = applied.Made(self._used, norm.value() / scale, *self._replay.entries())
            mine = attempted(lambda: self._own_of(calls) if calls else self._own_by_steps())
            of_ranks = ranks.gathered(mine)
            problem = next((f"rank {rank}: {each.problem}" for rank, each in enumerate(of_ranks) if each.problem), "")
            if not all(bool(each.used.isfinite().all()) for each in of_ranks):
                problem = "the window's gradient is not finite" + (" (float16 scaler)" if scale != 1 else "")
                self._made = None
            if problem:
                return [not_checked(WINDOW, problem), seen.relation()]
            self._noise = max(each.noise for each in of_ranks)
            relations = [weights.judged(WINDOW, of_ranks, self._used, self._noise)]
            if len(of_ranks) > 1 and self._where.shows_ranks:
                relations.append(weights.agree(of_ranks))
            if not calls:
                return [*relations, seen.relation()]
            relations += self._of_the_calls(calls, of_ranks)
            return [*relations, seen.relation()]
        finally:
            end.put_back()

    def _of_the_calls(self, calls: list[Call], of_ranks: list[ranks.Mine]) -> list[Relation]:
        trainer, first = self._trainer, calls[0]
        checks = Checks(trainer, self._model, self._where, self._replay, self._noise, goes_on=self._goes_on)
        found = [checks.copies(self._steps[0], of_ranks)]
        time_limit.at(slope.NAME)
        made = attempted(lambda: slope.relation(first, self._where, self._replay, self._noise))
        found.append(made if isinstance(made, Relation) else not_checked(slope.NAME, made.problem))
        found += [checks.one_by_one(first), checks.swapped(self._steps[0], first), checks.neighbors(first)]
        found.append(checks.by_formula(first))
        found += [checks.initial(first)] if reference.applies(trainer, first.inputs) else []
        found += [checks.reference_passes(first)] if reference.has_passes(trainer) else []
        found += [checks.by_plain_loss(first)] if fused.used(trainer) else []
        found += [checks.without_checkpointing(first)] if switches.checkpoints(self._inner) else []
        found += [checks.as_written(first)] if switches.compiles(self._inner) else []
        planned = ranks.gathered(ranks.Mine(used=torch.tensor(evaluation.planned(trainer))))
        return [*found, checks.evaluated(first)] if all(each.used for each in planned) else found

    def _own_of(self, calls: list[Call]) -> ranks.Mine:
        """Return the gradients of this rank's micro-batches alone."""
        # Every rank makes the same calls: a loss may gather from all ranks.
        problem, carries = "", all([self._replay.carries_its_total(call) for call in calls])
        for place, call in enumerate(calls):
            again = float(self._replay.again(call, call.more).detach())
            self._where.after_forward()
            if not abs(again - call.loss) <= _SAME * max(1.0, abs(call.loss)) and not problem:
                why = f"micro-batch {place}: first {call.loss:.6g}, then {again:.6g}"
                problem = f"the loss is not deterministic from the same state ({why})"
        counts = labels.counts_of([call.inputs for call in calls])
        generations = self._replay.generations(calls) if carries else None
        own = [self._replay.own_sketch(call) for call in calls]
        first = own[0]
        other = self._replay.own_sketch(calls[0], scale=window.SCALE) / window.SCALE
        noise = float((other - first).norm()) / (float(first.norm()) or 1.0)
        evenly = self._replay.of_routers(calls, own)
        return ranks.Mine(self._used, torch.stack(own), evenly, counts, noise, carries, generations, problem)

    def _own_by_steps(self) -> ranks.Mine:
        """Return the same if ``training_step`` computes the loss itself: from windows of one micro-batch each."""
        own = [self._replay.made([step], alone=True) for step in self._steps]
        again = self._replay.made([self._steps[0]], alone=True)
        problem = "" if torch.equal(again, own[0]) else "training_step is not deterministic from the same state"
        return ranks.Mine(self._used, torch.stack(own), noise=self._unit(), problem=problem)

    def _unit(self) -> float:
        """Return the machine epsilon of the gradients' dtype, if it is coarser than float32; else 0."""
        computed = {each.dtype for each in self._where.parameters}
        computed |= {torch.bfloat16} if self._trainer.args.bf16 else set()
        computed |= {torch.float16} if self._trainer.args.fp16 else set()
        return max((torch.finfo(each).eps for each in computed - {torch.float32, torch.float64}), default=0.0)
