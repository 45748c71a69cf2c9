"""Checks a mini-batch of SkyRL's policy or critic worker (``skyrl.backends.skyrl_train.workers``) with FSDP.

A copy of the worker runs SkyRL's own ``forward_backward`` and ``optim_step``, with other settings; its strategy reads
the gradient in place of a step. The worker, its settings, weights, and random states are unchanged afterwards.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import frequencies, mini_batch, parameters, pieces, ranks, rollouts, sharding, states, window
from .loop_ranks import failed
from .mini_batch import KL, SIZES
from .relation import Relation, Verdict, not_checked

ADVANTAGES = "advantages"
OUTPUTS = "outputs of samples"
_MASKED = ("action_log_probs", "base_action_log_probs", "rollout_logprobs", "values", "returns", "advantages")
_APART = 0.1
"""Log-probabilities of a sample in other micro-batches differ by less, in nats, on average."""
_OF_RESPONSES = ("grpo", "rloo")
"""SkyRL's estimators that give all tokens of a response one advantage."""


class WorkerRehearsal(mini_batch.MiniBatch):
    """The rehearsal of one mini-batch.

    Args:
        worker: a ``PolicyWorkerBase`` or a ``CriticWorkerBase``.
        data: the mini-batch of this rank.
        given: the other arguments of ``forward_backward``.
    """

    def __init__(self, worker: Any, data: Any, *given: Any, **named: Any) -> None:
        super().__init__(len(data))
        self._worker, self._data, self._given, self._named_given = worker, data, given, named
        self.of_a_critic = hasattr(worker, "critic_loss_fn")
        self._loss = named.get("loss_fn", given[0] if given else None)
        self._outputs: Any = None

    @property
    def name(self) -> str:
        """The worker's class, and its loss."""
        loss = "value loss" if self.of_a_critic else self._loss or self._worker.cfg.algorithm.policy_loss_type
        return f"{type(self._worker).__name__}, {loss}"

    def relations(self) -> list[Relation]:
        """Return all relations; they are the same on each rank, and every rank must call it."""
        why = ranks.problem(ranks.gathered(ranks.Mine(problem=self._cannot())))
        if why:
            return [not_checked(SIZES, why)]
        model = self._worker.model
        self._reshard()
        before, buffers = states.Random.now(), states.Buffers(model)
        modes = [(each, each.training) for each in model.modules()]
        self._named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._sharded = any(isinstance(each, DTensor) for each in self._named.values())
        without = [each for each in self._named.values() if each.grad is None]
        try:
            found = [*self._of_gradients(before), mini_batch.of_ratios(self._ratios), self._of_advantages()]
            found.append(rollouts.of_samples(self._samples()))
            found.append(mini_batch.of_trained(self._named, self._squares))
            found.append(parameters.optimizers(self._worker.optimizer, self._named))
            found.append(frequencies.relation(model))
            return [each for each in found if each is not None]
        except Exception as error:  # SkyRL may fail with micro-batches of another size
            return [failed(SIZES, error)]
        finally:
            self._reshard()
            self._clear()
            for parameter in without:
                parameter.grad = None
            for module, mode in modes:
                module.training = mode
            buffers.put_back()
            before.put_back()

    def _cannot(self) -> str:
        """Why the mini-batch cannot be computed again; empty if it can."""
        worker = self._worker
        kind = type(worker)
        if hasattr(worker, "actor_module"):
            return f"{kind.__name__} is not one of SkyRL's FSDP workers"
        for method in ("forward_backward", "_forward_backward_micro", "optim_step"):
            if not mini_batch.is_of(kind, method, "skyrl"):
                return f"{kind.__name__} or its {method} is not SkyRL's"
        if any("FlatParameter" in type(each).__name__ for each in worker.model.parameters()):
            return "the weights are sharded by FSDP1"
        if any(each.grad is not None and bool(mini_batch.local(each.grad).any()) for each in worker.model.parameters()):
            return "the gradients of another request are there already"
        return ""

    # -- relations

    def _of_gradients(self, random: states.Random) -> list[Relation | None]:
        self._squares = torch.zeros(0)
        used = self._gradient(self._data, notes=True)
        if not (rows := self._other_rows()):
            return [not_checked(SIZES, "each rank's mini-batch has one row, or cannot be divided otherwise")]
        random.another().put_back()
        again = self._gradient(self._data, scale=window.SCALE) / window.SCALE
        random.put_back()
        other = self._gradient(self._data, rows=rows)
        outputs = self._outputs
        half = any(each.dtype == torch.float16 for each in self._named.values())

        def rounded() -> torch.Tensor:
            with pieces.embeddings_moved(self._worker.model):
                return self._gradient(self._data)

        found, noise = mini_batch.of_sizes((used, again, other), rows, rounded, sharded=self._sharded, half=half)
        if found.verdict is Verdict.NOT_CHECKED:
            return [found]
        filled = self._gradient(self._filled())
        whole, without = mini_batch.together((used, filled), self._sharded)
        masked = mini_batch.of_masked(whole, without, noise)
        at_one = functools.partial(self._gradient, self._data, notes=True, temperature=1.0)
        temperature = getattr(self._worker.cfg.algorithm, "temperature", 1)
        engine = rollouts.of_engine(self._sampled, temperature, functools.partial(self._noted, at_one))
        return [found, masked, self._of_outputs(self._own_outputs, outputs), self._of_divergence(noise), engine]

    def _of_divergence(self, noise: float) -> Relation | None:
        """Where the reference is moved, the KL loss must have a gradient."""
        algorithm = self._worker.cfg.algorithm
        base = self._data.get("base_action_log_probs")
        if self.of_a_critic or self._loss is not None or not getattr(algorithm, "use_kl_loss", False):
            return None
        if not algorithm.kl_loss_coef or base is None:
            return not_checked(KL, "its coefficient is 0, or there is no reference")
        data = self._filled()
        data["base_action_log_probs"] = data["action_log_probs"] + mini_batch.MOVED * data["loss_mask"]
        data["advantages"] = torch.zeros_like(data["advantages"])
        pair = [self._gradient(data, kl_loss_coef=coefficient) for coefficient in (1.0, 0.0)]
        with_it, without = mini_batch.together(pair, self._sharded)
        return mini_batch.of_divergence(with_it, without, noise)

    def _of_advantages(self) -> Relation | None:
        """GRPO and RLOO give all tokens of a response one advantage; tokens of it without one are not trained."""
        estimator = str(getattr(self._worker.cfg.algorithm, "advantage_estimator", "")).rpartition(".")[2].lower()
        advantages, mask = self._data.get("advantages"), self._data.get("loss_mask")
        if self.of_a_critic or self._loss is not None or estimator not in _OF_RESPONSES or advantages is None:
            return None
        counted, none = mask.bool(), (advantages == 0) & mask.bool()
        rows = (none.any(-1) & (counted & ~none).any(-1)).nonzero()[:, 0]
        mine = torch.tensor([float(len(rows)), float(none[rows].sum()), float(counted.sum()), float(len(mask))])
        total = torch.stack([each.used for each in ranks.gathered(ranks.Mine(used=mine))]).sum(0).int().tolist()
        if not total[0]:
            return Relation(ADVANTAGES, Verdict.HOLDS, f"{total[3]} rows", f"one for each response ({estimator})")
        text = f"{total[0]} of {total[3]} rows have no advantage in a part of their tokens"
        return Relation(ADVANTAGES, Verdict.DEVIATES, f"{total[1]} of {total[2]} tokens", text)

    def _of_outputs(self, used: Any, other: Any) -> Relation | None:
        """What a client gets of each sample must not depend on micro-batches."""
        wrong = -1.0
        if self._loss is not None and used is not None and other is not None:
            pairs = [*zip(used, other, strict=False)][: self._rows]
            wrong = float(sum(not _near(one.get("logprobs"), two.get("logprobs")) for one, two in pairs))
            wrong += max(0, self._rows - len(pairs)) + max(0, len(used) - self._rows)
        of_ranks = [float(each.used) for each in ranks.gathered(ranks.Mine(used=torch.tensor(wrong)))]
        if min(of_ranks) < 0:
            return None
        if not any(of_ranks):
            return Relation(OUTPUTS, Verdict.HOLDS, f"{self._rows} samples")
        text = "samples got log-probabilities of others, or there are more outputs than samples"
        return Relation(OUTPUTS, Verdict.DEVIATES, f"{int(sum(of_ranks))} wrong", text)

    def _samples(self) -> Iterator[rollouts.Row]:
        """The prompts, their answers, and these answers' log-probabilities."""
        log_probs, mask = self._data.get("action_log_probs"), self._data.get("loss_mask")
        if self.of_a_critic or self._loss is not None or log_probs is None or mask is None:
            return
        tokens, present = self._data["sequences"], self._data["attention_mask"].bool()
        actions = log_probs.shape[1]
        for row, counted in enumerate(mask.bool()):
            prompt = tokens[row, :-actions][present[row, :-actions]]
            answer = tokens[row, -actions:][counted]
            yield prompt.tolist(), answer.tolist(), float(log_probs[row][counted].double().sum())

    def _filled(self) -> Any:
        """The mini-batch with zeros in masked tokens."""
        data = _fresh(self._data)
        mask = data.get("loss_mask")
        for name in _MASKED if mask is not None else ():
            value = data.get(name)
            if isinstance(value, torch.Tensor) and value.shape == mask.shape:
                data[name] = value.masked_fill(~mask.bool(), 0)
        return data

    # -- SkyRL's own training

    def _gradient(
        self, data: Any, *, rows: int = 0, scale: float = 1.0, notes: bool = False, **algorithm: Any
    ) -> torch.Tensor:
        """The sketch of this rank's part of the gradient, by SkyRL's own ``forward_backward`` and ``optim_step``."""
        worker = copy.copy(self._worker)
        strategy = worker.strategy = _Taking(self._worker.strategy, self._named, scale)
        if rows or algorithm:
            worker.cfg = copy.deepcopy(worker.cfg)
        if rows:
            worker.cfg.micro_train_batch_size_per_gpu = rows
            if getattr(worker.cfg, "max_tokens_per_microbatch", None) is not None:
                worker.cfg.max_tokens_per_microbatch = -1
        for name, value in algorithm.items():
            setattr(worker.cfg.algorithm, name, value)
        if notes and not self.of_a_critic:
            worker.policy_loss_fn = self._comparing(worker.policy_loss_fn, "loss_mask", "rollout_logprobs")
        self._clear()
        output = worker.forward_backward(_fresh(data), *self._given, **self._named_given)
        worker.optim_step()
        self._outputs = output.get("loss_fn_outputs") if isinstance(output, Mapping) else _outputs(output)
        if notes:
            self._cut, self._own_outputs = strategy.taken, self._outputs
            self._squares = mini_batch.squares(strategy.gradients)
        found = mini_batch.sketched(strategy.gradients, self._named)
        self._clear()
        return found

    def _reshard(self) -> None:
        """A forward pass without a backward pass leaves the parameters of FSDP2's root whole."""
        for each in self._worker.model.modules():
            if sharding.is_fully_sharded(each):
                each.reshard()

    def _clear(self) -> None:
        for each in self._named.values():
            if each.grad is not None:
                each.grad = None


class _Taking:
    """SkyRL's strategy, but that it reads the gradient in place of a step."""

    def __init__(self, strategy: Any, named: Mapping[str, torch.nn.Parameter], scale: float) -> None:
        self._strategy, self._named, self._scale = strategy, named, scale
        self.gradients: list[torch.Tensor | None] = []
        self.taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def backward(self, loss: torch.Tensor, *given: Any, **named: Any) -> None:
        self.taken += 1
        self._strategy.backward(loss * self._scale, *given, **named)

    def optimizer_step(self, *_: Any, **__: Any) -> None:
        self.gradients = mini_batch.local_gradients(self._named)


def _fresh(data: Any) -> Any:
    """A shallow copy of a batch, with its metadata."""
    made = type(data)({name: value for name, value in data.items()})
    made.metadata = copy.copy(data.metadata)
    return made


def _outputs(output: Any) -> Any:
    return getattr(output, "loss_fn_outputs", None)


def _near(one: Any, other: Any) -> bool:
    """Whether two lists of log-probabilities are those of one sample."""
    if one is None or other is None or len(one) != len(other):
        return one is None and other is None
    return bool(sum(abs(a - b) for a, b in zip(one, other, strict=True)) <= _APART * len(one))
