"""verl's `loss_mask` in the trainer's storage, where rollout correction has rejected tokens."""

from __future__ import annotations

import sys
from typing import Any

import torch

import rlhf_patches

from .._released import is_released, left, others, stays

NAME = "verl-rejected-loss-mask"
_MODE = "token-mean"
_VERL = ("verl",)
_OTHERWISE = ("sapo", "geo_mean")
"""The policy losses that are not averaged as `loss_agg_mode` specifies."""
_TRAINERS = ("verl.trainer.ppo.v1.trainer_base", "verl.trainer.main_ppo_sync")
_STEPS = (
    "_compute_advantage",
    "_update_actor",
    "_update_critic",
    "_setup",
    "_step_once",
    "step",
    "fit",
    "init_workers",
)
_FUNCTIONS = ("compute_rollout_correction_and_add_to_batch", "value_loss")
_AVERAGES = ("agg_loss", "compute_value_loss")
_WRITERS = ("verl.trainer.ppo.v1.agent_loop_tq", "verl.trainer.main_ppo_sync")


def with_loss_mask(fields: Any, mask: Any, batch: Any, trainer: Any, storage: Any, core_algos: Any) -> Any:
    """What the trainer writes, with `loss_mask` where the loss is to be a mean over the tokens that are kept.

    Args:
        fields: what it writes, by name; not modified.
        mask: the response mask that it has read, before tokens were rejected.
        batch: whose keys name the responses.
        trainer, storage, core_algos: the trainer and modules that it uses.
    """
    kept = fields.get("response_mask")
    if kept is None or torch.equal(kept.values(), mask.values()) or not (sizes := _mini_batches(trainer)):
        rlhf_patches.decided(NAME, False)
        return fields
    if other := _not_released(trainer, core_algos):
        left(NAME, other)
        return fields
    # as this method has read the rest, of which some fields may be missing
    stored = storage.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "loss_mask"]
    ).get("loss_mask", None)
    if not _are_equal(stored, mask):
        stays(NAME, "loss_mask is another one than response_mask", "the loss")
        return fields
    if sum(not bool(row.any()) for row in kept.unbind()) >= min(sizes):
        stays(NAME, "all responses of a mini-batch may be rejected", "the loss of such a batch")
        return fields
    rlhf_patches.decided(NAME, float(kept.values().sum() / mask.values().sum()))
    return {**fields, "loss_mask": kept}


def _mini_batches(trainer: Any) -> list[int]:
    """The numbers of responses in mini-batches whose loss is a mean over their tokens, of actor and critic."""
    try:
        config = trainer.config
        actor = config.actor_rollout_ref.actor
        models = [actor] if _has_token_means(config, actor) else []
        if vars(trainer).get("use_critic", False):
            models.append(config.critic)
        number = config.actor_rollout_ref.rollout.n
        return [int(model.ppo_mini_batch_size * number) for model in models if model.get("loss_agg_mode") == _MODE]
    except Exception:  # verl does not read these here, so a custom configuration does not fail
        return []


def _has_token_means(config: Any, actor: Any) -> bool:
    """Whether a term of the actor's loss is averaged as `loss_agg_mode` specifies."""
    if (actor.get("policy_loss") or {}).get("loss_mode") not in _OTHERWISE:
        return True
    distillation = (config.get("distillation") or {}).get("enabled")
    return bool(actor.get("entropy_coeff") or actor.get("use_kl_loss") or distillation)


def _not_released(trainer: Any, core_algos: Any) -> str:
    """What is not verl's own, of those that write `loss_mask` and divide by its sum; empty if all is."""
    # a subclass may set losses and mini-batches of its own, or make up for the tokens that are rejected
    if not is_released(trainer, _VERL) or others(trainer, *_STEPS, packages=_VERL):
        return "the trainer"
    modules = [vars(sys.modules[name]) for name in _TRAINERS if name in sys.modules]
    used = [each[name] for each in modules for name in _FUNCTIONS if name in each]
    used += [vars(core_algos)[name] for name in _AVERAGES if name in vars(core_algos)]
    if not all(is_released(each, _VERL) for each in used):
        return "a function of rollout correction or of the losses"
    own = vars(trainer)
    manager = own.get("agent_loop_manager", own.get("async_rollout_manager"))
    if not any(_is_manager(manager, sys.modules.get(name)) for name in _WRITERS):
        return "the agent loop manager"
    try:
        loss = core_algos.POLICY_LOSS_REGISTRY.get(trainer.config.actor_rollout_ref.actor.policy_loss.loss_mode)
    except Exception:  # as above
        return "the actor's configuration"
    # a loss that the workers alone know is not in this process
    return "" if loss is not None and is_released(loss, _VERL) else "the policy loss"


def _is_manager(manager: Any, module: Any) -> bool:
    """Whether this manager is the class of that module, with the workers of that module."""
    if module is None or type(manager) is not vars(module).get("AgentLoopManagerTQ"):
        return False
    workers = vars(module).get("AgentLoopWorkerTQ")
    if vars(manager).get("agent_loop_workers_class") is not workers or not is_released(manager, _VERL):
        return False
    described = getattr(workers, "__ray_metadata__", None)
    writer = getattr(getattr(described, "modified_class", None), "_agent_loop_postprocess", None)
    return writer is not None and is_released(writer, (*_VERL, "ray"))  # Ray wraps an actor's methods


def _are_equal(one: Any, other: Any) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and one.layout is torch.jagged
        and torch.equal(one.offsets(), other.offsets())
        and torch.equal(one.values(), other.values())
    )
