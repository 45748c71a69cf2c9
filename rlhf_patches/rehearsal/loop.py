"""Checks a training loop that is the user's own: plain torch, or with accelerate.

A loop's body cannot be called again. So nothing is replayed: hooks follow the gradients of two windows, from the first
backward pass to each optimizer's second step. The run is not changed; it ends after these steps.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from . import labels, loop_accelerate, loop_checks, loop_generation, loop_models, loop_ranks, loop_windows, rates
from .loop_gradients import Follower
from .loop_models import Models, Step
from .loop_ranks import Seen
from .loop_windows import GRADIENT, Window
from .relation import Relation, Verdict, not_checked

STEPS = 2
_LOCAL = ("accelerate.local_sgd", "torch.distributed.algorithms.model_averaging.averagers")


@dataclass
class _Optimizer:
    """One of the loop's optimizers."""

    optimizer: Any
    windows: list[Window] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    states: list[dict[str, int]] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    """The identities of parameters that had a gradient at a step."""


class LoopRehearsal:
    """The rehearsal of the first loop that trains.

    Args:
        torch: the module ``torch``.
        end: called with the name, the size as text and the relations; an exception of it ends the program.
        goes_on: whether the run trains afterwards, so that the user's own code may not be called.
    """

    def __init__(self, torch: ModuleType, end: Callable[[str, str, list[Relation]], None], *, goes_on: bool) -> None:
        self._torch, self._end, self._goes_on = torch, end, goes_on
        self._follower = Follower()
        self._optimizers: dict[int, _Optimizer] = {}
        self._models: Models | None = None
        self._inputs: loop_checks.Inputs | None = None
        self._generation: loop_generation.Generation | None = None
        self._why_not = ""
        self._depth, self._stepping = 0, 0
        self._entered_autocast = False
        self._accelerate = loop_accelerate.Accelerate()
        self._undo: list[Callable[[], None]] = []
        self._active = False
        self.trained_on: labels.Trained | None = None

    # -- hooks

    def begin(self) -> None:
        """Set the hooks."""
        from torch.optim import optimizer as optimizers

        self._active = True
        autograd, autocast = self._torch.autograd, self._torch.amp.autocast_mode.autocast
        backward, enter = autograd.backward, autocast.__enter__

        @functools.wraps(backward)
        def followed(tensors: Any, *given: Any, **named: Any) -> Any:
            return self._in_backward(backward, tensors, given, named)

        @functools.wraps(enter)
        def entered(context: Any) -> Any:
            self._notes_autocast(context)
            return enter(context)

        autograd.backward, autocast.__enter__ = followed, entered
        before = optimizers.register_optimizer_step_pre_hook(self._before_step)
        after = optimizers.register_optimizer_step_post_hook(self._after_step)

        def undo() -> None:
            autograd.backward = backward if autograd.backward is followed else autograd.backward
            if autocast.__enter__ is entered:
                autocast.__enter__ = enter

        self._undo = [undo, before.remove, after.remove, self._follower.close, self._accelerate.close]
        self._accelerate.begin()

    def leave(self) -> None:
        """Remove all hooks: the loop is another one's, or it is over."""
        self._active = False
        for watching in (self._inputs, self._generation):
            if watching is not None:
                watching.close()
        for each in self._undo:
            each()
        self._undo = []

    def _in_backward(self, backward: Callable[..., Any], tensors: Any, given: Any, named: Any) -> Any:
        if not self._active or self._depth:
            if self._active:
                self._begins_pass(tensors)  # re-entrant checkpointing: a graph within
            return backward(tensors, *given, **named)
        self._depth += 1
        try:
            self._begins_pass(tensors)
            return backward(tensors, *given, **named)
        finally:
            self._depth -= 1
            self._guarded(self._follower.end_pass)

    def _begins_pass(self, tensors: Any) -> None:
        roots = tensors if isinstance(tensors, Sequence) else (tensors,)
        self._guarded(lambda: self._follower.begin_pass(roots))

    def _notes_autocast(self, context: Any) -> None:
        low = getattr(context, "fast_dtype", None) in (self._torch.bfloat16, self._torch.float16)
        self._entered_autocast |= bool(low and getattr(context, "_enabled", False) and self._torch.is_grad_enabled())

    def _guarded(self, what: Callable[[], Any]) -> Any:
        """Call a part of the rehearsal; whatever fails in it is a reason, and no error of the run."""
        try:
            return what()
        except Exception as error:
            if not self._why_not:
                traceback.print_exc(file=sys.stderr)
                self._why_not = f"{type(error).__name__}: {error}"

    def _before_step(self, optimizer: Any, given: Any, named: Any) -> Any:
        if not self._active:
            return None
        if not self._stepping:
            known = self._optimizers.get(id(optimizer))
            if known is not None and len(known.steps) >= STEPS:
                self.finish()
                return None
            known = self._optimizers.setdefault(id(optimizer), _Optimizer(optimizer))
            closure = given[1] if len(given) > 1 else named.get("closure")
            if callable(closure):
                self._stepping += 1
                followed = self._of_closure(known, closure)
                return ((given[0], followed, *given[2:]), named) if len(given) > 1 else (given, {"closure": followed})
            self._guarded(lambda: self._record(known))
        self._stepping += 1
        return None

    def _of_closure(self, known: _Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Record the window when the closure of a step has computed the gradient."""
        calls = 0

        @functools.wraps(closure)
        def followed() -> Any:
            nonlocal calls
            made = closure()
            calls += 1
            if calls == 1:
                self._guarded(lambda: self._record(known))
            else:
                self._why_not = self._why_not or "the optimizer calls its closure several times in a step"
            return made

        return followed

    def _record(self, known: _Optimizer) -> None:
        optimizer = known.optimizer
        if self._depth:
            self._why_not = "the optimizer steps within the backward pass"
        if self._models is None:
            self._models = loop_models.found(self._follower.reached())
            self._inputs = loop_checks.Inputs(self._models)
            self._generation = loop_generation.Generation(self._models)
        known.windows.append(loop_windows.read(optimizer, self._follower, self._names(), self._averaged()))
        known.given |= {id(each) for each in loop_windows.parameters_of(optimizer) if each.grad is not None}
        known.before = loop_models.fingerprints(self._watched(optimizer))
        if not known.states:
            known.states.append(self._own(known, known.before))

    def _after_step(self, optimizer: Any, given: Any, named: Any) -> None:
        if not self._active or not self._stepping:
            return
        self._stepping -= 1
        if self._stepping:
            return
        self._guarded(lambda: self._compare(optimizer))
        if all(len(each.steps) >= STEPS for each in self._optimizers.values()):
            self.finish()

    def _compare(self, optimizer: Any) -> None:
        known = self._optimizers[id(optimizer)]
        if len(known.windows) == len(known.steps):
            self._record(known)  # the step did not call its closure
        now = loop_models.fingerprints(self._watched(optimizer))
        known.states.append(self._own(known, now))
        known.steps.append(loop_models.step_of(optimizer, self._names(), self._follower, known.before, now))
        for each in loop_windows.parameters_of(optimizer):
            if (followed := self._follower.of(each)) is not None:
                followed.steps()

    def _names(self) -> dict[int, str]:
        return self._models.names if self._models is not None else {}

    def _watched(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's parameters by name, and the models' frozen ones."""
        names = self._names()
        held = loop_windows.parameters_of(optimizer)
        watched = {names.get(id(each), f"parameter {place}"): each for place, each in enumerate(held)}
        frozen = self._models.named.items() if self._models is not None else ()
        return watched | {name: each for name, each in frozen if not each.requires_grad}

    def _own(self, known: _Optimizer, of_all: dict[str, int]) -> dict[str, int]:
        names = self._names()
        held = enumerate(loop_windows.parameters_of(known.optimizer))
        return {name: of_all[name] for place, each in held if (name := names.get(id(each), f"parameter {place}"))}

    def _averaged(self) -> set[int]:
        rank_count = loop_ranks.number()[1]
        found = self._models.averaged() if self._models is not None and rank_count > 1 else []
        whole = [each for each in found if each.process_group.size() == rank_count]
        return {
            id(own)
            for each in whole
            for name, own in each.module.named_parameters()
            if own.requires_grad and name not in getattr(each, "parameters_to_ignore", ())
        }

    # -- the end

    def finish(self) -> None:
        """Judge what was seen, once."""
        if not self._active:
            return
        self.leave()
        try:
            relations = self._relations()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            relations = [not_checked(GRADIENT, f"{type(error).__name__}: {error}")]
        kinds = ", ".join(dict.fromkeys(type(each.optimizer).__name__ for each in self._optimizers.values()))
        steps = sum(len(each.steps) for each in self._optimizers.values())
        self._end(f"loop with {kinds}", f"first {steps} steps" if steps != 1 else "first step", relations)

    @property
    def took_a_step(self) -> bool:
        return any(each.steps for each in self._optimizers.values())

    def _relations(self) -> list[Relation]:
        known, models = [*self._optimizers.values()], self._models
        if models is None:
            return [not_checked(GRADIENT, self._why_not or "no backward pass was seen")]
        local = next((f"{name} is imported" for name in _LOCAL if name in sys.modules), "")
        averaged = self._averaged()
        names = frozenset(name for name, each in models.named.items() if id(each) in averaged)
        seen = Seen([each.windows for each in known], [each.states for each in known], names, local)
        of_ranks, why = loop_ranks.exchanged((seen, self._unknown(models)))
        why = why or next((each[1] for each in of_ranks if each[1]), "")
        seen_by = [each[0] for each in of_ranks]
        together = loop_ranks.alike(seen_by)
        why = why or (local if averaged else "")
        if averaged and not together and not why:
            why = "the ranks took different windows"
        relations = [self._gradient(seen_by, why, together)]
        if len(seen_by) > 1 and together:
            relations += loop_ranks.relations(seen_by)
        relations += self._accelerate.relations(len(known))
        given = {key for each in known for key in each.given} | {id(each) for each in self._follower.reached()}
        alive = loop_models.Alive()
        relations.append(loop_models.trained_relation(models, [each.optimizer for each in known], given))
        of_optimizers = loop_models.optimizer_relation(models, alive, [each.optimizer for each in known], given)
        if relations[0].verdict is Verdict.NOT_CHECKED and of_optimizers.verdict is Verdict.NOTE:
            of_optimizers = not_checked(of_optimizers.name, "the optimizer may hold shards or copies")
        relations.append(of_optimizers)
        more = [loop_models.step_relation([step for each in known for step in each.steps])]
        more.append(loop_models.tied_relation(models))
        more.append(loop_models.mode_relation(models, not self._goes_on))
        more += [self._rates(each.optimizer, alive.schedulers) for each in known]
        more.append(loop_checks.autocast_relation(self._follower.products, self._entered_autocast))
        if not self._goes_on and self._inputs is not None:
            more.append(loop_checks.evaluation_relation(self._inputs))
            more += loop_checks.data_relations(alive.loaders)
        more.append(self._generation.relation() if self._generation is not None else None)
        if self._inputs is not None:
            self.trained_on = self._inputs.trained_on()
        more += [self.trained_on.relation()] if self.trained_on is not None else []
        return [*relations, *(each for each in more if each is not None)]

    def _unknown(self, models: Models) -> str:
        if self._why_not or self._follower.failure:
            return self._why_not or self._follower.failure
        for each in models.averaged():
            if getattr(each, "_comm_hooks", None):
                return "DistributedDataParallel has a communication hook"
            if each.process_group.size() != loop_ranks.number()[1]:
                return "DistributedDataParallel averages over a part of the ranks"
        for root in models.roots:
            for each in root.modules():
                if type(each).__name__ == "FullyShardedDataParallel":
                    return "the gradients are sharded (FSDP1)"
        held = [each for one in self._optimizers.values() for each in loop_windows.parameters_of(one.optimizer)]
        for parameter in (*models.named.values(), *held):
            if hasattr(parameter, "placements"):
                return "the parameters are sharded (DTensor)"
            if hasattr(parameter, "ds_id"):
                return "the parameters are sharded (DeepSpeed)"
        return self._accelerate.unknown()

    def _gradient(self, of_ranks: list[Seen], why: str, together: bool) -> Relation:
        noticed, wrong = "", False
        if not why and len(self._optimizers) == 1:
            noticed, wrong = loop_windows.cleared(of_ranks[0].windows[0])
        if wrong:
            return Relation(GRADIENT, Verdict.DEVIATES, f"{of_ranks[0].windows[0][1].passes} passes", noticed)
        made = []
        for rank, seen in enumerate(of_ranks):
            windows = loop_ranks.windows_of(of_ranks, rank) if together else seen.windows
            made += [loop_windows.judge(each, why) for each in windows]
        order = (Verdict.DEVIATES, Verdict.NOT_CHECKED, Verdict.HOLDS)
        found = next(each for verdict in order for each in made if each.verdict is verdict)
        if noticed and found.verdict is Verdict.HOLDS:
            return replace(found, verdict=Verdict.NOTE, text=noticed)
        return found

    def _rates(self, optimizer: Any, schedulers: Sequence[Any]) -> Relation | None:
        """Take the next steps of the only scheduler of an optimizer, if the run ends."""
        found = [each for each in schedulers if getattr(each, "optimizer", None) is optimizer]
        if len(found) != 1 or self._goes_on:
            return None
        try:
            return rates.relation(optimizer, found[0], rates.of_groups(optimizer), 4)
        except Exception:  # a scheduler of the user's
            return None
