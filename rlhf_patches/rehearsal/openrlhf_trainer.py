"""Checks a mini-batch of OpenRLHF's actor or critic (``openrlhf.trainer.ray``).

A copy of the trainer runs OpenRLHF's own ``ppo_train`` on the first rows of the replay buffer. Its strategy takes the
gradient of each loss by ``torch.autograd.grad``, and does not step. The trainer, its buffer, its engine, and random
states are unchanged afterwards.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import frequencies, mini_batch, parameters, pieces, ranks, rollouts, sharding, sketches, states, window
from .loop_ranks import failed
from .mini_batch import SIZES
from .relation import Relation, Verdict, not_checked

REFERENCE = "reference log-probabilities"
ACCUMULATED = "accumulated gradient"
_MASKED = ("action_log_probs", "base_action_log_probs", "rollout_log_probs", "values", "returns", "advantages")


class TrainerRehearsal(mini_batch.MiniBatch):
    """The rehearsal of one mini-batch.

    Args:
        trainer: an ``ActorPPOTrainer`` or a ``CriticPPOTrainer``.
        given: the arguments of its ``ppo_train``.
    """

    def __init__(self, trainer: Any, *given: Any, **named: Any) -> None:
        super().__init__(0)  # `_cannot` sets the number of rows
        self._trainer, self._given, self._named_given = trainer, given, named
        self.of_a_critic = hasattr(trainer, "critic")
        self._part = "critic" if self.of_a_critic else "actor"
        self._model = getattr(trainer, self._part)
        self._engine = self._model if self.of_a_critic else self._model.model
        zero = hasattr(self._engine, "zero_optimization_stage")
        self._where = sharding.Zero(self._engine) if zero else sharding.Whole(self._engine)
        self._dynamic = bool(_train(trainer.args).get("dynamic"))

    @property
    def name(self) -> str:
        """The trainer's class, and its loss."""
        loss = self._trainer.critic_loss_fn if self.of_a_critic else self._trainer.actor_loss_fn
        kind = getattr(loss, "policy_loss_type", "")
        return f"{type(self._trainer).__name__}, {type(loss).__name__}{f' ({kind})' if kind else ''}"

    def relations(self) -> list[Relation]:
        """Return all relations; they are the same on each rank, and every rank must call it."""
        why = ranks.problem(ranks.gathered(ranks.Mine(problem=self._cannot())))
        if why:
            return [not_checked(SIZES, why)]
        before, buffers = states.Random.now(), states.Buffers(self._where.inner)
        modes = [(each, each.training) for each in self._where.inner.modules()]
        try:
            found = [*self._of_gradients(before), mini_batch.of_ratios(self._ratios), self._of_reference()]
            found.append(rollouts.of_samples(self._samples()))
            named = {name: each for name, each in self._where.named.items() if each.requires_grad}
            found.append(mini_batch.of_trained(named, self._squares))
            found.append(parameters.optimizers(getattr(self._trainer, f"{self._part}_optim"), named))
            found.append(frequencies.relation(self._where.inner))
            return [each for each in found if each is not None]
        except Exception as error:  # OpenRLHF may fail with micro-batches of another size
            return [failed(SIZES, error)]
        finally:
            for module, mode in modes:
                module.training = mode
            buffers.put_back()
            before.put_back()

    def _cannot(self) -> str:
        """Why the mini-batch cannot be computed again; empty if it can. It also sets the number of rows."""
        trainer = self._trainer
        for method in ("ppo_train", "training_step"):
            if not mini_batch.is_of(type(trainer), method, "openrlhf"):
                return f"{type(trainer).__name__} or its {method} is not OpenRLHF's"
        for each in (trainer.strategy, trainer.replay_buffer):
            if not type(each).__module__.startswith("openrlhf."):
                return f"{type(each).__name__} is not OpenRLHF's"
        engine = self._engine
        if getattr(engine, "zero_optimization_stage", int)() == 3:
            return "the weights are sharded (ZeRO-3)"
        if (why := self._where.cannot()) or any(hasattr(each, "ds_id") for each in self._where.parameters):
            return why or "the weights are sharded (ZeRO-3)"
        if trainer.strategy.ring_attn_group is not None:
            return "ring attention"
        if getattr(trainer.strategy, "ds_tensor_parallel_size", 1) > 1:
            return "tensor parallelism"
        if trainer.aux_loss:
            return "the router's loss is a mean over micro-batches"
        train, number = _train(trainer.args), ranks.number()
        size = trainer.replay_buffer.sample_batch_size
        self._rows = int(train["batch_size"]) // number
        if not self._dynamic:
            self._rows = size * max(int(trainer.strategy.accumulated_gradient), 1)
        if self._rows > len(trainer.replay_buffer.items) or not self._rows:
            return f"the replay buffer has {len(trainer.replay_buffer.items)} rows, and a step {self._rows}"
        return ""

    # -- relations

    def _of_gradients(self, random: states.Random) -> list[Relation | None]:
        items = self._trainer.replay_buffer.items[: self._rows]
        self._squares = torch.zeros(0)
        used = self._gradient(items, notes=True)
        if not (rows := self._other_rows()):
            return [not_checked(SIZES, "each rank's mini-batch has one row, or cannot be divided otherwise")]
        random.another().put_back()
        again = self._gradient(items, scale=window.SCALE) / window.SCALE
        random.put_back()
        other = self._gradient(items, rows=rows)
        half = any(each.dtype == torch.float16 for each in self._where.parameters)
        mine = (used, again, other)

        def rounded() -> torch.Tensor:
            with pieces.embeddings_moved(self._where.inner):
                return self._gradient(items)

        found, noise = mini_batch.of_sizes(mine, rows, rounded, sharded=False, half=half)
        if found.verdict is Verdict.NOT_CHECKED:
            return [found]
        filled = self._gradient([_filled(each) for each in items])
        whole, without = mini_batch.together((used, filled), sharded=False)
        relations = [found, mini_batch.of_masked(whole, without, noise), self._of_divergence(items, noise)]
        at_one = functools.partial(self._gradient, items, notes=True, temperature=1.0)
        temperature = getattr(self._model, "temperature", 1)
        relations.append(rollouts.of_engine(self._sampled, temperature, functools.partial(self._noted, at_one)))
        return [*relations, self._of_the_engine(items, whole, noise) if self.ends else None]

    def _of_the_engine(self, items: Sequence[Any], whole: torch.Tensor, noise: float) -> Relation | None:
        """Before its step, DeepSpeed's engine must hold the mean of what the micro-batches' gradients are."""
        if not isinstance(self._where, sharding.Zero) or not bool(whole.isfinite().all()):
            return None
        trainer = self._of_items(items, in_order=not self._dynamic)
        strategy = trainer.strategy = _Reading(self._trainer.strategy, trainer.args, self._cut, self._where)
        trainer.ppo_train(*self._given, **self._named_given)
        if strategy.made is None:
            return not_checked(ACCUMULATED, "the engine's step was not reached")
        return mini_batch.compared(ACCUMULATED, strategy.made, whole, "the gradient of the mini-batch", noise)

    def _of_divergence(self, items: Sequence[Any], noise: float) -> Relation | None:
        used = _divergence(self._trainer.args)
        if self.of_a_critic or not used or any(each.base_action_log_probs is None for each in items):
            return None
        moved = [_filled(each) for each in items]
        for each in moved:
            each.base_action_log_probs = each.action_log_probs + mini_batch.MOVED * each.action_mask
            each.advantages = torch.zeros_like(each.advantages)
        pair = [self._gradient(moved, coefficient=coefficient) for coefficient in (1.0, 0.0)]
        with_it, without = mini_batch.together(pair, sharded=False)
        return mini_batch.of_divergence(with_it, without, noise)

    def _of_reference(self) -> Relation | None:
        """Where the reference is the policy, as at the start of a run, the KL is 0."""
        apart = []
        for each in self._trainer.replay_buffer.items[: self._rows]:
            if each.base_action_log_probs is not None and each.action_log_probs is not None:
                mask = each.action_mask.bool()
                apart += (each.base_action_log_probs.double() - each.action_log_probs.double())[mask].abs().tolist()
        largest = mini_batch.over_ranks(apart)
        if largest is None or self.of_a_critic:
            return None
        if largest <= mini_batch.FINE:
            return Relation(REFERENCE, Verdict.HOLDS, f"{largest:.1g}", "the KL is 0: the reference is the policy")
        text = "largest difference of a token; causes: a run that continues, another reference model, or rounding"
        return Relation(REFERENCE, Verdict.NOTE, f"{largest:.1g}", text)

    def _samples(self) -> Iterator[rollouts.Row]:
        """The prompts, their answers, and these answers' log-probabilities."""
        for each in self._trainer.replay_buffer.items[: self._rows]:
            if each.action_log_probs is not None and not self.of_a_critic:
                tokens, counted = each.sequences.flatten(), each.action_mask.flatten().bool()
                if not counted.numel() == each.action_log_probs.numel() == tokens.numel() - 1:
                    return
                first = int(counted.int().argmax()) + 1
                log_probability = float(each.action_log_probs.flatten()[counted].double().sum())
                yield tokens[:first].tolist(), tokens[1:][counted].tolist(), log_probability

    # -- OpenRLHF's own training

    def _gradient(
        self,
        items: Sequence[Any],
        *,
        rows: int = 0,
        scale: float = 1.0,
        coefficient: float | None = None,
        temperature: float | None = None,
        notes: bool = False,
    ) -> torch.Tensor:
        """The sketch of this rank's gradient of the mini-batch, by OpenRLHF's own ``ppo_train``."""
        dynamic = self._dynamic and not rows
        trainer = self._of_items(items, in_order=not dynamic)
        buffer = trainer.replay_buffer
        model = self._plain_model()
        if temperature is not None:
            model.temperature = temperature
        setattr(trainer, self._part, model)
        accumulated = 1 if dynamic else len(items) // (rows or buffer.sample_batch_size)
        if rows:
            buffer.sample_batch_size = trainer.micro_train_batch_size = rows
            buffer.dynamic_batch = False
            trainer.args = _without_dynamic(trainer.args)
        strategy = trainer.strategy = _Taking(
            self._trainer.strategy, trainer.args, accumulated, self._where, scale / accumulated
        )
        if notes:
            if not self.of_a_critic:
                trainer.actor_loss_fn = self._comparing(trainer.actor_loss_fn, "action_mask", "rollout_log_probs")
            strategy.squares = []
        given, named = self._given, self._named_given
        if coefficient is not None:
            given, named = (coefficient, *given[1:]), {}
        trainer.ppo_train(*given, **named)
        if notes:
            self._cut = strategy.taken
            self._squares = torch.stack(strategy.squares).sum(0)
        return strategy.parts.whole()

    def _of_items(self, items: Sequence[Any], in_order: bool) -> Any:
        """A copy of the trainer whose buffer has only these rows."""
        trainer = copy.copy(self._trainer)
        trainer.replay_buffer = copy.copy(self._trainer.replay_buffer)
        trainer.replay_buffer.items = (_InOrder if in_order else list)(_copied(each) for each in items)
        trainer.max_epochs, trainer.ema_model, trainer.dataloader_pin_memory = 1, None, False
        return trainer

    def _plain_model(self) -> Any:
        """The model without the engine, which counts micro-batches; an ``Actor`` is copied around it."""
        if self.of_a_critic:
            return self._where.inner
        model = copy.copy(self._model)
        model._modules = {**self._model._modules, "model": self._where.inner}
        return model


class _Strategy:
    """OpenRLHF's strategy, but for a mini-batch of its own, and without messages."""

    def __init__(self, strategy: Any, args: Any, accumulated: int, where: sharding.Whole) -> None:
        self._strategy, self._where = strategy, where
        self.args, self.accumulated_gradient = args, accumulated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def get_grad_norm(self, *_: Any) -> float:
        return 0.0

    def all_reduce(self, data: Any, *given: Any, **named: Any) -> Any:
        """OpenRLHF divides what it logs by the tokens of a micro-batch, of which one row may have none."""
        found = self._strategy.all_reduce(data, *given, **named)
        if isinstance(found, dict) and found.get("_num_action_tokens") == 0:
            found["_num_action_tokens"] = 1
        return found

    def is_rank_0(self) -> bool:
        """No: nothing is printed."""
        return False


class _Reading(_Strategy):
    """Reads what the engine holds before the step that would change weights."""

    made: torch.Tensor | None = None
    _taken = 0

    def backward(self, *given: Any, **named: Any) -> None:
        self._taken += 1
        self._strategy.backward(*given, **named)

    def optimizer_step(self, *given: Any, **named: Any) -> None:
        if self._taken < self.accumulated_gradient:
            self._strategy.optimizer_step(*given, **named)  # the engine counts micro-batches there
        else:
            self.made = sketches.sketch(self._where.window(), self._where.sizes)


class _Taking(_Strategy):
    """Takes gradients in place of accumulating them, and does not step."""

    def __init__(self, strategy: Any, args: Any, accumulated: int, where: sharding.Whole, scale: float) -> None:
        super().__init__(strategy, args, accumulated, where)
        self._scale = scale
        self.parts = sketches.Parts(where.sizes)
        self.squares: list[torch.Tensor] | None = None
        self.taken = 0

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        sharding.refuse_reentrant(loss)
        gradients = torch.autograd.grad(loss * self._scale, self._where.parameters, allow_unused=True)
        self.taken += 1
        for place, each in enumerate(gradients):
            self.parts.add(place, each)
        if self.squares is not None:
            self.squares.append(mini_batch.squares(gradients))

    def optimizer_step(self, *_: Any, **__: Any) -> None:
        """Nothing."""


class _InOrder(list[Any]):
    """Rows in their own order, whatever order a data loader draws: a shuffled one differs between passes."""

    _next = 0

    def __getitem__(self, place: Any) -> Any:
        self._next += 1
        return super().__getitem__((self._next - 1) % len(self))


def _copied(experience: Any) -> Any:
    """A shallow copy; OpenRLHF sets fields of it, and what it logs."""
    made = copy.copy(experience)
    made.info = dict(made.info) if made.info is not None else None
    return made


def _filled(experience: Any) -> Any:
    """A copy with zeros in masked tokens."""
    made = _copied(experience)
    mask = made.action_mask.bool()
    for name in _MASKED:
        value = getattr(made, name, None)
        if isinstance(value, torch.Tensor) and value.shape == mask.shape:
            setattr(made, name, value.masked_fill(~mask, 0))
    return made


def _train(args: Any) -> dict[str, Any]:
    """Settings by a common name; before 0.10.2 they are not in groups."""
    if hasattr(args, "train"):
        return {"dynamic": args.train.dynamic_batch_enable, "batch_size": args.train.batch_size}
    return {"dynamic": getattr(args, "use_dynamic_batch", False), "batch_size": args.train_batch_size}


def _divergence(args: Any) -> bool:
    """Whether the loss has the KL."""
    if hasattr(args, "algo"):
        return bool(args.algo.kl.use_loss and args.algo.kl.init_coef > 0)
    return bool(getattr(args, "use_kl_loss", False) and getattr(args, "init_kl_coef", 0) > 0)


def _without_dynamic(args: Any) -> Any:
    args = copy.copy(args)
    if hasattr(args, "train"):
        args.train = copy.copy(args.train)
        args.train.dynamic_batch_enable = False
    else:
        args.use_dynamic_batch = False
    return args
