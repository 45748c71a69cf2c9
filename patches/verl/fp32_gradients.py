"""verl on Megatron-Bridge: accumulate gradients in float32, as verl's other Megatron paths do."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_FUNCTION = "verl.utils.megatron_utils:make_megatron_module"
# The user's override_ddp_config takes precedence. megatron-core rejects the flag together with these patterns, which
# accumulate in float32 themselves. 0.9.1's function reads the size differently: there the engine puts float32 into
# the override.
_FLAG = "'grad_reduce_in_fp32': not {}.get('param_name_patterns_for_fp32_local_accumulation')"
_BEFORE_0_9_1 = 'hasattr(hf_config, "text_config")'
_BUILT = Rewrite(
    target=_FUNCTION,
    pattern="DistributedDataParallelConfig(**ddp_config_dict)",
    alongside=(_BEFORE_0_9_1, "provider.provide_distributed_model($$$ARGUMENTS)"),
    replacement=f"DistributedDataParallelConfig(**{{{_FLAG.format('ddp_config_dict')}, **ddp_config_dict}})",
)
_GIVEN = "(override_ddp_config or {})"
_ASKED = "wrap_with_ddp=$WRAP, use_distributed_optimizer=$OPTIMIZER, use_megatron_fsdp=$FSDP, overrides="
_BY_BRIDGE = Rewrite(
    target=_FUNCTION,
    pattern=f"create_ddp_config({_ASKED}override_ddp_config)",
    alongside=(_BEFORE_0_9_1,),
    replacement=f"create_ddp_config({_ASKED}{{{_FLAG.format(_GIVEN)}, **{_GIVEN}}})",
)

PATCH = Patch(
    name="verl-fp32-gradients",
    summary="gradients accumulate in float32 on Megatron-Bridge too, unless override_ddp_config sets another type",
    harm="wrong gradient",
    bug="on Megatron-Bridge gradients accumulate in bfloat16 over micro-batches and ranks",
    when="Megatron-Bridge (vanilla_mbridge=False, the default of 0.9.0), and several micro-batches or ranks",
    excluded_by=("vanilla_mbridge=true",),
    symptom="""\
With Megatron-Bridge (`vanilla_mbridge=False`, the default since 0.9.0) a policy or a critic learns slightly worse than
with mbridge. The error grows with the number of micro-batches per mini-batch: gradients are off by 1 % at 64. There is
no error message.""",
    cause="""\
`make_megatron_module` passes Megatron-Bridge a DistributedDataParallelConfig in which `grad_reduce_in_fp32` is False,
megatron-core's default. verl's own wrapping and mbridge's set it to True.""",
    repair="""\
The patch sets `grad_reduce_in_fp32` to True on Megatron-Bridge too. `override_ddp_config` takes precedence, as does the
value that 0.9.0 sets itself for `main_grads_dtype` with a precision-aware optimizer. Where
`param_name_patterns_for_fp32_local_accumulation` is set, the flag stays False, since megatron-core rejects the
combination. Models without DDP, such as the reference model, have no gradients. The buffers take 4 bytes per trainable
parameter instead of 2, and reductions send twice as many bytes.""",
    changes_numbers="""\
verl 0.7.0 to 0.9.0 accumulated gradients in bfloat16 on Megatron-Bridge: each is off by about 1 % at 64 micro-batches,
at random and towards smaller values. With the patch sums are exact to float32. The learning rate is not affected. The
patch takes 2 more bytes of memory per trainable parameter: a run that only just fits can keep the released behavior
with `+actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=False`, and the same for a critic.

Training can continue from existing checkpoints, except for the optimizer's state in the format dp_reshardable, the
default of 0.8.0 and 0.9.0. This format stores the state under the name of the sums' type, so a run with the patch does
not resume from a checkpoint without it ("Missing key in checkpoint state_dict"), nor the reverse, as from 0.9.0 to
0.9.1. Finish such a run with the setting above or with `RLHF_PATCHES_DISABLE=verl-fp32-gradients`.""",
    references=("https://github.com/verl-project/verl/pull/7485",),
    variants=(
        Variant(Guard("verl", ">=0.7.0,<=0.7.1"), (_BUILT,)),
        Variant(Guard("verl", ">=0.8.0,<=0.8.0"), (_BY_BRIDGE,)),
        Variant(Guard("verl", ">=0.9.0,<0.9.1"), (_BUILT, _BY_BRIDGE)),
    ),
    obsolete_when="when the oldest verl in use is 0.9.1",
    conditions=(Condition(_FUNCTION, f"{__package__}._conditions:adds_up_in_16_bits"),),
)
