"""In which calls the bugs of these patches occur (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any

from . import rollout_temperature


def mean_with_padding(data: Any) -> bool | None:
    """Whether padding changes the mean of a batch's advantages; None for tensors on a device.

    SkyRL normalizes in the trainer's process, on the CPU, where values can be read without waiting.

    Args:
        data: has ``advantages`` and ``response_mask``, ``[batch, tokens]`` each.
    """
    advantages, mask = data["advantages"], data["response_mask"]
    if advantages.device.type != "cpu" or mask.device.type != "cpu":
        return None
    if not bool((mask == 0).any()):
        return False
    of_responses = (advantages * mask).sum() / mask.sum()
    return bool((advantages.mean() - of_responses).abs() > 1e-6 * advantages.abs().max())  # beyond rounding


def normalized_mean_with_padding(self: Any, data: Any) -> bool | None:
    """The same of SkyRL's trainer, which normalizes only on request."""
    return mean_with_padding(data) if self.cfg.trainer.algorithm.advantage_batch_normalize else False


def at_another_temperature(cfg: Any) -> bool | None:
    """Whether rollouts' log-probabilities are at another temperature than training; None with other settings."""
    return False if rollout_temperature.of_training(cfg) in (None, 1) else None  # the repair decides


def has_a_kl_loss(self: Any, loss_fn: Any, loss_fn_config: Any) -> bool | None:
    """Whether a worker's loss contains KL; None for settings of this call."""
    if loss_fn_config is not None:
        return None
    algorithm = self.cfg.algorithm
    if (algorithm.policy_loss_type if loss_fn is None else loss_fn) == "cross_entropy":
        return False
    return bool(algorithm.use_kl_loss and algorithm.kl_loss_coef)


def reduces_too_early(self: Any, micro_batches: Any) -> bool | None:
    """Whether Megatron's buckets wait for another number of gradients than this call brings.

    None before the first step has ended, if a step takes several calls, and with a megatron-core that does not count.
    """
    groups = [group for chunk in self.actor_module for group in getattr(chunk, "bucket_groups", ())]
    if not any(group.ddp_config.overlap_grad_reduce for group in groups):
        return False
    for group in groups:
        waits_for = getattr(group, "golden_per_param_grad_ready_counts", None)
        if not waits_for or group.per_param_grad_ready_counts:
            return None
        if min(waits_for.values()) != len(micro_batches):  # a shared parameter has several for each
            return True
    return False
