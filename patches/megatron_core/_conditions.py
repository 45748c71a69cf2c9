"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import sys
from typing import Any


def _has_gradients() -> bool:
    """Whether gradients are enabled: a computation without gradients is not wrong."""
    torch: Any = sys.modules.get("torch")
    return torch is None or torch.is_grad_enabled()


def is_own(layer: Any) -> bool:
    """Whether a layer's class is megatron-core's own, not a subclass defined elsewhere."""
    # known: only a class defined there has such a module name; a subclass defined elsewhere is a user's.
    return type(layer).__module__.startswith("megatron.core.")


def is_known_delta_net(layer: Any) -> bool:
    """Whether a Gated DeltaNet's class is megatron-core's or mcore-bridge's: neither sums its norm's gradient."""
    # known: as above.
    return is_own(layer) or type(layer).__module__.startswith("mcore_bridge.")


def divided_sinks(self: Any, config: Any) -> bool | None:
    """Whether each rank has some of an attention's learnable sinks; None if a user's class may mark them."""
    if getattr(config, "softmax_type", None) != "learnable" or config.tensor_model_parallel_size == 1:
        return False
    return True if is_own(self) else None


_OF_LINEAR_LAYERS = (
    "megatron.core.extensions.transformer_engine",
    "mcore_bridge.model.gpt_model",  # OutputLayerLinear
)


def is_whole(layer: Any, parallel_mode: str | None, is_expert: bool) -> bool:
    """Whether each tensor-parallel rank has all of a linear layer of a known class; experts may differ per rank."""
    # known: as above; other classes are not changed.
    return parallel_mode == "duplicated" and not is_expert and type(layer).__module__ in _OF_LINEAR_LAYERS


def whole_on_each_rank(self: Any, parallel_mode: str | None, is_expert: bool, config: Any) -> bool:
    """Whether each of several ranks has all of a linear layer."""
    return is_whole(self, parallel_mode, is_expert) and bool(config.tensor_model_parallel_size > 1)


def heads_of_a_rank(self: Any, config: Any) -> bool | None:
    """Whether each rank has some heads of a Gated DeltaNet, and Megatron does not sum the gradient of its norm.

    None for a user's class, which may sum it.
    """
    if config.tensor_model_parallel_size == 1 or config.sequence_parallel:
        return False
    return True if is_known_delta_net(self) else None


def experts_of_a_rank(self: Any, is_expert: bool, config: Any) -> bool | None:
    """Whether tensor-parallel ranks have different experts of a grouped layer, or parts of them.

    None before 0.11, and if a user's class may mark them.
    """
    if not is_expert or config.tensor_model_parallel_size == 1:
        return False
    if not is_own(self):
        return None
    if config.expert_model_parallel_size > 1:
        return True
    ranks = getattr(config, "expert_tensor_parallel_size", None)
    return None if ranks is None else bool(ranks > 1)


def parts_of_a_sequence(config: Any) -> float | bool | None:
    """The factor by which auxiliary losses of a step differ from the configured weight.

    None without gradients, and if Megatron's own router computes no such loss: a user's router may.
    """
    ranks = config.context_parallel_size
    if ranks == 1 or not getattr(config, "num_moe_experts", None) or config.calculate_per_token_loss:
        return False
    return float(1 / ranks) if _has_gradients() and _has_auxiliary_losses(config) else None


def _has_auxiliary_losses(config: Any) -> bool:
    """Whether a loss of the router has a coefficient. Since 0.15 there may be several kinds of load balancing."""
    kinds, weights = (
        each if isinstance(each, (list, tuple)) else [each]
        for each in (
            getattr(config, "moe_router_load_balancing_type", None),
            getattr(config, "moe_aux_loss_coeff", None),
        )
    )
    balancing = any(str(kind).endswith("aux_loss") for kind in kinds) and any(weights)
    return bool(balancing or getattr(config, "moe_z_loss_coeff", None))


def tokens_of_a_rank(self: Any) -> bool | None:
    """Whether a router multiplies its losses by the tokens of one of several ranks that share a sequence.

    None if the router computes no loss: in evaluation, and without gradients.
    """
    config = self.config
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    if not config.calculate_per_token_loss or ranks == 1:
        return False
    return True if getattr(self, "training", True) and _has_gradients() else None


def z_loss_of_a_rank(self: Any) -> bool | None:
    """The same for a router's z-loss; None for other losses, which depend on the batch or a padding mask."""
    config = self.config
    found = tokens_of_a_rank(self)
    if found is not False:
        return found if config.moe_z_loss_coeff else None
    of_sequences = "seq_aux_loss" in config.moe_router_load_balancing_type  # a string, or a list
    return None if config.calculate_per_token_loss and of_sequences else False


def counts_in_half(self: Any) -> bool | None:
    """Whether a router is about to count tokens per expert in the model's 16 bits.

    None if it counts nothing, and if its counters are no longer in 16 bits: through the repair, or a user's code.
    """
    if not self.config.moe_router_enable_expert_bias or not (self.config.bf16 or self.config.fp16):
        return False
    counts = getattr(self, "local_tokens_per_expert", None)
    if counts is not None and str(counts.dtype) not in ("torch.bfloat16", "torch.float16"):
        return None
    # mcore-bridge marks a router that counts nothing: LoRA's.
    return True if _has_gradients() and not getattr(self, "frozen_expert_bias", False) else None
