"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

_LOSSES = "verl.workers.utils.losses"


def is_called_by_an_engine() -> bool:
    """Whether an engine calls the value loss that runs: a user's loss around it may already scale the result."""
    frame: FrameType | None = sys._getframe(1)  # known: who calls the loss decides who scales it
    is_within = False
    while frame is not None and not (is_within and not _is_passed(_module(frame))):
        is_within = is_within or _module(frame) == _LOSSES
        frame = frame.f_back  # known: a module's name is that of its code
    if frame is None or _module(frame).partition(".")[0] in ("verl", "rlhf_patches"):
        return True
    engines = sys.modules.get("verl.workers.engine.base")
    return engines is not None and issubclass(type(frame.f_locals.get("self")), engines.BaseEngine)


def _is_passed(module: str) -> bool:
    """Whether its code hands on what it calls: the loss itself, and verl's decorators."""
    return module == _LOSSES or module.startswith("verl.utils.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def critic_micro_batches(config: Any, data: Any) -> float | bool | None:
    """The number of micro-batches per mini-batch and rank, for the critic's loss; False for one on one rank.

    None where their rows do not decide, and the repair does: for one micro-batch on several ranks, or of sequences
    without a token; for `seq-mean-token-sum-norm`, which is right in 0.7.0; for a trainer that does not set the size of
    the mini-batch; and for a user's loss around verl's.
    """
    if not is_called_by_an_engine():
        return None
    ranks, rows = (_whole_number(data, name) for name in ("dp_size", "global_batch_size"))
    if not ranks or not rows or not data.batch_size[0]:
        return None
    times = rows / (ranks * data.batch_size[0])
    if times == 1:
        return False if ranks == 1 and config.loss_agg_mode == "token-mean" else None
    return None if config.loss_agg_mode == "seq-mean-token-sum-norm" or times < 1 else float(times)


def _whole_number(data: Any, name: str) -> int | None:
    try:
        found = data[name]
    except KeyError:
        return None
    return found if isinstance(found, int) else None


def gmpo_micro_batches(config: Any, response_mask: Any) -> float | bool | None:
    """The factor of GMPO's loss: the number of micro-batches; None for a trainer that does not set the rows of all."""
    numbers = getattr(config, "global_batch_info", None) or {}
    ranks, rows = numbers.get("dp_size"), numbers.get("global_batch_size")
    if not isinstance(ranks, int) or not isinstance(rows, int) or not ranks or not rows or not len(response_mask):
        return None
    times = rows / (ranks * len(response_mask))
    return False if times == 1 else float(times)


_AGGREGATED = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "clip_cov", "kl_cov", "dro", "cispo")
"""The policy losses of verl that are averaged as ``loss_agg_mode`` specifies."""


def divides_by_the_longest(self: Any) -> bool | None:
    """A worker: whether its actor's loss is divided by the longest response of a micro-batch.

    True in the trainer of 0.9 whose batches have no padding. None in 0.8, where the worker cannot tell which trainer it
    belongs to, and for another trainer's worker.
    """
    if "actor" not in self.role:
        return False
    actor = self.config.actor
    if actor.get("loss_agg_mode") != "seq-mean-token-sum-norm" or actor.get("loss_scale_factor") is not None:
        return False
    run = self.config._get_root()
    of_default = run.get("trainer", {}).get("use_v1")
    # main_ppo enables the queue when it starts that trainer; other programs share the default of `use_v1`.
    queued = run.get("transfer_queue", {}).get("enable")
    if of_default is False and not queued:
        return False
    if not of_default or not queued or self.distillation_enabled:
        return None
    return True if actor.get("policy_loss", {}).get("loss_mode", "vanilla") in _AGGREGATED else None


def flattens_to_a_copy(hidden_states: Any) -> bool:
    """Whether the hidden states of a batch need a gradient, and flatten to a copy, which has none."""
    if hidden_states.dim() != 3 or not hidden_states.requires_grad or not hidden_states.numel():
        return False
    rows, length, _ = hidden_states.shape
    of_row, of_token, _ = hidden_states.stride()
    return bool(rows > 1 and length > 1 and of_row != length * of_token)


def adds_up_in_16_bits(wrap_config: Any, bridge: Any, provider: Any, override_ddp_config: Any) -> bool | None:
    """Whether ranks add up gradients of 16 bits on Megatron-Bridge, and nobody has chosen so.

    None on one rank, where the number of micro-batches decides; with Megatron's FSDP or a layer-wise optimizer; where
    some parameters accumulate in float32; and where the model's type is not known.
    """
    if bridge is None or provider is None or not wrap_config.wrap_with_ddp:
        return False
    chosen = override_ddp_config or {}
    if "grad_reduce_in_fp32" in chosen:
        return False
    if not provider.bf16 and not provider.fp16:
        return False if str(getattr(provider, "params_dtype", "torch.float32")) == "torch.float32" else None
    others = ("use_megatron_fsdp", "use_layer_wise_distributed_optimizer")
    if chosen.get("param_name_patterns_for_fp32_local_accumulation") or any(getattr(wrap_config, o, 0) for o in others):
        return None
    ranks = sys.modules["megatron.core.parallel_state"].get_data_parallel_world_size(with_context_parallel=True)
    return True if ranks > 1 else None


def has_singletons(index: Any) -> bool | None:
    """Whether a response is alone in its group; None for other labels than NumPy's strings and integers."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(index, numpy.ndarray):
        return None
    labels = index.tolist()
    return 1 in Counter(labels).values() if all(isinstance(label, (str, int)) for label in labels) else None


def loads_weights(peft_config: Any, base_sync_done: bool) -> bool | None:
    """False for weights that are no adapter's; None for an adapter, whose buckets decide."""
    return None if peft_config and base_sync_done else False


def sends_the_base_model(self: Any) -> bool | None:
    """Whether an FSDP2 engine sends a model without the LoRA that it has to merge; None with DoRA."""
    module = self.module
    if not self.model_config.lora.get("merge", False) or not hasattr(module, "peft_config"):
        return False
    if not isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule):
        return False
    return None if any(getattr(each, "use_dora", False) for each in module.peft_config.values()) else True


def averages_over_another_mini_batch(config: Any, distillation_config: Any, data: Any) -> bool | None:
    """Whether 0.8.0 averages a distillation loss over numbers that are not its own mini-batch's; otherwise None.

    False is never known: in the same call, the metrics of a micro-batch without a token raise.
    """
    names = ("dp_size", "batch_num_tokens", "global_batch_size")
    ranks, tokens, rows = (_whole_number(data, name) for name in names)
    settings = distillation_config.distillation_loss
    if not ranks or not tokens or not rows:
        return None
    if settings.use_policy_gradient and settings.policy_loss_mode not in _AGGREGATED:
        return None
    left, mode = config.global_batch_info, config.loss_agg_mode
    over, own = ("batch_num_tokens", tokens) if mode == "token-mean" else ("global_batch_size", rows)
    if left.get(over) is None:  # averaged over the micro-batch, which may be the whole mini-batch
        return True if ranks * data.batch_size[0] < rows else None
    return True if (left.get("dp_size", 1), left[over]) != (ranks, own) else None


def sends_no_adapter(self: Any, mode: Any) -> bool | None:
    """Whether a worker of FSDP has an adapter, and sends a model without it; None for others' adapters."""
    return _sends_no_adapter(self, self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode)


def sends_no_adapter_by_its_settings(self: Any) -> bool | None:
    """The same in 0.7.1."""
    return _sends_no_adapter(self, self.config.rollout.checkpoint_engine.backend)


def _sends_no_adapter(worker: Any, backend: Any) -> bool | None:
    engine = worker.actor.engine
    if backend == "naive" or engine.model_config.lora.get("merge", False):
        return False
    if backend == "delta_sharded" or not isinstance(engine.module, sys.modules["torch"].nn.Module):
        return None
    return hasattr(getattr(engine.module, "_fsdp_wrapped_module", engine.module), "peft_config")
