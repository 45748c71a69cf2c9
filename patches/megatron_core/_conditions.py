"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import moe_auxiliary_global, moe_auxiliary_padding, resume_groups


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


def weight_of_one_replica(self: Any, with_padding_mask: bool) -> float | bool | None:
    """The factor of the weight of a router's loss over all ranks.

    None without gradients, and if a function around the loss is a user's, which may have the repair.
    """
    if with_padding_mask and getattr(self, "calculate_per_token_loss", None):
        return False
    return weight_of_one_replica_without_masks(self)


def weight_of_one_replica_without_masks(self: Any) -> float | bool | None:
    """The same for releases whose router knows no padding mask."""
    try:
        replicas = self.tp_dp_cp_group.size() // self.tp_cp_group.size()
        if replicas == 1:
            return False
        if moe_auxiliary_global.replaced(self):
            return None
        if not self.get_aux_loss_coeff("global_aux_loss"):
            return False
    except AttributeError:
        return None
    return float(1 / replicas) if _has_gradients() else None


def tokens_of_all_ranks(self: Any, valid_token_count: Any) -> float | bool | None:
    """The factor of the weight of a router's loss whose tokens Megatron has counted with a padding mask.

    None without gradients, and if a function around the loss is a user's, which may have the repair.
    """
    try:
        ranks = self.tp_cp_group.size()
        if not self.calculate_per_token_loss or ranks == 1 or valid_token_count is None:
            return False
    except AttributeError:
        return None
    if isinstance(valid_token_count, int):  # counted without a mask
        return False
    counting = "get_tokens_per_expert_and_token_count"
    is_counted = hasattr(valid_token_count, "data_ptr") and not moe_auxiliary_padding.replaced(self, None, counting)
    return float(ranks) if is_counted and _has_gradients() else None


def loads_without_copies(self: Any) -> bool | None:
    """Whether an optimizer that was told to take over the model's weights leaves out copies of its own on the CPU.

    None if it has no such copy: then it may leave out what lies between the model and the optimizer on the GPU.
    """
    offloading = sys.modules.get("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    try:
        if offloading is None or not isinstance(self.optimizer, offloading.HybridDeviceOptimizer):
            return None if offloading is None else False
        copies, updated = self.optimizer.gpu_params_map_cpu_copy, self.optimizer.param_to_fp32_param
    except AttributeError:
        return None
    return None if not copies else not {*map(id, copies)} <= {*map(id, updated)}


def of_one_key(current_groups: Any, state_dict_groups: Any) -> bool | None:
    """Whether a group gets the saved state of another one, which has the same key; None if it may be its own."""
    return _is_another_s(current_groups, state_dict_groups, _is_not)


def of_one_key_in_shards(self: Any, state_dict: Any) -> bool | None:
    """The same for a distributed optimizer, which keeps its parameters: whether a group gets another one's rates."""
    try:
        if self.ddp_config.use_megatron_fsdp:
            return False
        return _is_another_s(self.optimizer.param_groups, state_dict["optimizer"]["param_groups"], _has_other_rates)
    except (AttributeError, KeyError, TypeError):
        return None


def _is_another_s(current: Sequence[Any], saved: Sequence[Any], differs: Callable[[Any, Any], bool]) -> bool | None:
    keys = getattr(sys.modules.get("megatron.core.optimizer.optimizer"), "param_group_identifier_keys", None)
    if keys is None:
        return None
    try:
        found = {_key(group, keys): group for group in saved}  # as Megatron does: the last one of a key
        if len(found) == len(saved):
            return False
        pairs = [(group, found[_key(group, keys)]) for group in current]
        wrong = any(differs(resume_groups.saved_group(group, current, saved, of, keys), of) for group, of in pairs)
        return wrong or None
    except (AttributeError, KeyError, TypeError):
        return None


def _key(group: Any, keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(group[name] if name in group else group[f"pre_{name}"] for name in keys)


def _is_not(right: Any, found: Any) -> bool:
    return right is not found


def _has_other_rates(right: Any, found: Any) -> bool:
    return bool(resume_groups._rates(right) != resume_groups._rates(found))


def saves_shifted_states(self: Any, is_loading: bool) -> bool | None:
    """Whether a checkpoint of a distributed optimizer is about to be saved in which a bucket follows a padded one."""
    if is_loading:
        return False
    try:
        before = [bucket for buffer in self.buffers for bucket in buffer.buckets[:-1]]
        return any(bucket.grad_data.numel() != bucket.numel_unpadded for bucket in before)
    except (AttributeError, TypeError):
        return None
