"""megatron-core: weights that are loaded after an optimizer with CPU offload was built reach what the CPU steps."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_RELOADED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params"
_FLAG = "self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8"  # then the model's own shards are stepped


# Megatron-FSDP has shards of its own; before 0.14.0rc7 it was called otherwise.
_FSDP = "getattr(self.ddp_config, 'use_megatron_fsdp', False) or getattr(self.ddp_config, 'use_custom_fsdp', False)"

REWRITES = (
    Rewrite(
        target="megatron.core.optimizer.cpu_offloading.hybrid_optimizer:"
        "HybridDeviceOptimizer.update_fp32_param_by_new_param",
        pattern="self.param_to_fp32_param.items()",
        alongside=("fp32_param.data.copy_(param)",),
        # Both have the same tensor for a parameter that is in both.
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
    summary="an optimizer with CPU offload steps the weights that were loaded after it was built",
    harm="wrong weights",
    bug="with CPU offload, weights that are loaded after the optimizer was built are lost at its first step",
    when="optimizer_cpu_offload without use_precision_aware_optimizer, and a checkpoint without optimizer state",
    excluded_by=("optimizer_cpu_offload=false",),
    symptom="""\
With `optimizer_cpu_offload` and without `use_precision_aware_optimizer`, in bf16 or fp16, a run that starts from a
checkpoint without optimizer state, as a fine-tuning does, has the loaded weights in its first forward, and the random
ones that the model was built with from the first step on. There is no error. Megatron-LM's own arguments refuse this
pair; NeMo-RL and Megatron-Bridge have met it (NeMo-RL's #2372).""",
    cause="""\
A CPU optimizer steps copies that were made when the optimizer was built, and each step overwrites the model with them.
`reload_model_params`, which is called after weights were loaded, brings a copy up to date only where it is in another
precision than what it copies. Without `use_precision_aware_optimizer` both are float32. And it leaves out the float32
shards that stand between the model and those copies.""",
    repair="""\
`reload_model_params` copies the loaded weights into the optimizer's float32 shards, as it does without offload, and
then into every copy on the CPU. The first step begins at what was loaded.

With `use_precision_aware_optimizer`, and without offload, all is as before, bit for bit. Nothing is done before
`reload_model_params` is called: a trainer that loads weights without it still loses them. Without the distributed
optimizer nothing is changed. NeMo-RL's and Megatron-Bridge's own repairs may stay: they copy the same values.""",
    changes_numbers="""\
Since megatron-core 0.13.0, the first with `HybridDeviceOptimizer.update_fp32_param_by_new_param`, such a run went on
from the weights that the optimizer was built with. With the patch it goes on from those that were loaded. A run that
was trained without the patch was not a fine-tuning of its checkpoint: begin it again.""",
    references=("https://github.com/NVIDIA/Megatron-LM/pull/5071", "https://github.com/NVIDIA-NeMo/RL/pull/2372"),
    # main called itself 0.20.0 when it was read (2026-08-22) and had the defect.
    variants=(Variant(Guard("megatron-core", ">=0.13.0rc0,<=0.20.0"), REWRITES),),
    obsolete_when=(
        "when HybridDeviceOptimizer.update_fp32_param_by_new_param copies every parameter; none released does"
    ),
)
