"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def is_own(layer: Any) -> bool:
    """Whether a layer's class is megatron-core's own, and none that derives from it elsewhere."""
    # known: only a class that is defined there has such a name; what derives from it elsewhere is a user's.
    return type(layer).__module__.startswith("megatron.core.")


def divided_sinks(config: Any) -> bool:
    """Of an attention's configuration: whether ranks have some of the learnable sinks each."""
    return bool(getattr(config, "softmax_type", None) == "learnable" and config.tensor_model_parallel_size > 1)


_OF_LINEAR_LAYERS = (
    "megatron.core.extensions.transformer_engine",
    "mcore_bridge.model.gpt_model",  # OutputLayerLinear
)


def is_whole(layer: Any, parallel_mode: str | None, is_expert: bool) -> bool:
    """Whether a linear layer of a known class is whole on each tensor-parallel rank; each may have other experts."""
    # known: as above; all others stay as they are.
    return parallel_mode == "duplicated" and not is_expert and type(layer).__module__ in _OF_LINEAR_LAYERS


def whole_on_each_rank(self: Any, parallel_mode: str | None, is_expert: bool, config: Any) -> bool:
    """Of a linear layer: whether each of several ranks has all of it."""
    return is_whole(self, parallel_mode, is_expert) and bool(config.tensor_model_parallel_size > 1)


def heads_of_a_rank(config: Any) -> bool:
    """Of a Gated DeltaNet: whether ranks have some heads each, and nothing adds up the gradient of its norm."""
    return bool(config.tensor_model_parallel_size > 1 and not config.sequence_parallel)


def experts_of_a_rank(is_expert: bool, config: Any) -> bool | None:
    """Of a grouped layer: whether tensor-parallel ranks have other experts, or parts of them; None before 0.11."""
    if not is_expert or config.tensor_model_parallel_size == 1:
        return False
    if config.expert_model_parallel_size > 1:
        return True
    ranks = getattr(config, "expert_tensor_parallel_size", None)
    return None if ranks is None else bool(ranks > 1)


def parts_of_a_sequence(config: Any) -> float | bool:
    """Of a step: how many times the weight that was set auxiliary losses have."""
    ranks = config.context_parallel_size
    if ranks == 1 or not getattr(config, "num_moe_experts", None) or config.calculate_per_token_loss:
        return False
    return float(1 / ranks)


def tokens_of_a_rank(self: Any) -> bool:
    """Of a router: whether its losses are multiplied by the tokens of one rank of several that share a sequence."""
    config = self.config
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    return bool(config.calculate_per_token_loss and ranks > 1)


def z_loss_of_a_rank(self: Any) -> bool | None:
    """The same of a router's z-loss; None where it has another loss: its batch, or a padding mask, would tell."""
    config = self.config
    if tokens_of_a_rank(self):
        return True if config.moe_z_loss_coeff else None
    of_sequences = "seq_aux_loss" in config.moe_router_load_balancing_type  # a text, or a list
    return None if config.calculate_per_token_loss and of_sequences else False


def counts_in_half(self: Any) -> bool:
    """Of a router: whether tokens per expert are counted in the model's 16 bits."""
    return bool(self.config.moe_router_enable_expert_bias and (self.config.bf16 or self.config.fp16))
