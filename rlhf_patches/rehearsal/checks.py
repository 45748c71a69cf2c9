"""Relations of the first window that call the run's own code again: other windows, pieces, other code for the loss."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import (
    evaluation,
    formula,
    fused,
    neighbors,
    pieces,
    ranks,
    reference,
    sharding,
    states,
    swap,
    switches,
    time_limit,
    weights,
)
from .relation import Relation, Verdict, not_checked
from .replay import Call, Replay, Step

COPIES = "duplicated micro-batch"


class Checks:
    """What the relations of one window need.

    Args:
        trainer: a ``transformers.Trainer``.
        model: the model that ``training_step`` receives.
        where: where the model's parameters and gradients are.
        replay: computes micro-batches and windows again.
        noise: the relative rounding error of a repeated gradient.
        goes_on: whether the run trains afterwards.
    """

    def __init__(
        self, trainer: Any, model: Any, where: sharding.Whole, replay: Replay, noise: float, *, goes_on: bool
    ) -> None:
        self._trainer, self._model, self._where, self._replay = trainer, model, where, replay
        self._inner, self._noise, self._goes_on = where.inner, noise, goes_on

    # -- windows that the trainer replays

    def copies(self, first: Step, of_ranks: list[ranks.Mine]) -> Relation:
        """A window of two copies of the first micro-batch must have the micro-batch's own gradient."""
        if why := self._no_second_window():
            return not_checked(COPIES, why)
        time_limit.at(COPIES)
        made = attempted(lambda: self._replay.made([first, first]))
        of_all = ranks.gathered(made if isinstance(made, ranks.Mine) else ranks.Mine(used=made))
        if why := ranks.problem(of_all):
            return not_checked(COPIES, why)
        firsts = [each.only(0) for each in of_ranks]
        laws = ranks.laws(firsts) if len(firsts) > 1 else {"the micro-batch's own gradient": [1.0]}
        return weights.judged(COPIES, firsts, made, self._noise, laws)

    def _no_second_window(self) -> str:
        why = "with --memory low: a second window has a second set of gradients" if self._replay.little else ""
        return generates(self._trainer) or counted_elsewhere(self._model, self._where, self._goes_on) or why

    # -- a micro-batch in pieces

    def one_by_one(self, call: Call) -> Relation:
        """Compare each rank's first micro-batch with its pieces, without dropout."""
        cut = pieces.cut(call.inputs)
        why = cut.why or pieces.unknown(self._trainer, self._inner)
        asked = ranks.gathered(ranks.Mine(used=torch.tensor(float(len(cut.pieces))), problem=why))
        most = max(int(each.used) for each in asked)
        if why := ranks.problem(asked):
            return not_checked(cut.name, why)
        time_limit.at(cut.name)
        of_ranks = ranks.gathered(attempted(lambda: self._replay.of_pieces(call, cut, most)))
        if why := ranks.problem(of_ranks):
            return not_checked(cut.name, why)
        return self._rounded(call, cut.whole, of_ranks, lambda mine, noise: pieces.judge(cut.name, mine, noise))

    def _rounded(
        self, call: Call, inputs: Any, of_ranks: list[ranks.Mine], judge: Callable[[ranks.Mine, float], Relation]
    ) -> Relation:
        """Judge what each rank measures; if one deviates, again with the noise of the forward pass."""
        found = [judge(each, self._noise) for each in of_ranks]
        if any(each.verdict is Verdict.DEVIATES for each in found):  # other code or shapes round otherwise
            rounding = ranks.gathered(attempted(lambda: self._replay.rounding(call, inputs)))
            if not ranks.problem(rounding):
                noise = max(self._noise, *(each.noise for each in rounding))
                found = [judge(each, noise) for each in of_ranks]
        return _first_that_deviates(found)

    # -- rows in other places, and beside others

    def swapped(self, first: Step, call: Call) -> Relation:
        """Compare two windows whose rows have changed places, without dropout."""
        why, asks = swap.by_design(self._trainer, self._inner)
        why = (why if not asks else "") or self._no_second_window() or swap.cannot(first.inputs)
        if not why and asks and len(first.inputs["input_ids"]) < 2:
            why = "the micro-batch has one row"
        if why := ranks.problem(ranks.gathered(ranks.Mine(problem=why))):
            return not_checked(swap.NAME, why)

        def both() -> ranks.Mine:
            with self._replay.calm():
                draws = self._replay.draws(call)
            steps = [[Step(each, first.random) for each in of] for of in swap.windows(first.inputs, within=asks)]
            made = [self._replay.made(each, calm=True) for each in steps]
            return ranks.Mine(used=made[0], own=made[1], problem="the loss uses random numbers" if draws else "")

        return self._on_ranks(swap.NAME, both, lambda mine: swap.judge(mine.used, mine.own, self._noise, not asks))

    def neighbors(self, call: Call) -> Relation:
        """Change the tokens of some rows or documents, and compare the log-probabilities of the others."""
        changed = neighbors.changed(call.inputs, self._inner)
        why = changed.why or neighbors.unknown(self._inner, self._noise)
        if why := ranks.problem(ranks.gathered(ranks.Mine(problem=why))):
            return not_checked(changed.name, why)

        def scores(inputs: Any, random: states.Random) -> torch.Tensor:
            assert changed.inputs is not None
            assert changed.mine is not None
            logits = self._replay.logits(call, inputs, random)
            self._where.after_forward()
            return neighbors.scores(logits, changed.inputs["input_ids"], changed.mine)

        def both() -> ranks.Mine:
            with pieces.without_dropout(self._inner):
                found = [scores(changed.inputs, random) for random in (call.random, call.random.another())]
                other = scores(changed.other, call.random)
            problem = "" if torch.equal(*found) else "the forward pass uses random numbers"
            return ranks.Mine(used=found[0], own=other, problem=problem)

        return self._on_ranks(
            changed.name, both, lambda mine: neighbors.judge(changed.name, mine.used, mine.own, self._noise)
        )

    # -- the reference loss

    def by_formula(self, call: Call) -> Relation:
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

    # -- policy and reference

    def initial(self, call: Call) -> Relation:
        """Compare the loss of TRL's trainers with the one that equal policies have."""
        trainer, name = self._trainer, reference.name_of(self._trainer)
        known = attempted(lambda: ranks.Mine(problem=reference.unknown(trainer, self._where, call.inputs)))
        if why := ranks.problem(ranks.gathered(known)):
            return not_checked(name, why)

        def loss(of: Call) -> float:
            found = float(self._replay.alone(of).detach().double())
            self._where.after_forward()
            return found

        def both() -> ranks.Mine:
            models = (self._inner, getattr(trainer, "ref_model", None))
            with reference.without_dropout(*models):
                if name == reference.LOSS and self._replay.draws(call):
                    return ranks.Mine(problem="the loss uses random numbers")
            in_the_run = name == reference.RATIO or reference.as_set(trainer)
            calm = contextlib.nullcontext() if in_the_run else reference.without_dropout(*models)
            with calm, self._replay.without_routers_loss(), torch.no_grad():
                found = loss(call)
                with pieces.embeddings_moved(self._inner):
                    rounding = abs(loss(call) - found)
                other = reference.without_ratio(call)
                right = reference.expected(trainer, call.inputs) if other is None else loss(other)
            made = [found, right, rounding, reference.size(trainer, call.inputs)]
            return ranks.Mine(used=torch.tensor(made, dtype=torch.float64))

        return self._on_ranks(
            name,
            both,
            lambda mine: reference.judge(name, *mine.used.tolist(), precomputed=reference.precomputed(call.inputs)),
        )

    def reference_passes(self, call: Call) -> Relation:
        """Compare a reference's passes within the loss with those from another random state."""

        def made(random: states.Random) -> torch.Tensor:
            with reference.passes(self._inner, getattr(self._trainer, "ref_model", None)) as found:
                self._replay.alone(replace(call, random=random))
            self._where.after_forward()
            return torch.cat([each.flatten() for each in found]) if found else torch.zeros(0)

        def both() -> ranks.Mine:
            mine = ranks.Mine(used=made(call.random), own=made(call.random.another()))
            why = "" if len(mine.used) else "the loss makes no pass without a gradient"
            return replace(
                mine, problem=why or ("" if mine.used.shape == mine.own.shape else "the passes differ in size")
            )

        return self._on_ranks(reference.PASSES, both, lambda mine: reference.judge_passes(mine.used, mine.own))

    def _on_ranks(self, name: str, both: Callable[[], ranks.Mine], judge: Callable[[ranks.Mine], Relation]) -> Relation:
        """Judge what each rank measures; the first rank that deviates decides."""
        time_limit.at(name)
        of_ranks = ranks.gathered(attempted(both))
        if why := ranks.problem(of_ranks):
            return not_checked(name, why)
        return _first_that_deviates(list(map(judge, of_ranks)))

    # -- other code for the same loss

    def by_plain_loss(self, call: Call) -> Relation:
        """Compare the gradient of a fused loss with that of the plain loss, without dropout."""
        if why := fused.unknown(self._trainer):
            return not_checked(fused.NAME, why)

        def both() -> ranks.Mine:
            with pieces.without_dropout(self._inner):
                by_kernel = self._replay.own_sketch(call)
                with fused.without(self._trainer):
                    plain = self._replay.own_sketch(call)
            return ranks.Mine(used=by_kernel, own=plain)

        return self._on_ranks(fused.NAME, both, lambda mine: fused.judge(mine.used, mine.own, self._noise))

    def without_checkpointing(self, call: Call) -> Relation:
        """Compare the first micro-batch's gradient with the one without checkpointing, from the same random state."""
        name, device = switches.CHECKPOINTING, self._trainer.args.device
        why = "with --memory low: the gradient without it needs more memory" if self._replay.little else ""
        if switches.compiles(self._inner):
            why = "the model is compiled"
        if why:
            return not_checked(name, why)

        def needs() -> ranks.Mine:
            with switches.without_checkpointing(self._inner):
                problem = switches.without_memory(device, self._inner, lambda: self._replay.alone(call))
            self._where.after_forward()
            return ranks.Mine(problem=problem)

        time_limit.at(name)
        if why := ranks.problem(ranks.gathered(attempted(needs))):
            return not_checked(name, why)

        def both() -> ranks.Mine:
            used = self._replay.own_sketch(call)
            with switches.without_checkpointing(self._inner):
                return ranks.Mine(used=used, own=self._replay.own_sketch(call))

        return self._switched(name, call, both)

    def as_written(self, call: Call) -> Relation:
        """Compare the first micro-batch's gradient with that of the model that is not compiled, without dropout."""

        def both() -> ranks.Mine:
            with self._replay.calm():
                draws = self._replay.draws(call)
                used = self._replay.own_sketch(call)
                with switches.compiled_off():
                    plain = self._replay.own_sketch(call)
            return ranks.Mine(used=used, own=plain, problem="the loss uses random numbers" if draws else "")

        return self._switched(switches.COMPILED, call, both)

    def _switched(self, name: str, call: Call, both: Callable[[], ranks.Mine]) -> Relation:
        time_limit.at(name)
        of_ranks = ranks.gathered(attempted(both))
        if why := ranks.problem(of_ranks):
            return not_checked(name, why)
        return self._rounded(
            call, call.inputs, of_ranks, lambda mine, noise: switches.judge(name, mine.used, mine.own, noise)
        )

    def evaluated(self, call: Call) -> Relation:
        """Compare the loss that evaluation reports for the first micro-batch with the micro-batch's own loss."""
        if why := generates(self._trainer):
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


def generates(trainer: Any) -> str:
    """Return why a trainer's inputs are not those of its data loader; empty if they are."""
    import transformers

    if type(trainer)._prepare_inputs is not transformers.Trainer._prepare_inputs:
        return f"{type(trainer).__name__} generates its inputs (rollouts)"
    return ""


def counted_elsewhere(model: Any, where: sharding.Whole, goes_on: bool) -> str:
    """Return which component would count the replayed micro-batches; empty if none would."""
    if where.steps_in_backward is not None:
        return "DeepSpeed's engine counts micro-batches itself"
    if goes_on and model is not where.inner:
        return "the run continues, and DistributedDataParallel would count one more window"
    return ""


def attempted(what: Callable[[], Any]) -> Any:
    """Call a replay; print its exception and return it as a problem, so that no rank stops."""
    try:
        return what()
    except Exception as error:  # the user's code may fail in a call that the run itself does not make
        traceback.print_exc(file=sys.stderr)
        return ranks.Mine(problem=f"{type(error).__name__}: {error}")


def _first_that_deviates(of_ranks: list[Relation]) -> Relation:
    """Return the first relation that deviates, or rank 0's."""
    return next((each for each in of_ranks if each.verdict is Verdict.DEVIATES), of_ranks[0])
