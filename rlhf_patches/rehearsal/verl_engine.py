"""Checks a mini-batch of one of verl's engines (``verl.workers.engine``): of an actor, a critic or an SFT trainer.

The engine's own ``forward_backward_batch`` computes the mini-batch's gradient again, in micro-batches of other sizes.
Weights, random states and the mini-batch are unchanged afterwards, so the engine can then train on it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import frequencies, mini_batch, parameters, pieces, ranks, rollouts, states, verl_formula, window
from .loop_ranks import failed
from .mini_batch import SIZES
from .relation import Relation, Verdict, not_checked

_SELECTING = ("clip_cov", "kl_cov")
"""verl's losses that treat some tokens of each micro-batch differently, by definition."""
_NO_MEAN = ("sapo", "geo_mean")
"""Those that are no mean over tokens."""
COUNT = "token count"
_FSDP = "verl.workers.engine.fsdp."


class EngineRehearsal(mini_batch.MiniBatch):
    """The rehearsal of one mini-batch.

    Args:
        engine: one of verl's engines, in training mode.
        data: the mini-batch of this rank, a TensorDict with the engine's settings.
        loss_function: the engine's loss, as ``train_batch`` gets it.
    """

    def __init__(self, engine: Any, data: Any, loss_function: Callable[..., Any]) -> None:
        super().__init__(len(data))
        self._engine, self._data, self._loss = engine, data, loss_function

    def relations(self) -> list[Relation]:
        """Return all relations; they are the same on each rank, and every rank must call it."""
        if not type(self._engine).__module__.startswith(_FSDP):
            return [not_checked(SIZES, f"{type(self._engine).__name__} is not one of verl's FSDP engines")]
        before, buffers = states.Random.now(), states.Buffers(self._engine.module)
        self._named = {name: each for name, each in self._engine.module.named_parameters() if each.requires_grad}
        without = [each for each in self._named.values() if each.grad is None]
        try:
            found = [*self._of_gradients(before), mini_batch.of_ratios(self._ratios)]
            if found[0] is not None and found[0].verdict is not Verdict.NOT_CHECKED:
                at_one = functools.partial(self._gradient, self._noting, temperature=1.0)
                found.append(
                    rollouts.of_engine(self._sampled, self._temperature(), functools.partial(self._noted, at_one))
                )
            found += [rollouts.of_samples(self._samples()), self._of_the_count()]
            found.append(mini_batch.of_trained(self._named, self._norms))
            found.append(parameters.optimizers(self._engine.optimizer, self._named))
            found.append(frequencies.relation(self._engine.module))
            return [each for each in found if each is not None]
        except Exception as error:  # the engine may fail with micro-batches of another size
            return [failed(SIZES, error)]
        finally:
            self._engine.optimizer_zero_grad()
            for each in without:  # the optimizer may lack it
                each.grad = None
            buffers.put_back()
            before.put_back()

    @property
    def of_a_critic(self) -> bool:
        return "ValueHead" in type(self._engine).__name__

    @property
    def name(self) -> str:
        """The engine's class and its loss."""
        loss = self._loss.func if isinstance(self._loss, functools.partial) else self._loss
        return f"{type(self._engine).__name__}, {getattr(loss, '__name__', type(loss).__name__)}"

    def _of_gradients(self, random: states.Random) -> list[Relation | None]:
        """The gradient as the run computes it must be the one in micro-batches of another size, and of the formula."""
        used = self._gradient(self._noting)
        self._norms = mini_batch.squares(mini_batch.local_gradients(self._named))
        group = int(_verl("utils.tensordict_utils").get_non_tensor_data(self._data, "force_group_size", 1))
        if not (rows := self._other_rows(group)):
            return [not_checked(SIZES, "each rank's mini-batch has one row, or cannot be divided otherwise")]
        random.another().put_back()
        again = self._gradient(self._scaled) / window.SCALE
        random.put_back()
        other = self._gradient(self._loss, use_dynamic_bsz=False, micro_batch_size_per_gpu=rows)
        selects = mode if (mode := self._loss_mode()) in _SELECTING else ""

        def rounded() -> torch.Tensor:
            with pieces.embeddings_moved(self._engine.module):
                return self._gradient(self._loss)

        half = getattr(self._engine, "scaler", None) is not None
        mine = (used, again, other)
        found, noise = mini_batch.of_sizes(mine, rows, rounded, sharded=True, selects=selects, half=half)
        return [found, self._of_the_formula(used, noise) if found.verdict is not Verdict.NOT_CHECKED else None]

    def _of_the_formula(self, used: torch.Tensor, noise: float) -> Relation | None:
        """The gradient must be the one of the formula that the configuration names, in float64."""
        if (config := verl_formula.config_of(self._loss)) is None or not (tokens := self._tokens()[0]):
            return None
        exact = self._gradient(functools.partial(verl_formula.loss, config, tokens))
        whole, wanted = mini_batch.together((used, exact), sharded=True)
        law = f"PPO's gradient ({config.loss_agg_mode})"
        return mini_batch.compared(verl_formula.NAME, whole, wanted, law, noise)

    def _loss_mode(self) -> str:
        """The actor's ``policy_loss.loss_mode``; empty for another loss."""
        given = self._loss.keywords if isinstance(self._loss, functools.partial) else {}
        return str(getattr(getattr(given.get("config"), "policy_loss", None), "loss_mode", ""))

    def _of_the_count(self) -> Relation | None:
        """A mean over tokens divides by the tokens that are trained."""
        given = self._loss.keywords if isinstance(self._loss, functools.partial) else {}
        if getattr(given.get("config"), "loss_agg_mode", "") != "token-mean" or self._loss_mode() in _NO_MEAN:
            return None
        trained, counted = self._tokens()
        if not trained or not counted:
            return None
        if trained == counted:
            return Relation(COUNT, Verdict.HOLDS, f"{trained:.0f} tokens")
        text = f"{trained / counted:.3f} x the mean over the trained tokens: loss_mask has {counted:.0f} tokens"
        return Relation(COUNT, Verdict.DEVIATES, f"{trained:.0f} tokens", text)

    def _tokens(self) -> list[float]:
        """The tokens that are trained, and those of the mean, on all ranks."""
        masks = [self._data.get(name, None) for name in ("response_mask", "loss_mask")]
        mine = [0.0 if each is None else float(each.sum()) for each in masks]
        of_ranks = ranks.gathered(ranks.Mine(used=torch.tensor(mine, dtype=torch.float64)))
        found: list[float] = torch.stack([each.used for each in of_ranks]).sum(0).tolist()
        return found

    def _samples(self) -> Iterator[rollouts.Row]:
        """The prompts, their answers, and these answers' log-probabilities."""
        fields = [self._data.get(name, None) for name in ("prompts", "responses", "response_mask", "old_log_probs")]
        if any(each is None for each in fields):
            return
        for prompt, response, mask, log_probs in zip(*(each.unbind() for each in fields), strict=True):
            counted = mask.bool()
            if not counted.shape == response.shape == log_probs.shape:
                return
            yield prompt.tolist(), response[counted].tolist(), float(log_probs[counted].double().sum())

    def _temperature(self) -> object:
        found = _verl("utils.tensordict_utils").get_non_tensor_data(self._data, "temperature", 1)
        return found if isinstance(found, (int, float)) else 1

    # -- calls of the engine

    def _gradient(self, loss_function: Callable[..., Any], **settings: Any) -> torch.Tensor:
        """The sketch of this rank's part of the mini-batch's gradient."""
        data = self._data.clone(recurse=False)
        _verl("utils.tensordict_utils").assign_non_tensor(data, **settings)
        self._engine.optimizer_zero_grad()
        self._engine.forward_backward_batch(data, loss_function, forward_only=False)
        return mini_batch.sketched(mini_batch.local_gradients(self._named), self._named)

    def _noting(self, *given: Any, **named: Any) -> Any:
        """The engine's loss; counts micro-batches, and compares log-probabilities."""
        self._cut += 1
        output, data = named.get("model_output"), named.get("data")
        if output and data is not None and "log_probs" in output and data.get("old_log_probs", None) is not None:
            now = _verl("workers.utils.padding").no_padding_2_padding(output["log_probs"].detach(), data).double()
            padded = data.select("response_mask", "old_log_probs").to_padded_tensor()
            apart = (now - padded["old_log_probs"].double()).abs()[padded["response_mask"].bool()]
            if apart.numel():
                self._ratios.append(apart.max().cpu())
            if data.get("rollout_log_probs", None) is not None:
                padded = data.select("response_mask", "rollout_log_probs").to_padded_tensor()
                self._sampled.add(now, padded["rollout_log_probs"], padded["response_mask"])
        return self._loss(*given, **named)

    def _scaled(self, *given: Any, **named: Any) -> Any:
        loss, *more = self._loss(*given, **named)
        return (loss * window.SCALE, *more)


def _verl(name: str) -> Any:
    return importlib.import_module(f"verl.{name}")
