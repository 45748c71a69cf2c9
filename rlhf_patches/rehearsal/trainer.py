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
    evaluation,
    formula,
    frequencies,
    fused,
    labels,
    parameters,
    pieces,
    ranks,
    rates,
    sharding,
    slope,
    states,
    weights,
    window,
)
from .relation import Relation, Verdict, micro_batches, not_checked
from .replay import Call, Kept, Replay, Step

WINDOW = "micro-batch weights"
COPIES = "duplicated micro-batch"
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
    """

    def __init__(self, trainer: Any, end: Callable[[list[Relation]], None], *, goes_on: bool = False) -> None:
        self._trainer, self._end, self._goes_on = trainer, end, goes_on
        self._steps: list[Step] = []
        self._model: Any = None
        self._records = False
        self.trained_on: labels.Trained | None = None

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
            self._replay = Replay(self._trainer, model, self._where, self._step, self._loss)
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
        self._end(relations)

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
        return [*relations, self.trained_on.relation()] if self.trained_on is not None else relations

    def _of_the_rest(self) -> list[Relation]:
        trainer, inner, known = self._trainer, self._inner, self._rates
        schedule, most = trainer.lr_scheduler, trainer.state.max_steps
        whole, merges = type(self._where) is sharding.Whole, bool(getattr(trainer.args, "use_vllm", False))
        found = self._perhaps(adapters.NAME, lambda: adapters.relation(inner, sharded=not whole, merges=merges))
        found += self._perhaps(frequencies.NAME, lambda: frequencies.relation(inner))
        if schedule is None or known is None:
            return found
        return self._perhaps(rates.NAME, lambda: rates.relation(trainer.optimizer, schedule, known, most)) + found

    def _perhaps(self, name: str, what: Callable[[], Relation | None]) -> list[Relation]:
        made = self._attempt(what)
        found = not_checked(name, made.problem) if isinstance(made, ranks.Mine) else made
        return [found] if found is not None else []

    def _cannot(self) -> str:
        if self._why_not:
            return self._why_not
        calls = sum(len(step.calls) for step in self._steps)
        if calls and calls != len(self._steps):
            return f"compute_loss was called {calls} times in {micro_batches(len(self._steps))}"
        if not calls and (why := self._counted_elsewhere()):
            return f"compute_loss was not called; {why}"
        return ""

    def _of_the_window(self) -> list[Relation]:
        end = Kept(self._trainer, self._inner)
        calls = [call for step in self._steps for call in step.calls]
        try:
            seen = parameters.SeenGradients(self._where.named, self._where.parameters)
            self._used = self._replay.sketch(seen.noted(self._where.window())) / self._replay.grad_scale()
            mine = self._attempt(lambda: self._own_of(calls) if calls else self._own_by_steps())
            of_ranks = ranks.gathered(mine)
            problem = next((f"rank {rank}: {each.problem}" for rank, each in enumerate(of_ranks) if each.problem), "")
            if problem:
                return [not_checked(WINDOW, problem), seen.relation()]
            self._noise = max(each.noise for each in of_ranks)
            relations = [weights.judged(WINDOW, of_ranks, self._used, self._noise)]
            if len(of_ranks) > 1 and self._where.shows_ranks:
                relations.append(weights.agree(of_ranks))
            if not calls:
                return [*relations, seen.relation()]
            relations.append(self._copies(of_ranks))
            made = self._attempt(lambda: slope.relation(calls[0], self._where, self._replay, self._noise))
            relations.append(made if isinstance(made, Relation) else not_checked(slope.NAME, made.problem))
            relations.append(self._one_by_one(calls[0]))
            relations.append(self._by_formula(calls[0]))
            relations += [self._by_plain_loss(calls[0])] if fused.used(self._trainer) else []
            planned = ranks.gathered(ranks.Mine(used=torch.tensor(evaluation.planned(self._trainer))))
            if all(each.used for each in planned):
                relations.append(self._evaluated(calls[0]))
            return [*relations, seen.relation()]
        finally:
            end.put_back()

    def _attempt(self, what: Callable[[], Any]) -> Any:
        """Call a replay; print its exception and return it as a problem, so that no rank stops."""
        try:
            return what()
        except Exception as error:  # the user's code may fail in a call that the run itself does not make
            traceback.print_exc(file=sys.stderr)
            return ranks.Mine(problem=f"{type(error).__name__}: {error}")

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
        own = [self._replay.sketch(self._replay.own(call)) for call in calls]
        first = own[0]
        other = self._replay.sketch(self._replay.own(calls[0], scale=window.SCALE)) / window.SCALE
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

    # -- windows that the trainer replays

    def _copies(self, of_ranks: list[ranks.Mine]) -> Relation:
        """A window of two copies of the first micro-batch must have the micro-batch's own gradient."""
        if why := self._no_second_window():
            return not_checked(COPIES, why)
        first = self._steps[0]
        made = self._attempt(lambda: self._replay.made([first, first]))
        of_all = ranks.gathered(made if isinstance(made, ranks.Mine) else ranks.Mine(used=made))
        if why := ranks.problem(of_all):
            return not_checked(COPIES, why)
        firsts = [each.only(0) for each in of_ranks]
        laws = ranks.laws(firsts) if len(firsts) > 1 else {"the micro-batch's own gradient": [1.0]}
        return weights.judged(COPIES, firsts, made, self._noise, laws)

    def _no_second_window(self) -> str:
        return self._generates() or self._counted_elsewhere()

    def _generates(self) -> str:
        import transformers

        trainer, base = type(self._trainer), transformers.Trainer
        if trainer._prepare_inputs is not base._prepare_inputs:
            return f"{trainer.__name__} generates its inputs (rollouts)"
        return ""

    def _counted_elsewhere(self) -> str:
        """Return which component would count the replayed micro-batches; empty if none would."""
        if self._where.steps_in_backward is not None:
            return "DeepSpeed's engine counts micro-batches itself"
        if self._goes_on and self._model is not self._inner:
            return "the run continues, and DistributedDataParallel would count one more window"
        return ""

    # -- a micro-batch in pieces

    def _one_by_one(self, call: Call) -> Relation:
        """Compare each rank's first micro-batch with its pieces, without dropout."""
        cut = pieces.cut(call.inputs)
        why = cut.why or pieces.unknown(self._trainer, self._inner)
        asked = ranks.gathered(ranks.Mine(used=torch.tensor(float(len(cut.pieces))), problem=why))
        most = max(int(each.used) for each in asked)
        if why := ranks.problem(asked):
            return not_checked(cut.name, why)
        of_ranks = ranks.gathered(self._attempt(lambda: self._replay.of_pieces(call, cut, most)))
        if why := ranks.problem(of_ranks):
            return not_checked(cut.name, why)
        return _first_that_deviates([pieces.judge(cut.name, each, self._noise) for each in of_ranks])

    # -- the reference loss

    def _by_formula(self, call: Call) -> Relation:
        """Compare the first micro-batch's loss with the reference loss, without dropout."""
        why = formula.unknown(self._trainer, self._inner, call.inputs)
        if why := ranks.problem(ranks.gathered(ranks.Mine(problem=why))):
            return not_checked(formula.NAME, why)

        def both() -> ranks.Mine:
            with pieces.without_dropout(self._inner), self._replay.without_routers_loss():
                loss = float(self._replay.alone(call).detach().double())
                self._where.after_forward()
                logits = self._replay.logits(call)
                self._where.after_forward()
            smoothing = getattr(self._trainer.args, "label_smoothing_factor", 0.0)
            expected = formula.cross_entropy(logits, call.inputs["labels"], smoothing)
            return ranks.Mine(used=torch.tensor([loss, expected], dtype=torch.float64))

        return self._on_ranks(
            formula.NAME, both, lambda mine: formula.judge(float(mine.used[0]), float(mine.used[1]), self._noise)
        )

    def _on_ranks(self, name: str, both: Callable[[], ranks.Mine], judge: Callable[[ranks.Mine], Relation]) -> Relation:
        """Judge what each rank measures; the first rank that deviates decides."""
        of_ranks = ranks.gathered(self._attempt(both))
        if why := ranks.problem(of_ranks):
            return not_checked(name, why)
        return _first_that_deviates(list(map(judge, of_ranks)))

    # -- other code for the same loss

    def _by_plain_loss(self, call: Call) -> Relation:
        """Compare the gradient of a fused loss with that of the plain loss, without dropout."""
        if why := fused.unknown(self._trainer):
            return not_checked(fused.NAME, why)

        def both() -> ranks.Mine:
            with pieces.without_dropout(self._inner):
                by_kernel = self._replay.sketch(self._replay.own(call))
                with fused.without(self._trainer):
                    plain = self._replay.sketch(self._replay.own(call))
            return ranks.Mine(used=by_kernel, own=plain)

        return self._on_ranks(fused.NAME, both, lambda mine: fused.judge(mine.used, mine.own, self._noise))

    def _evaluated(self, call: Call) -> Relation:
        """Compare the loss that evaluation reports for the first micro-batch with the micro-batch's own loss."""
        if why := self._generates():
            return not_checked(evaluation.NAME, why)

        def both() -> ranks.Mine:
            with evaluation.mode(self._inner):
                own = float(self._replay.alone(call).detach().double())
                self._where.after_forward()
                with self._replay.one_micro_batch(), self._replay.restored(call):
                    found = evaluation.loss(self._trainer, self._inner, states.copy_of(call.inputs))
                self._where.after_forward()
            if found is None:
                return ranks.Mine(problem="prediction_step returns no loss")
            return ranks.Mine(used=torch.tensor([found, own], dtype=torch.float64))

        return self._on_ranks(
            evaluation.NAME, both, lambda mine: evaluation.judge(float(mine.used[0]), float(mine.used[1]), self._noise)
        )


def _first_that_deviates(of_ranks: list[Relation]) -> Relation:
    """Return the first relation that deviates, or rank 0's."""
    return next((each for each in of_ranks if each.verdict is Verdict.DEVIATES), of_ranks[0])
