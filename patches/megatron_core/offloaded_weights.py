"""megatron-core: weights loaded after an optimizer with CPU offload was built reach the CPU's copies."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_RELOADED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params"
_FLAG = "self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8"  # then the optimizer steps the model's own shards


# Megatron-FSDP has its own shards; before 0.14.0rc7 it had another name.
_FSDP = "getattr(self.ddp_config, 'use_megatron_fsdp', False) or getattr(self.ddp_config, 'use_custom_fsdp', False)"

REWRITES = (
    Rewrite(
        target="megatron.core.optimizer.cpu_offloading.hybrid_optimizer:"
        "HybridDeviceOptimizer.update_fp32_param_by_new_param",
        pattern="self.param_to_fp32_param.items()",
        alongside=("fp32_param.data.copy_(param)",),
        # Both dictionaries have the same tensor for a parameter that is in both.
        replacement="{**self.gpu_params_map_cpu_copy, **self.param_to_fp32_param}.items()",
    ),
    Rewrite(
        target=_RELOADED,
        pattern="isinstance(self.optimizer, HybridDeviceOptimizer)",
        alongside=("self.optimizer.update_fp32_param_by_new_param()", _FLAG),
        replacement=f"isinstance(self.optimizer, HybridDeviceOptimizer) and ({_FLAG} or {_FSDP})",
    ),
    Rewrite(
        target=_RELOADED,
        pattern="copy_group_params(self.model_fp32_groups, self.shard_fp32_groups)",
        alongside=("self.optimizer.update_fp32_param_by_new_param()",),
        replacement="(copy_group_params(self.model_fp32_groups, self.shard_fp32_groups), "
        "isinstance(self.optimizer, HybridDeviceOptimizer) and self.optimizer.update_fp32_param_by_new_param())",
    ),
)

PATCH = Patch(
    name="megatron-core-offloaded-weights",
    summary="an optimizer with CPU offload updates the weights that were loaded after it was built",
    harm="wrong weights",
    bug="with CPU offload, weights that are loaded after the optimizer was built are lost at its first step",
    when="optimizer_cpu_offload without use_precision_aware_optimizer, and a checkpoint without optimizer state",
    excluded_by=("optimizer_cpu_offload=false",),
    symptom="""\
With `optimizer_cpu_offload` and without `use_precision_aware_optimizer`, in bf16 or fp16, a run starts from a
checkpoint without optimizer state, for example a fine-tuning. Its first forward uses the loaded weights. From the first
step on, the model has the random weights that it was built with. No error is raised. Megatron-LM's own arguments reject
this combination; NeMo-RL and Megatron-Bridge are affected (NeMo-RL's #2372).""",
    cause="""\
A CPU optimizer steps copies that were made when the optimizer was built, and each step overwrites the model with them.
`reload_model_params`, which is called after weights were loaded, updates a copy only if its precision differs from that
of its source. Without `use_precision_aware_optimizer`, both are float32. It also omits the float32 shards between the
model and those copies.""",
    repair="""\
`reload_model_params` copies the loaded weights into the optimizer's float32 shards, as it does without offload, and
then into every copy on the CPU. The first step starts from the loaded weights.

With `use_precision_aware_optimizer`, and without offload, results are bitwise identical. The patch does nothing before
`reload_model_params` is called: a trainer that loads weights without this call still loses them. The patch does not
change anything without the distributed optimizer. NeMo-RL's and Megatron-Bridge's own repairs may stay, because they
copy the same values.""",
    changes_numbers="""\
Since megatron-core 0.13.0, the first release with `HybridDeviceOptimizer.update_fp32_param_by_new_param`, such a run
continued from the weights that the optimizer was built with. With the patch, it continues from the loaded weights. A
run without the patch was not a fine-tuning of its checkpoint: start it again.""",
    references=("https://github.com/NVIDIA/Megatron-LM/pull/5071", "https://github.com/NVIDIA-NeMo/RL/pull/2372"),
    # main had version 0.20.0 on 2026-08-22, and had the defect.
    variants=(Variant(Guard("megatron-core", ">=0.13.0rc0,<=0.20.0"), REWRITES),),
    obsolete_when=(
        "when HybridDeviceOptimizer.update_fp32_param_by_new_param copies every parameter; none released does"
    ),
    conditions=(Condition(_RELOADED, f"{__package__}._conditions:loads_without_copies"),),
)
