"""Every built-in patch and advice. Written by tools/derive.py (``make docs``); a test compares."""

from __future__ import annotations

# fmt: off
# ruff: noqa: E501, Q
from rlhf_patches import Listed, ListedCoInstalled, ListedVariant

LISTED = (
    Listed('accelerate-fsdp1-rotary-precision', 'rlhf_patches.patches.accelerate.fsdp1_rotary_precision:PATCH', (
        ListedVariant(distribution='accelerate', versions='>=0.17.0,<1.6.0', modules=('accelerate.utils.dataclasses',), rewrites=True),
        ListedVariant(distribution='accelerate', versions='>=1.6.0,<=1.15.0', modules=('accelerate.utils.dataclasses',), rewrites=True),
    )),
    Listed('accelerate-fsdp2-load-by-position', 'rlhf_patches.patches.accelerate.fsdp2_load_by_position:PATCH', (
        ListedVariant(distribution='accelerate', versions='>=1.6.0,<1.14.0', modules=('accelerate.utils.fsdp_utils',), rewrites=True),
    )),
    Listed('accelerate-fsdp2-upcast', 'rlhf_patches.patches.accelerate.fsdp2_upcast:PATCH', (
        ListedVariant(distribution='accelerate', versions='==1.13.0', modules=('accelerate.utils.fsdp_utils',), rewrites=True),
    )),
    Listed('accelerate-optimizer-train', 'rlhf_patches.patches.accelerate.optimizer_train:ADVICE', (
        ListedVariant(distribution='accelerate', versions='>=0.30.0rc0,<=0.33.0', modules=('accelerate.optimizer',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=4.45.0,<4.52.0', package='transformers')),
    )),
    Listed('accelerate-resume-dispatched', 'rlhf_patches.patches.accelerate.resume_dispatched:PATCH', (
        ListedVariant(distribution='accelerate', versions='>=0.16.0,<=1.15.0', modules=('accelerate.data_loader',), rewrites=True),
    )),
    Listed('accelerate-resume-order', 'rlhf_patches.patches.accelerate.resume_order:PATCH', (
        ListedVariant(distribution='accelerate', versions='>=0.24.0,<1.15.0', modules=('accelerate.data_loader',), rewrites=True),
    )),
    Listed('datasets-shuffle-resume', 'rlhf_patches.patches.datasets.shuffle_resume:ADVICE', (
        ListedVariant(distribution='datasets', versions='>=5.1.0,<=5.2.0', modules=('datasets.iterable_dataset',), rewrites=True, is_advice=True),
    )),
    Listed('deepspeed-empty-groups', 'rlhf_patches.patches.deepspeed.empty_groups:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.3.13,<=0.19.8', modules=('deepspeed.runtime.engine',), rewrites=True),
    )),
    Listed('deepspeed-group-learning-rates', 'rlhf_patches.patches.deepspeed.group_learning_rates:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.17.2,<0.19.4', modules=('deepspeed.runtime.lr_schedules',), rewrites=True),
    )),
    Listed('deepspeed-kept-gradients', 'rlhf_patches.patches.deepspeed.kept_gradients:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.17.6,<0.18.6', modules=('deepspeed.runtime.engine',), rewrites=True),
    )),
    Listed('deepspeed-muon-lost-momentum', 'rlhf_patches.patches.deepspeed.muon_lost_momentum:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.19.7,<0.19.8', modules=('deepspeed.runtime.zero.stage_1_and_2',), rewrites=True),
    )),
    Listed('deepspeed-muon-offload', 'rlhf_patches.patches.deepspeed.muon_offload:ADVICE', (
        ListedVariant(distribution='deepspeed', versions='>=0.17.6,<0.19.8', modules=('deepspeed.runtime.zero.stage_1_and_2',), rewrites=True, is_advice=True),
    )),
    Listed('deepspeed-muon-split-matrices', 'rlhf_patches.patches.deepspeed.muon_split_matrices:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.17.6,<0.19.3', modules=('deepspeed.runtime.zero.stage_1_and_2',), rewrites=True),
    )),
    Listed('deepspeed-muon-without-zero', 'rlhf_patches.patches.deepspeed.muon_without_zero:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.17.6,<0.19.7', modules=('deepspeed.runtime.zero.muon.muon_optimizer',), rewrites=True),
    )),
    Listed('deepspeed-muon-zero3', 'rlhf_patches.patches.deepspeed.muon_zero3:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.18.9,<0.19.8', modules=('deepspeed.runtime.zero.stage3',), rewrites=True),
    )),
    Listed('deepspeed-muon-zero-init', 'rlhf_patches.patches.deepspeed.muon_zero_init:ADVICE', (
        ListedVariant(distribution='deepspeed', versions='>=0.18.9,<0.19.7', modules=('deepspeed', 'deepspeed.runtime.zero.stage3'), rewrites=True, is_advice=True),
    )),
    Listed('deepspeed-offload-accumulation', 'rlhf_patches.patches.deepspeed.offload_accumulation:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.15.2,<0.19.0', modules=('deepspeed.runtime.zero.stage_1_and_2',), rewrites=True),
    )),
    Listed('deepspeed-offload-rare-parameters', 'rlhf_patches.patches.deepspeed.offload_rare_parameters:ADVICE', (
        ListedVariant(distribution='deepspeed', versions='>=0.5.9,<=0.19.8', modules=('deepspeed.runtime.zero.stage_1_and_2',), rewrites=True, is_advice=True),
    )),
    Listed('deepspeed-pipeline-accumulation', 'rlhf_patches.patches.deepspeed.pipeline_accumulation:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.18.3,<0.18.4', modules=('deepspeed.runtime.engine',), rewrites=True),
        ListedVariant(distribution='deepspeed', versions='>=0.18.4,<0.19.3', modules=('deepspeed.runtime.engine',), rewrites=True),
    )),
    Listed('deepspeed-rotary-precision', 'rlhf_patches.patches.deepspeed.rotary_precision:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.5.5,<0.19.2', modules=('deepspeed.runtime.engine',), rewrites=True),
    )),
    Listed('deepspeed-topk-drops', 'rlhf_patches.patches.deepspeed.topk_drops:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.15.0,<0.19.0', modules=('deepspeed.moe.sharded_moe',), rewrites=True),
    )),
    Listed('deepspeed-unscaled-accumulation', 'rlhf_patches.patches.deepspeed.unscaled_accumulation:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.16.0,<0.16.5', modules=('deepspeed.runtime.engine',), rewrites=True),
        ListedVariant(distribution='deepspeed', versions='>=0.16.5,<0.16.6', modules=('deepspeed.runtime.engine',), rewrites=True),
        ListedVariant(distribution='deepspeed', versions='>=0.16.6,<0.18.0', modules=('deepspeed.runtime.engine',), rewrites=True),
        ListedVariant(distribution='deepspeed', versions='>=0.18.0,<0.18.3', modules=('deepspeed.runtime.engine',), rewrites=True),
    )),
    Listed('deepspeed-unscaled-loss', 'rlhf_patches.patches.deepspeed.unscaled_loss:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.18.3,<=0.19.8', modules=('deepspeed.runtime.engine',), rewrites=True),
    )),
    Listed('deepspeed-zero1-last-micro-batch', 'rlhf_patches.patches.deepspeed.zero1_last_micro_batch:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.18.3,<0.19.0', modules=('deepspeed.runtime.engine',), rewrites=True),
    )),
    Listed('deepspeed-zero2-accumulation', 'rlhf_patches.patches.deepspeed.zero2_accumulation:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.17.6,<0.18.3', modules=('deepspeed.runtime.zero.stage_1_and_2',), rewrites=True),
    )),
    Listed('deepspeed-zero3-rare-parameters', 'rlhf_patches.patches.deepspeed.zero3_rare_parameters:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.9.2,<0.17.5', modules=('deepspeed.runtime.zero.stage3',), rewrites=True),
        ListedVariant(distribution='deepspeed', versions='>=0.17.5,<=0.19.8', modules=('deepspeed.runtime.zero.stage3',), rewrites=True),
    )),
    Listed('deepspeed-zero3-rotary-init', 'rlhf_patches.patches.deepspeed.zero3_rotary_init:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.10.0,<=0.19.8', modules=('deepspeed.runtime.zero.partition_parameters',), rewrites=True),
    )),
    Listed('math-verify-thread', 'rlhf_patches.patches.math_verify.thread:PATCH', (
        ListedVariant(distribution='math-verify', versions='>=0.6.1,<=0.9.0', modules=('math_verify.utils',)),
    )),
    Listed('megatron-bridge-disable-adapter', 'rlhf_patches.patches.megatron_bridge.disable_adapter:PATCH', (
        ListedVariant(distribution='megatron-bridge', versions='>=0.3.0,<=0.6.2', modules=('megatron.bridge.peft.base',)),
    )),
    Listed('megatron-bridge-no-sync-reentry', 'rlhf_patches.patches.megatron_bridge.no_sync_reentry:PATCH', (
        ListedVariant(distribution='megatron-bridge', versions='>=0.1.0a0,<=0.6.2', modules=('megatron.bridge.training.setup',), rewrites=True),
    )),
    Listed('megatron-core-attention-sink-norm', 'rlhf_patches.patches.megatron_core.attention_sink_norm:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.15.0rc4,<=0.20.0', modules=('megatron.core.transformer.dot_product_attention', 'megatron.core.extensions.transformer_engine'), independent=True, rewrites=True, co_installed=ListedCoInstalled(distribution='transformer-engine', versions='>=1.0', package='transformer_engine')),
    )),
    Listed('megatron-core-cross-entropy-in-place', 'rlhf_patches.patches.megatron_core.cross_entropy_in_place:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.8.0,<=0.20.0', modules=('megatron.core.tensor_parallel.cross_entropy', 'megatron.core.fusions.fused_cross_entropy'), independent=True, rewrites=True),
    )),
    Listed('megatron-core-duplicated-norm', 'rlhf_patches.patches.megatron_core.duplicated_norm:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.11.0rc0,<0.17.0', modules=('megatron.core.extensions.transformer_engine',), co_installed=ListedCoInstalled(distribution='transformer-engine', versions='>=1.0', package='transformer_engine')),
    )),
    Listed('megatron-core-expert-bias-counts', 'rlhf_patches.patches.megatron_core.expert_bias_counts:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.12.0rc2,<=0.20.0', modules=('megatron.core.transformer.moe.router', 'megatron.core.distributed.finalize_model_grads'), rewrites=True),
    )),
    Listed('megatron-core-forward-pre-hook-reentry', 'rlhf_patches.patches.megatron_core.forward_pre_hook_reentry:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.9.0,<=0.20.0', modules=('megatron.core.distributed.distributed_data_parallel',), rewrites=True),
    )),
    Listed('megatron-core-gdn-norm-gradient', 'rlhf_patches.patches.megatron_core.gdn_norm_gradient:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.16.0,<=0.18.2', modules=('megatron.core.ssm.gated_delta_net', 'megatron.core.distributed.finalize_model_grads'), rewrites=True),
        ListedVariant(distribution='megatron-core', versions='>=0.19.0,<=0.20.0', modules=('megatron.core.ssm.gated_delta_net.common', 'megatron.core.distributed.finalize_model_grads'), rewrites=True),
    )),
    Listed('megatron-core-grouped-experts-norm', 'rlhf_patches.patches.megatron_core.grouped_experts_norm:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.9.0,<0.19.0', modules=('megatron.core.extensions.transformer_engine',), rewrites=True, co_installed=ListedCoInstalled(distribution='transformer-engine', versions='>=2.13.0,<=2.20.2', package='transformer_engine')),
    )),
    Listed('megatron-core-moe-auxiliary-context', 'rlhf_patches.patches.megatron_core.moe_auxiliary_context:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.8.0,<=0.11.0', modules=('megatron.core.pipeline_parallel.schedules',), rewrites=True),
        ListedVariant(distribution='megatron-core', versions='>=0.12.0rc2,<=0.13.1', modules=('megatron.core.pipeline_parallel.schedules',), rewrites=True),
        ListedVariant(distribution='megatron-core', versions='>=0.14.0,<0.16.0', modules=('megatron.core.pipeline_parallel.schedules',), rewrites=True),
    )),
    Listed('megatron-core-moe-auxiliary-global', 'rlhf_patches.patches.megatron_core.moe_auxiliary_global:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.15.0rc3,<0.16.0', modules=('megatron.core.transformer.moe.router',), rewrites=True),
        ListedVariant(distribution='megatron-core', versions='>=0.16.0,<=0.20.0', modules=('megatron.core.transformer.moe.router',), rewrites=True),
    )),
    Listed('megatron-core-moe-auxiliary-padding', 'rlhf_patches.patches.megatron_core.moe_auxiliary_padding:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.19.0,<=0.20.0', modules=('megatron.core.transformer.moe.moe_utils', 'megatron.core.transformer.moe.router'), rewrites=True),
    )),
    Listed('megatron-core-moe-auxiliary-per-token', 'rlhf_patches.patches.megatron_core.moe_auxiliary_per_token:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.12.0rc2,<=0.12.3', modules=('megatron.core.transformer.moe.router',), rewrites=True),
        ListedVariant(distribution='megatron-core', versions='>=0.13.0rc0,<=0.13.1', modules=('megatron.core.transformer.moe.router',), rewrites=True),
        ListedVariant(distribution='megatron-core', versions='>=0.14.0,<0.16.0', modules=('megatron.core.transformer.moe.router',), rewrites=True),
        ListedVariant(distribution='megatron-core', versions='>=0.16.0,<0.19.0', modules=('megatron.core.transformer.moe.router',), rewrites=True),
    )),
    Listed('megatron-core-offloaded-weights', 'rlhf_patches.patches.megatron_core.offloaded_weights:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.13.0rc0,<=0.20.0', modules=('megatron.core.optimizer.cpu_offloading.hybrid_optimizer', 'megatron.core.optimizer.distrib_optimizer'), rewrites=True),
    )),
    Listed('megatron-core-reshardable-buckets', 'rlhf_patches.patches.megatron_core.reshardable_buckets:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.15.0rc0,<=0.19.2', modules=('megatron.core.optimizer.distrib_optimizer',), rewrites=True),
    )),
    Listed('megatron-core-resume-groups', 'rlhf_patches.patches.megatron_core.resume_groups:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.16.0,<0.19.0', modules=('megatron.core.optimizer.optimizer', 'megatron.core.optimizer.distrib_optimizer'), rewrites=True),
    )),
    Listed('megatron-lm-no-sync-reentry', 'rlhf_patches.patches.megatron_lm.no_sync_reentry:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.6.0,<=0.20.0', modules=('megatron.training.training',), rewrites=True, may_be_missing='before 0.17 megatron.training is in git only; a checkout that is installed calls itself megatron-core'),
    )),
    Listed('nemo-rl-async-prefix-cache', 'rlhf_patches.patches.nemo_rl.async_prefix_cache:PATCH', (
        ListedVariant(distribution='nemo-rl', versions='>=0.4.0,<0.7.0', modules=('nemo_rl.algorithms.async_utils',), rewrites=True),
        ListedVariant(distribution='nemo-rl', versions='>=0.7.0,<=0.7.0', modules=('nemo_rl.algorithms.async_utils.trajectory_collector',), rewrites=True),
    )),
    Listed('nemo-rl-logprob-backward', 'rlhf_patches.patches.nemo_rl.logprob_backward:PATCH', (
        ListedVariant(distribution='nemo-rl', versions='>=0.4.0,<=0.7.0', modules=('nemo_rl.distributed.model_utils',)),
    )),
    Listed('nemo-rl-watch-rollouts', 'rlhf_patches.patches.nemo_rl.watch_rollouts:WATCH', (
        ListedVariant(distribution='nemo-rl', versions='>=0.6.0', modules=('nemo_rl.algorithms.grpo', 'nemo_rl.utils.logger')),
    ), watches=True),
    Listed('openrlhf-k3-gradient', 'rlhf_patches.patches.openrlhf.k3_gradient:PATCH', (
        ListedVariant(distribution='openrlhf', versions='>=0.8.6,<0.9.9', modules=('openrlhf.models.utils',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='>=0.9.9,<0.11.1', modules=('openrlhf.models.utils',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='==0.11.1', modules=('openrlhf.models.utils',), rewrites=True),
    )),
    Listed('openrlhf-masked-nan', 'rlhf_patches.patches.openrlhf.masked_nan:PATCH', (
        ListedVariant(distribution='openrlhf', versions='>=0.3.6.post1,<0.8.9', modules=('openrlhf.models.loss',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='>=0.8.9,<0.8.10', modules=('openrlhf.models.loss',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='>=0.8.10,<0.9.1', modules=('openrlhf.models.loss',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='>=0.9.1,<0.9.3', modules=('openrlhf.models.loss',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='>=0.9.3,<0.10.3', modules=('openrlhf.models.loss',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='>=0.10.3,<0.11.1', modules=('openrlhf.models.loss',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='==0.11.1', modules=('openrlhf.models.loss',), rewrites=True),
        ListedVariant(distribution='openrlhf', versions='==0.11.2', modules=('openrlhf.models.loss',), rewrites=True),
    )),
    Listed('openrlhf-own-sampling', 'rlhf_patches.patches.openrlhf.own_sampling:PATCH', (
        ListedVariant(distribution='openrlhf', versions='>=0.9.1,<=0.11.2', modules=('openrlhf.utils.agent',), rewrites=True),
    )),
    Listed('openrlhf-watch-rollouts', 'rlhf_patches.patches.openrlhf.watch_rollouts:WATCH', (
        ListedVariant(distribution='openrlhf', versions='>=0.8.1', modules=('openrlhf.trainer.ppo_utils.experience_maker',)),
    ), watches=True),
    Listed('peft-adapter-freeze', 'rlhf_patches.patches.peft.adapter_freeze:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.18.0rc0,<0.21.0', modules=('peft.tuners.tuners_utils',)),
    )),
    Listed('peft-clear-device-cache', 'rlhf_patches.patches.peft.clear_device_cache:ADVICE', (
        ListedVariant(distribution='peft', versions='>=0.15.0,<=0.21.2', modules=('peft.utils.loftq_utils',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='accelerate', versions='>=0.21.0,<0.32.0', package='accelerate')),
    )),
    Listed('peft-disable-adapter-fsdp', 'rlhf_patches.patches.peft.disable_adapter_fsdp:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.6.0,<0.19.0', modules=('peft.tuners.tuners_utils', 'peft.utils.other')),
    )),
    Listed('peft-disable-adapter-restore', 'rlhf_patches.patches.peft.disable_adapter_restore:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.11.0,<=0.21.2', modules=('peft.peft_model',)),
    )),
    Listed('peft-dora-conv1d-unmerge', 'rlhf_patches.patches.peft.dora_conv1d_unmerge:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.16.0,<0.21.0', modules=('peft.tuners.lora.variants',), rewrites=True),
    )),
    Listed('peft-dora-second-merge', 'rlhf_patches.patches.peft.dora_second_merge:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.16.0,<0.21.0', modules=('peft.tuners.lora.variants',), rewrites=True),
    )),
    Listed('peft-hybrid-cache', 'rlhf_patches.patches.peft.hybrid_cache:ADVICE', (
        ListedVariant(distribution='peft', versions='>=0.16.0,<=0.17.1', modules=('peft.peft_model',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.0.0rc3,<=5.24.0', package='transformers')),
    )),
    Listed('peft-layers-to-transform', 'rlhf_patches.patches.peft.layers_to_transform:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.8.0,<0.20.0', modules=('peft.tuners.tuners_utils',), rewrites=True),
    )),
    Listed('peft-lora-merge-drift', 'rlhf_patches.patches.peft.lora_merge_drift:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.7.0,<=0.21.2', modules=('peft.tuners.lora.layer',)),
    )),
    Listed('peft-save-adapter-prefix', 'rlhf_patches.patches.peft.save_adapter_prefix:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.7.0,<0.20.0', modules=('peft.utils.save_and_load',)),
    )),
    Listed('skyrl-accumulated-requests', 'rlhf_patches.patches.skyrl.accumulated_requests:ADVICE', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.4.0', modules=('skyrl.backends.skyrl_train.workers.megatron.megatron_worker', 'skyrl.backends.skyrl_train_backend'), rewrites=True, is_advice=True),
    )),
    Listed('skyrl-advantage-padding', 'rlhf_patches.patches.skyrl.advantage_padding:PATCH', (
        ListedVariant(distribution='skyrl', versions='==0.1.0', modules=('skyrl.backends.skyrl_train.utils.ppo_utils',), rewrites=True),
        ListedVariant(distribution='skyrl', versions='>=0.2.0,<=0.4.0', modules=('skyrl.train.trainer',), rewrites=True),
    )),
    Listed('skyrl-bf16-logits', 'rlhf_patches.patches.skyrl.bf16_logits:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.2.0', modules=('skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper', 'skyrl.backends.skyrl_train.distributed.megatron.megatron_utils'), rewrites=True),
    )),
    Listed('skyrl-entropy-backward', 'rlhf_patches.patches.skyrl.entropy_backward:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.3.0', modules=('skyrl.backends.skyrl_train.distributed.megatron.model_utils',)),
        ListedVariant(distribution='skyrl', versions='==0.4.0', modules=('skyrl.backends.skyrl_train.distributed.megatron.model_utils',)),
    )),
    Listed('skyrl-fp8-alignment', 'rlhf_patches.patches.skyrl.fp8_alignment:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.2.0', modules=('skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper',), rewrites=True),
        ListedVariant(distribution='skyrl', versions='>=0.2.0,<0.3.0', modules=('skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper',), rewrites=True),
    )),
    Listed('skyrl-kl-no-grad', 'rlhf_patches.patches.skyrl.kl_no_grad:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.2.0', modules=('skyrl.backends.skyrl_train.workers.worker', 'skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper'), independent=True, rewrites=True),
    )),
    Listed('skyrl-logprob-backward', 'rlhf_patches.patches.skyrl.logprob_backward:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.4.0', modules=('skyrl.backends.skyrl_train.distributed.megatron.model_utils',), rewrites=True),
    )),
    Listed('skyrl-loss-outputs-once', 'rlhf_patches.patches.skyrl.loss_outputs_once:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.3.0', modules=('skyrl.backends.skyrl_train.workers.worker_dispatch',), rewrites=True),
    )),
    Listed('skyrl-loss-outputs-packed', 'rlhf_patches.patches.skyrl.loss_outputs_packed:PATCH', (
        ListedVariant(distribution='skyrl', versions='==0.3.0', modules=('skyrl.backends.skyrl_train.workers.worker', 'skyrl.backends.skyrl_train.workers.megatron.megatron_worker'), independent=True, rewrites=True),
    )),
    Listed('skyrl-overlapped-reduction', 'rlhf_patches.patches.skyrl.overlapped_reduction:ADVICE', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.4.0', modules=('skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper',), rewrites=True, is_advice=True),
    )),
    Listed('skyrl-resume-epoch', 'rlhf_patches.patches.skyrl.resume_epoch:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.4.0', modules=('skyrl.train.trainer',), rewrites=True),
    )),
    Listed('skyrl-rollout-temperature', 'rlhf_patches.patches.skyrl.rollout_temperature:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.3.0', modules=('skyrl.backends.skyrl_train.inference_servers.utils', 'skyrl.train.entrypoints.main_base', 'skyrl.backends.skyrl_train_backend'), independent=True, rewrites=True),
        ListedVariant(distribution='skyrl', versions='>=0.3.0,<=0.4.0', modules=('skyrl.backends.skyrl_train.inference_servers.utils',), rewrites=True),
    )),
    Listed('skyrl-sequence-parallel-logits', 'rlhf_patches.patches.skyrl.sequence_parallel_logits:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.4.0', modules=('skyrl.backends.skyrl_train.distributed.megatron.megatron_utils',), rewrites=True),
    )),
    Listed('skyrl-step-wise-advantages', 'rlhf_patches.patches.skyrl.step_wise_advantages:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.2.0', modules=('skyrl.train.trainer',), rewrites=True),
    )),
    Listed('skyrl-watch-rollouts', 'rlhf_patches.patches.skyrl.watch_rollouts:WATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0', modules=('skyrl.train.trainer',)),
    ), watches=True),
    Listed('slime-async-dropped-groups', 'rlhf_patches.patches.slime.async_dropped_groups:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.3.0,<=0.3.1', modules=('slime.rollout.fully_async_rollout',), rewrites=True),
    )),
    Listed('slime-context-parallel-whitening', 'rlhf_patches.patches.slime.context_parallel_whitening:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.3.1', modules=('slime.backends.megatron_utils.loss',), rewrites=True),
    )),
    Listed('slime-eps-clip-c', 'rlhf_patches.patches.slime.eps_clip_c:PATCH', (
        ListedVariant(distribution='slime', versions='==0.0.1', modules=('slime.backends.megatron_utils.loss',), rewrites=True),
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.3.1', modules=('slime.backends.megatron_utils.loss',), rewrites=True),
    )),
    Listed('slime-linear-attention-gradient', 'rlhf_patches.patches.slime.linear_attention_gradient:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.3.1', modules=('slime_plugins.models.hf_attention',), rewrites=True),
    )),
    Listed('slime-logprob-entropy', 'rlhf_patches.patches.slime.logprob_entropy:PATCH', (
        ListedVariant(distribution='slime', versions='==0.0.1', modules=('slime.utils.ppo_utils', 'slime.backends.megatron_utils.loss')),
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.2.1', modules=('slime.utils.ppo_utils',)),
        ListedVariant(distribution='slime', versions='>=0.2.2,<=0.3.0', modules=('slime.utils.ppo_utils',)),
        ListedVariant(distribution='slime', versions='==0.3.1', modules=('slime.utils.ppo_utils',)),
    )),
    Listed('slime-no-sync-reentry', 'rlhf_patches.patches.slime.no_sync_reentry:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.0.1,<=0.3.1', modules=('slime.backends.megatron_utils.model',), rewrites=True),
    )),
    Listed('slime-partial-rollout-budget', 'rlhf_patches.patches.slime.partial_rollout_budget:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.3.0,<=0.3.1', modules=('slime.rollout.sglang_rollout', 'slime.rollout.sglang_streaming_rollout'), independent=True, rewrites=True),
    )),
    Listed('slime-uneven-groups', 'rlhf_patches.patches.slime.uneven_groups:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.3.1', modules=('slime.ray.rollout',), rewrites=True),
    )),
    Listed('slime-watch-rollouts', 'rlhf_patches.patches.slime.watch_rollouts:WATCH', (
        ListedVariant(distribution='slime', versions='>=0.2.2', modules=('slime.utils.logging_utils', 'slime.ray.rollout'), independent=True, may_be_missing='main, which still calls itself 0.3.1, logs elsewhere'),
    ), watches=True),
    Listed('swift-async-rollout-lora', 'rlhf_patches.patches.swift.async_rollout_lora:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.10.0,<4.0.0', modules=('swift.llm.infer.infer_engine.vllm_engine', 'swift.llm.infer.infer_engine.grpo_vllm_engine'), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.5.0', modules=('swift.infer_engine.vllm_engine', 'swift.infer_engine.grpo_vllm_engine'), rewrites=True),
    )),
    Listed('swift-fp32-gradients', 'rlhf_patches.patches.swift.fp32_gradients:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.3.2', modules=('swift.megatron.utils.megatron_lm_utils',), rewrites=True),
    )),
    Listed('swift-grpo-loss-scale', 'rlhf_patches.patches.swift.grpo_loss_scale:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.11.0,<4.0.0', modules=('swift.trainers.rlhf_trainer.grpo_trainer',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.6.0', modules=('swift.rlhf_trainers.grpo_trainer',), rewrites=True),
    )),
    Listed('swift-kto-sequence-parallel', 'rlhf_patches.patches.swift.kto_sequence_parallel:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.9.0,<3.12.3', modules=('swift.megatron.trainers.kto_trainer',), rewrites=True),
    )),
    Listed('swift-linear-attention-gradient', 'rlhf_patches.patches.swift.linear_attention_gradient:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.9.0,<3.12.4', modules=('swift.megatron.model.gpt.qwen3_next',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=3.12.4,<4.0.0', modules=('swift.megatron.model.gpt.qwen3_next',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.1.0', modules=('swift.megatron.model.gpts.qwen3_next', 'swift.megatron.model.mm_gpts.qwen3_5'), independent=True, rewrites=True),
    )),
    Listed('swift-logprob-entropy', 'rlhf_patches.patches.swift.logprob_entropy:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=4.5.3,<=4.6.0', modules=('swift.megatron.trainers.vocab_parallel_utils',)),
    )),
    Listed('swift-lora-counted-twice', 'rlhf_patches.patches.swift.lora_counted_twice:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.10.0,<3.12.0', modules=('swift.trainers.rlhf_trainer.rollout_mixin',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=3.12.0,<3.12.1', modules=('swift.trainers.rlhf_trainer.rollout_mixin',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=3.12.1,<4.0.0', modules=('swift.trainers.rlhf_trainer.rollout_mixin',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.0.2', modules=('swift.rlhf_trainers.rollout_mixin',), rewrites=True),
    )),
    Listed('swift-megatron-dpo-loss-type', 'rlhf_patches.patches.swift.megatron_dpo_loss_type:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.7.0,<=4.6.0', modules=('swift.megatron.trainers.dpo_trainer',), rewrites=True),
    )),
    Listed('swift-megatron-grpo-mask', 'rlhf_patches.patches.swift.megatron_grpo_mask:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.11.0,<3.12.0', modules=('swift.megatron.trainers.grpo_trainer',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=3.12.0,<4.0.0', modules=('swift.megatron.trainers.grpo_trainer',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.0.3', modules=('swift.megatron.trainers.grpo_trainer',), rewrites=True),
    )),
    Listed('swift-no-sync-reentry', 'rlhf_patches.patches.swift.no_sync_reentry:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.3.0', modules=('swift.megatron.trainers.base',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=4.3.0,<=4.6.0', modules=('swift.megatron.trainers.base',), rewrites=True),
    )),
    Listed('swift-null-ref-context', 'rlhf_patches.patches.swift.null_ref_context:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.7.0,<3.9.0', modules=('swift.megatron.trainers.dpo_trainer',)),
        ListedVariant(distribution='ms-swift', versions='>=3.9.0,<=4.6.0', modules=('swift.megatron.trainers.rlhf_mixin',)),
    )),
    Listed('swift-null-ref-context-hf', 'rlhf_patches.patches.swift.null_ref_context_hf:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.8.0,<4.0.0', modules=('swift.trainers.rlhf_trainer.grpo_trainer',)),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.0.3', modules=('swift.rlhf_trainers.grpo_trainer',)),
        ListedVariant(distribution='ms-swift', versions='>=4.0.3,<4.4.0', modules=('swift.rlhf_trainers.grpo_trainer', 'swift.rlhf_trainers.dpo_trainer'), independent=True),
        ListedVariant(distribution='ms-swift', versions='>=4.4.0,<=4.6.0', modules=('swift.rlhf_trainers.rlhf_mixin',)),
    )),
    Listed('swift-rollout-update-failed', 'rlhf_patches.patches.swift.rollout_update_failed:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.10.0,<4.0.0', modules=('swift.llm.infer.rollout',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<=4.6.0', modules=('swift.pipelines.infer.rollout',), rewrites=True),
    )),
    Listed('swift-rollout-worker-seed', 'rlhf_patches.patches.swift.rollout_worker_seed:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.5.0,<3.7.0', modules=('swift.llm.infer.rollout',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=3.7.0,<3.12.3', modules=('swift.llm.infer.rollout',), rewrites=True),
    )),
    Listed('swift-sampler-tail', 'rlhf_patches.patches.swift.sampler_tail:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.3.0,<3.12.0', modules=('swift.llm.data_loader',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=3.12.0,<4.0.0', modules=('swift.llm.data_loader',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<=4.6.0', modules=('swift.dataloader.shard',), rewrites=True),
    )),
    Listed('swift-grpo-trl-imports', 'rlhf_patches.patches.swift.trl_imports:ADVICE_GRPO', (
        ListedVariant(distribution='ms-swift', versions='>=3.4.0,<4', modules=('swift.trainers.rlhf_trainer.grpo_trainer',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='trl', versions='>=0.14.0,<0.17.0', package='trl')),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<=4.6.0', modules=('swift.rlhf_trainers.grpo_trainer',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='trl', versions='>=0.14.0,<0.17.0', package='trl')),
    )),
    Listed('swift-gkd-trl-imports', 'rlhf_patches.patches.swift.trl_imports:ADVICE_GKD', (
        ListedVariant(distribution='ms-swift', versions='>=4.2.0,<=4.6.0', modules=('swift.rlhf_trainers.gkd_trainer',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='trl', versions='>=0.13.0,<0.22.0', package='trl')),
    )),
    Listed('swift-vocab-parallel-logprob-gradient', 'rlhf_patches.patches.swift.vocab_parallel_logprob_gradient:PATCH', (
        ListedVariant(distribution='ms-swift', versions='==3.12.0', modules=('swift.megatron.trainers.gkd_trainer',), rewrites=True),
        ListedVariant(distribution='ms-swift', versions='>=3.12.1,<4.5.3', modules=('swift.megatron.trainers.vocab_parallel_utils',), rewrites=True),
    )),
    Listed('swift-watch-rollouts', 'rlhf_patches.patches.swift.watch_rollouts:WATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.11.0,<4.0.0', modules=('swift.trainers.rlhf_trainer.grpo_trainer', 'swift.trainers.rlhf_trainer.rollout_mixin'), independent=True),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.4.0', modules=('swift.rlhf_trainers.grpo_trainer', 'swift.rlhf_trainers.rollout_mixin', 'swift.megatron.trainers.base'), independent=True),
        ListedVariant(distribution='ms-swift', versions='>=4.4.0', modules=('swift.rlhf_trainers.grpo_trainer', 'swift.rlhf_trainers.rollout_mixin', 'swift.megatron.trainers.base'), independent=True),
    ), watches=True),
    Listed('torch-stale-build-lock', 'rlhf_patches.patches.torch.stale_build_lock:PATCH', (
        ListedVariant(distribution='torch', versions='>=1.0.0,<2.14.0', modules=('torch.utils.cpp_extension',), rewrites=True),
    )),
    Listed('transformer-engine-cross-entropy-backward', 'rlhf_patches.patches.transformer_engine.cross_entropy_backward:PATCH', (
        ListedVariant(distribution='transformer-engine', versions='>=2.2.0,<2.8.0', modules=('transformer_engine.pytorch.triton.cross_entropy',), rewrites=True),
        ListedVariant(distribution='transformer-engine', versions='>=2.8.0,<2.11.0', modules=('transformer_engine.pytorch.triton.cross_entropy',), rewrites=True),
    )),
    Listed('transformers-accumulation-scale', 'rlhf_patches.patches.transformers.accumulation_scale:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.48.1,<4.49.0', modules=('transformers.trainer',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=4.49.0,<4.53.0', modules=('transformers.trainer',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=4.53.0,<5.2.0', modules=('transformers.trainer',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.2.0,<5.19.0', modules=('transformers.trainer',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.19.0,<=5.24.0', modules=('transformers.trainer',), rewrites=True),
    )),
    Listed('transformers-collator-eos', 'rlhf_patches.patches.transformers.collator_eos:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.45.2,<=5.24.0', modules=('transformers.data.data_collator',), rewrites=True),
    ), "upstream's issue is open since 2023, and a pull request that only warns was closed"),
    Listed('transformers-eval-loss', 'rlhf_patches.patches.transformers.eval_loss:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.46.2,<4.49.0', modules=('transformers.trainer',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=4.57.0,<5.23.0', modules=('transformers.trainer',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.23.0,<=5.24.0', modules=('transformers.trainer',), rewrites=True),
    )),
    Listed('transformers-expert-parallel-gradient', 'rlhf_patches.patches.transformers.expert_parallel_gradient:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.6.0,<5.16.0,!=5.10.0', modules=('transformers.integrations.tensor_parallel',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.16.0,<5.17.0', modules=('transformers.distributed.tensor_parallel',), rewrites=True),
    )),
    Listed('transformers-first-token-count', 'rlhf_patches.patches.transformers.first_token_count:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.10.1,<=5.24.0', modules=('transformers.trainer',), rewrites=True),
    )),
    Listed('transformers-moe-aux-loss', 'rlhf_patches.patches.transformers.moe_aux_loss:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.46.2,<=5.24.0', modules=('transformers.trainer',), rewrites=True),
    )),
    Listed('transformers-packed-documents', 'rlhf_patches.patches.transformers.packed_documents:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.55.0,<=4.57.6', modules=('transformers.models.gpt_oss.modeling_gpt_oss',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.0.0rc0,<5.2.0', modules=('transformers.models.gpt_oss.modeling_gpt_oss', 'transformers.models.afmoe.modeling_afmoe'), independent=True, rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.2.0,<5.4.0', modules=('transformers.models.gpt_oss.modeling_gpt_oss', 'transformers.models.afmoe.modeling_afmoe'), independent=True, rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.4.0,<5.24.0', modules=('transformers.models.gpt_oss.modeling_gpt_oss', 'transformers.models.afmoe.modeling_afmoe'), independent=True, rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.24.0,<=5.24.0', modules=('transformers.models.gpt_oss.modeling_gpt_oss', 'transformers.models.afmoe.modeling_afmoe'), independent=True, rewrites=True),
    )),
    Listed('transformers-packed-linear-attention', 'rlhf_patches.patches.transformers.packed_linear_attention:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.57.0,<5.2.0', modules=('transformers.models.qwen3_next.modeling_qwen3_next',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.2.0,<5.15.0', modules=('transformers.models.qwen3_next.modeling_qwen3_next', 'transformers.models.qwen3_5.modeling_qwen3_5', 'transformers.models.qwen3_5_moe.modeling_qwen3_5_moe'), independent=True, rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.15.0,<=5.24.0', modules=('transformers.models.qwen3_next.modeling_qwen3_next', 'transformers.models.qwen3_5.modeling_qwen3_5', 'transformers.models.qwen3_5_moe.modeling_qwen3_5_moe', 'transformers.models.olmo_hybrid.modeling_olmo_hybrid'), independent=True, rewrites=True),
    )),
    Listed('transformers-packed-recurrence', 'rlhf_patches.patches.transformers.packed_recurrence:ADVICE', (
        ListedVariant(distribution='transformers', versions='>=4.57.0,<=5.24.0', modules=('transformers.trainer',), rewrites=True, is_advice=True),
    )),
    Listed('transformers-packed-short-convolution', 'rlhf_patches.patches.transformers.packed_short_convolution:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.0.0rc0,<5.15.0', modules=('transformers.models.lfm2.modeling_lfm2', 'transformers.models.lfm2_moe.modeling_lfm2_moe'), independent=True, rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.15.0,<=5.24.0', modules=('transformers.models.lfm2.modeling_lfm2', 'transformers.models.lfm2_moe.modeling_lfm2_moe'), independent=True, rewrites=True),
    )),
    Listed('transformers-packed-state-space', 'rlhf_patches.patches.transformers.packed_state_space:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.15.0,<=5.24.0', modules=('transformers.models.bamba.modeling_bamba', 'transformers.models.falcon_h1.modeling_falcon_h1', 'transformers.models.nemotron_h.modeling_nemotron_h'), independent=True, rewrites=True),
    )),
    Listed('transformers-prompt-tuning-count', 'rlhf_patches.patches.transformers.prompt_tuning_count:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.10.1,<=5.24.0', modules=('transformers.trainer',), rewrites=True),
    )),
    Listed('transformers-resume-dispatched', 'rlhf_patches.patches.transformers.resume_dispatched:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.0.0rc0,<5.3.0', modules=('transformers.trainer',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.3.0,<=5.24.0', modules=('transformers.trainer',), rewrites=True),
    )),
    Listed('transformers-resume-weights', 'rlhf_patches.patches.transformers.resume_weights:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.52.0,<=4.57.6', modules=('transformers.trainer',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.0.0rc1,<=5.24.0', modules=('transformers.trainer',), rewrites=True),
    )),
    Listed('transformers-router-loss-reentrant', 'rlhf_patches.patches.transformers.router_loss_reentrant:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.54.0,<5.17.0', modules=('transformers.modeling_utils',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.17.0,<5.23.0', modules=('transformers.modeling_utils',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.23.0,<=5.24.0', modules=('transformers.modeling_utils',), rewrites=True),
    )),
    Listed('transformers-shared-kv-gradient', 'rlhf_patches.patches.transformers.shared_kv_gradient:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.5.2,<5.6.0', modules=('transformers.models.gemma4.modeling_gemma4',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.6.0,<5.10.0', modules=('transformers.models.gemma4.modeling_gemma4', 'transformers.models.gemma3n.modeling_gemma3n'), independent=True, rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.10.0,<=5.24.0', modules=('transformers.models.gemma4.modeling_gemma4', 'transformers.models.gemma3n.modeling_gemma3n', 'transformers.models.gemma4_unified.modeling_gemma4_unified'), independent=True, rewrites=True),
    )),
    Listed('transformers-shared-kv-training', 'rlhf_patches.patches.transformers.shared_kv_training:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.53.0,<4.54.0', modules=('transformers.models.gemma3n.modeling_gemma3n',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=4.54.0,<5.5.0', modules=('transformers.models.gemma3n.modeling_gemma3n',), rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.5.0,<5.5.2', modules=('transformers.models.gemma3n.modeling_gemma3n', 'transformers.models.gemma4.modeling_gemma4'), independent=True, rewrites=True),
        ListedVariant(distribution='transformers', versions='>=5.5.2,<5.6.0', modules=('transformers.models.gemma3n.modeling_gemma3n',), rewrites=True),
    ), 'upstream does it since 5.6.0, too, but DDP raises without find_unused_parameters=True or frozen weights'),
    Listed('transformers-smoothed-labels', 'rlhf_patches.patches.transformers.smoothed_labels:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.45.2,<=5.24.0', modules=('transformers.trainer',), rewrites=True),
    )),
    Listed('trl-chunked-divergence-zero3', 'rlhf_patches.patches.trl.chunked_divergence_zero3:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.10.0,<1.15.0', modules=('trl.trainer.distillation_trainer',)),
    )),
    Listed('trl-chunked-nll-zero3', 'rlhf_patches.patches.trl.chunked_nll_zero3:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.4.0,<1.15.0', modules=('trl.trainer.sft_trainer',)),
    )),
    Listed('trl-continuous-batching-weights', 'rlhf_patches.patches.trl.continuous_batching_weights:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.20.0,<0.22.0', modules=('trl.trainer.grpo_trainer',), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.22.0,<0.23.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.24.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer', 'trl.trainer.online_dpo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.24.0,<0.26.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer', 'trl.trainer.online_dpo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.26.0,<1.2.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer', 'trl.experimental.online_dpo.online_dpo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.2.0,<=1.16.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True),
    )),
    Listed('trl-distillation-scale', 'rlhf_patches.patches.trl.distillation_scale:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.25.0,<1.7.0', modules=('trl.experimental.gold.gold_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.7.0,<=1.16.0', modules=('trl.experimental.gkd.gkd_trainer', 'trl.experimental.gold.gold_trainer'), independent=True, rewrites=True),
    )),
    Listed('trl-dpo-liger-label-smoothing', 'rlhf_patches.patches.trl.dpo_liger_label_smoothing:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.19.0,<0.22.0', modules=('trl.trainer.dpo_trainer',), rewrites=True, is_advice=True),
        ListedVariant(distribution='trl', versions='>=0.22.0,<0.29.0', modules=('trl.trainer.dpo_trainer',), rewrites=True, is_advice=True),
    )),
    Listed('trl-dpo-liger-settings', 'rlhf_patches.patches.trl.dpo_liger_settings:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.29.0,<1.13.0', modules=('trl.trainer.dpo_trainer',), rewrites=True, co_installed=ListedCoInstalled(distribution='liger-kernel', versions='>=0.8.1,<=0.8.5', package='liger_kernel')),
    )),
    Listed('trl-dpo-second-eos', 'rlhf_patches.patches.trl.dpo_second_eos:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.14.0,<0.27.2', modules=('trl.trainer.dpo_trainer',), rewrites=True),
    )),
    Listed('trl-dpo-vision-mapping', 'rlhf_patches.patches.trl.dpo_vision_mapping:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.9.6,<=0.22.2', modules=('trl.trainer.dpo_trainer',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.0.0rc3,<=5.24.0', package='transformers')),
    )),
    Listed('trl-dropout-ratio', 'rlhf_patches.patches.trl.dropout_ratio:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.22.0,<=1.16.0', modules=('trl.trainer.rloo_trainer', 'trl.trainer.grpo_trainer'), independent=True, rewrites=True),
    )),
    Listed('trl-functional-dropout', 'rlhf_patches.patches.trl.functional_dropout:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.6.0,<=1.16.0', modules=('trl.trainer.utils',), rewrites=True),
    )),
    Listed('trl-gkd-generated-count', 'rlhf_patches.patches.trl.gkd_generated_count:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.7.0,<=1.16.0', modules=('trl.experimental.gkd.gkd_trainer', 'trl.experimental.gold.gold_trainer'), independent=True, rewrites=True),
    )),
    Listed('trl-grpo-dapo-scale', 'rlhf_patches.patches.trl.grpo_dapo_scale:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.22.0,<1.9.1', modules=('trl.trainer.grpo_trainer',), rewrites=True),
    )),
    Listed('trl-grpo-liger-tools', 'rlhf_patches.patches.trl.grpo_liger_tools:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.29.0', modules=('trl.trainer.grpo_trainer',), rewrites=True),
    )),
    Listed('trl-grpo-tool-lockstep', 'rlhf_patches.patches.trl.grpo_tool_lockstep:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.29.1,<1.1.0', modules=('trl.trainer.grpo_trainer', 'trl.generation.vllm_generation'), rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.1.0,<=1.16.0', modules=('trl.trainer.grpo_trainer', 'trl.generation.vllm_generation'), rewrites=True),
    )),
    Listed('trl-grpo-tool-overflow', 'rlhf_patches.patches.trl.grpo_tool_overflow:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.26.0,<1.2.0', modules=('trl.trainer.grpo_trainer',), rewrites=True),
    )),
    Listed('trl-grpo-tool-turns', 'rlhf_patches.patches.trl.grpo_tool_turns:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.0.0,<1.2.0', modules=('trl.trainer.grpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.2.0,<1.14.1', modules=('trl.trainer.grpo_trainer',), rewrites=True),
    )),
    Listed('trl-grpo-truncated-count', 'rlhf_patches.patches.trl.grpo_truncated_count:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.22.0,<0.26.0', modules=('trl.trainer.grpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.28.0', modules=('trl.trainer.grpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.28.0,<1.9.0', modules=('trl.trainer.grpo_trainer',), rewrites=True),
    )),
    Listed('trl-guided-decoding', 'rlhf_patches.patches.trl.guided_decoding:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.16.0,<=0.17.0', modules=('trl.scripts.vllm_serve',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='vllm', versions='>=0.12.0,<=0.33.0', package='vllm')),
        ListedVariant(distribution='trl', versions='>=0.18.0,<=0.26.2', modules=('trl.scripts.vllm_serve', 'trl.trainer.grpo_trainer'), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='vllm', versions='>=0.12.0,<=0.33.0', package='vllm')),
    )),
    Listed('trl-kto-liger-reference', 'rlhf_patches.patches.trl.kto_liger_reference:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.8.0,<1.13.0', modules=('trl.trainer.kto_trainer',), rewrites=True),
    )),
    Listed('trl-logit-scaling', 'rlhf_patches.patches.trl.logit_scaling:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.4.0,<1.10.0', modules=('trl.trainer.sft_trainer', 'trl.trainer.utils'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.10.0,<1.11.0', modules=('trl.trainer.sft_trainer', 'trl.trainer.utils', 'trl.trainer.distillation_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.11.0,<1.13.0', modules=('trl.trainer.sft_trainer', 'trl.trainer.utils', 'trl.trainer.distillation_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.13.0,<1.14.0', modules=('trl.trainer.sft_trainer', 'trl.trainer.utils', 'trl.trainer.distillation_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.14.0,<1.15.0', modules=('trl.trainer.sft_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.utils', 'trl.trainer.distillation_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.15.0,<=1.16.0', modules=('trl.trainer.utils', 'trl.trainer.distillation_trainer'), independent=True, rewrites=True),
    )),
    Listed('trl-metrics-deadlock', 'rlhf_patches.patches.trl.metrics_deadlock:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.0.0rc1,<1.14.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True),
    )),
    Listed('trl-online-dpo-server', 'rlhf_patches.patches.trl.online_dpo:PATCH_SERVER', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.26.0,<1.8.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), rewrites=True),
    )),
    Listed('trl-online-dpo-server-padding', 'rlhf_patches.patches.trl.online_dpo:PATCH_PADDING', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.26.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), rewrites=True),
    )),
    Listed('trl-online-dpo-sleep-weights', 'rlhf_patches.patches.trl.online_dpo:PATCH_SLEEP', (
        ListedVariant(distribution='trl', versions='>=0.28.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), rewrites=True),
    )),
    Listed('trl-online-dpo-tensor-parallel', 'rlhf_patches.patches.trl.online_dpo:PATCH_TOGETHER', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.26.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), rewrites=True),
    )),
    Listed('trl-online-dpo-accumulation', 'rlhf_patches.patches.trl.online_dpo_accumulation:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.12.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer', 'trl.trainer.nash_md_trainer', 'trl.trainer.xpo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.26.0,<1.14.0', modules=('trl.experimental.online_dpo.online_dpo_trainer', 'trl.experimental.nash_md.nash_md_trainer', 'trl.experimental.xpo.xpo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.14.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), rewrites=True),
    )),
    Listed('trl-online-dpo-metrics', 'rlhf_patches.patches.trl.online_dpo_metrics:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.11.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.26.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), rewrites=True),
    )),
    Listed('trl-online-dpo-watch-rollouts', 'rlhf_patches.patches.trl.online_dpo_watch_rollouts:WATCH', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',)),
        ListedVariant(distribution='trl', versions='>=0.26.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',)),
    ), watches=True),
    Listed('trl-optional-packages', 'rlhf_patches.patches.trl.optional_packages:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.14.0,<0.16.0', modules=('trl.import_utils',), rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.16.0,<0.17.0', modules=('trl.import_utils',), rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.17.0,<0.18.0', modules=('trl.import_utils',), rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.18.0,<0.24.0', modules=('trl.import_utils',), rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.24.0,<0.26.0', modules=('trl.import_utils',), rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.27.0', modules=('trl.import_utils',), rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.27.0,<0.29.0', modules=('trl.import_utils',), rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
    )),
    Listed('trl-precompute-cache', 'rlhf_patches.patches.trl.precompute_cache:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.29.0,<1.4.0', modules=('trl.trainer.dpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.4.0,<1.8.0', modules=('trl.trainer.dpo_trainer', 'trl.experimental.kto.kto_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.8.0,<1.9.0', modules=('trl.trainer.dpo_trainer', 'trl.trainer.kto_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.9.0,<=1.16.0', modules=('trl.trainer.dpo_trainer',), rewrites=True),
    )),
    Listed('trl-resume-order', 'rlhf_patches.patches.trl.resume_order:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.17.0,<0.22.0', modules=('trl.trainer.grpo_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.22.0,<=1.16.0', modules=('trl.trainer.utils',), rewrites=True),
    )),
    Listed('trl-sft-first-label', 'rlhf_patches.patches.trl.sft_first_label:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.19.0,<0.22.2', modules=('trl.trainer.sft_trainer',), rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.22.2,<0.23.1', modules=('trl.trainer.sft_trainer',), rewrites=True),
    )),
    Listed('trl-sft-label-smoothing', 'rlhf_patches.patches.trl.sft_label_smoothing:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.4.0,<1.15.0', modules=('trl.trainer.sft_trainer',), rewrites=True),
    )),
    Listed('trl-tokenizer-argument', 'rlhf_patches.patches.trl.tokenizer_argument:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.8.2,<=0.11.4', modules=('trl.trainer.sft_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.reward_trainer'), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.0.0rc0,<=5.24.0', package='transformers')),
    )),
    Listed('trl-grpo-train-sampler', 'rlhf_patches.patches.trl.train_sampler:ADVICE_GRPO', (
        ListedVariant(distribution='trl', versions='>=0.15.0,<=0.16.1', modules=('trl.trainer.grpo_trainer',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=4.52.0,<=5.24.0', package='transformers')),
    )),
    Listed('trl-kto-train-sampler', 'rlhf_patches.patches.trl.train_sampler:ADVICE_KTO', (
        ListedVariant(distribution='trl', versions='>=0.8.0,<=0.9.6', modules=('trl.trainer.kto_trainer',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=4.52.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.10.1,<=0.17.0', modules=('trl.trainer.kto_trainer', 'trl.trainer.bco_trainer'), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=4.52.0,<=5.24.0', package='transformers')),
    )),
    Listed('trl-trainer-overrides', 'rlhf_patches.patches.trl.trainer_overrides:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.8.2,<=0.11.4', modules=('trl.trainer.dpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.cpo_trainer'), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=4.46.0,<5.0.0rc0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.12.0,<=0.12.2', modules=('trl.trainer.dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.kto_trainer'), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=4.47.0,<5.0.0rc0', package='transformers')),
    )),
    Listed('trl-vllm-nan-logprob', 'rlhf_patches.patches.trl.vllm_nan_logprob:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.27.1,<1.11.0', modules=('trl.trainer.grpo_trainer',), rewrites=True),
    )),
    Listed('trl-vllm-raw-logprobs', 'rlhf_patches.patches.trl.vllm_raw_logprobs:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.24.0', modules=('trl.scripts.vllm_serve', 'trl.trainer.grpo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.24.0,<0.27.1', modules=('trl.scripts.vllm_serve',), rewrites=True),
    ), "with top_p, top_k or min_p vLLM's processed log-probabilities are within the nucleus, and TRL's are not"),
    Listed('trl-vllm-serve-dead-worker', 'rlhf_patches.patches.trl.vllm_serve_dead_worker:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.17.0,<1.11.0', modules=('trl.scripts.vllm_serve',), rewrites=True),
    )),
    Listed('trl-vllm-sleep-weights', 'rlhf_patches.patches.trl.vllm_sleep_weights:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.25.0,<0.26.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.28.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer', 'trl.experimental.openenv.utils'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.28.0,<0.29.0', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer', 'trl.experimental.openenv.utils'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.29.0,<0.29.1', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer', 'trl.experimental.openenv.utils'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=0.29.1,<=0.29.1', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer', 'trl.experimental.openenv.utils'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.0.0rc1,<1.9.0', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer', 'trl.experimental.openenv.utils', 'trl.experimental.dppo.dppo_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='trl', versions='>=1.9.0,<1.10.0', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer'), independent=True, rewrites=True),
    )),
    Listed('trl-vlm-image-labels', 'rlhf_patches.patches.trl.vlm_image_labels:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.22.0,<=1.16.0', modules=('trl.trainer.sft_trainer',), rewrites=True),
    ), "TRL's collator says that models handle vision tokens in their loss; those of transformers do not"),
    Listed('trl-warnings-issued', 'rlhf_patches.patches.trl.warnings_issued:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.14.0,<0.22.0', modules=('trl.trainer.bco_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.online_dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.reward_trainer'), independent=True, rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.22.0,<0.24.0', modules=('trl.trainer.bco_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.online_dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.reward_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.24.0,<0.25.0', modules=('trl.trainer.bco_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.online_dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.25.0,<0.26.0', modules=('trl.trainer.cpo_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.online_dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.rloo_trainer', 'trl.experimental.bco.bco_trainer'), independent=True, rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.27.2', modules=('trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer', 'trl.experimental.bco.bco_trainer', 'trl.experimental.cpo.cpo_trainer', 'trl.experimental.kto.kto_trainer', 'trl.experimental.online_dpo.online_dpo_trainer', 'trl.experimental.orpo.orpo_trainer'), independent=True, rewrites=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
    )),
    Listed('trl-watch-rollouts', 'rlhf_patches.patches.trl.watch_rollouts:WATCH', (
        ListedVariant(distribution='trl', versions='>=0.25.0,<0.29.1', modules=('trl.trainer.grpo_trainer',)),
        ListedVariant(distribution='trl', versions='>=0.29.1', modules=('trl.trainer.grpo_trainer', 'trl.generation.vllm_generation')),
    ), watches=True),
    Listed('verl-critic-loss-scale', 'rlhf_patches.patches.verl.critic_loss_scale:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.0,<0.9.0', modules=('verl.workers.utils.losses', 'verl.trainer.ppo.core_algos'), rewrites=True),
    )),
    Listed('verl-disaggregated-lora', 'rlhf_patches.patches.verl.disaggregated_lora:ADVICE', (
        ListedVariant(distribution='verl', versions='>=0.7.1,<=0.9.1', modules=('verl.workers.engine_workers',), rewrites=True, is_advice=True),
    )),
    Listed('verl-dr-grpo-length-bias', 'rlhf_patches.patches.verl.dr_grpo_length_bias:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<=0.9.1', modules=('verl.workers.engine_workers',), rewrites=True),
    )),
    Listed('verl-fp32-gradients', 'rlhf_patches.patches.verl.fp32_gradients:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.0,<=0.7.1', modules=('verl.utils.megatron_utils',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.8.0,<=0.8.0', modules=('verl.utils.megatron_utils',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.9.0,<0.9.1', modules=('verl.utils.megatron_utils',), rewrites=True),
    )),
    Listed('verl-fused-logprob-contiguity', 'rlhf_patches.patches.verl.fused_logprob_contiguity:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.4.0,<0.9.0', modules=('verl.utils.experimental.torch_functional',), rewrites=True),
    )),
    Listed('verl-gdpo-whitening', 'rlhf_patches.patches.verl.gdpo_whitening:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.1,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), rewrites=True),
    ), "the authors' own code normalizes over tokens as verl does, and pull request #6497 is open"),
    Listed('verl-gmpo-micro-batches', 'rlhf_patches.patches.verl.gmpo_micro_batches:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.0,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), rewrites=True),
    )),
    Listed('verl-logprob-entropy', 'rlhf_patches.patches.verl.logprob_entropy:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.1rc0,<=0.2.0.post2', modules=('verl.utils.megatron.tensor_parallel',)),
        ListedVariant(distribution='verl', versions='>=0.3.0.post0,<=0.3.0.post1', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.actor.megatron_actor'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.4.0,<=0.5.0', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.actor.megatron_actor'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.6.0,<=0.6.1', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.actor.megatron_actor', 'verl.workers.engine.megatron.transformer_impl'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.7.0,<=0.7.1', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.actor.megatron_actor', 'verl.workers.engine.megatron.transformer_impl'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<=0.8.0', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.engine.megatron.transformer_impl'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.engine.megatron.transformer_impl'), independent=True, rewrites=True),
    )),
    Listed('verl-lora-buckets', 'rlhf_patches.patches.verl.lora_buckets:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.1,<0.9.0', modules=('verl.workers.rollout.vllm_rollout.utils',), rewrites=True),
    )),
    Listed('verl-merged-lora', 'rlhf_patches.patches.verl.merged_lora:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.1,<0.9.0', modules=('verl.workers.engine.fsdp.transformer_impl',)),
    )),
    Listed('verl-no-sync-reentry', 'rlhf_patches.patches.verl.no_sync_reentry:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.1,<=0.9.1', modules=('verl.utils.megatron_utils',), rewrites=True),
    )),
    Listed('verl-padding-only-micro-batch', 'rlhf_patches.patches.verl.padding_only_micro_batch:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<0.9.0', modules=('verl.trainer.distillation.losses',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.trainer.distillation.losses',), rewrites=True),
    )),
    Listed('verl-qwen2-vl-output', 'rlhf_patches.patches.verl.qwen2_vl_output:ADVICE', (
        ListedVariant(distribution='verl', versions='>=0.4.0,<=0.9.1', modules=('verl.models.transformers.qwen2_vl',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.23.0,<=5.24.0', package='transformers')),
    )),
    Listed('verl-reinforce-plus-plus-turns', 'rlhf_patches.patches.verl.reinforce_plus_plus_turns:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.4.0,<0.9.0', modules=('verl.trainer.ppo.core_algos',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), rewrites=True),
    )),
    Listed('verl-rejected-in-group', 'rlhf_patches.patches.verl.rejected_in_group:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.1,<=0.9.1', modules=('verl.trainer.ppo.core_algos',)),
    ), '#6362 and #6375 were closed, #6452 is open; a mean that counts rejected responses is a baseline, too'),
    Listed('verl-rejected-loss-mask', 'rlhf_patches.patches.verl.rejected_loss_mask:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<0.9.0', modules=('verl.trainer.main_ppo_sync',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.trainer.ppo.v1.trainer_base',), rewrites=True),
    )),
    Listed('verl-replica-seed', 'rlhf_patches.patches.verl.replica_seed:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.0,<0.6.1', modules=('verl.workers.rollout.vllm_rollout.vllm_async_server',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.6.1,<0.7.1', modules=('verl.workers.rollout.vllm_rollout.vllm_async_server',), rewrites=True),
    )),
    Listed('verl-resume-epoch', 'rlhf_patches.patches.verl.resume_epoch:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.0,<0.7.0', modules=('verl.trainer.sft_trainer', 'verl.trainer.fsdp_sft_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.7.0,<0.7.1', modules=('verl.trainer.sft_trainer', 'verl.trainer.sft_trainer_ray', 'verl.trainer.fsdp_sft_trainer', 'verl.trainer.ppo.ray_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.7.1,<0.8.0', modules=('verl.trainer.sft_trainer', 'verl.trainer.sft_trainer_ray', 'verl.trainer.ppo.ray_trainer'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.8.0,<0.9.0', modules=('verl.trainer.sft_trainer', 'verl.trainer.sft_trainer_ray', 'verl.trainer.main_ppo_sync'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.trainer.sft_trainer', 'verl.trainer.sft_trainer_ray'), independent=True, rewrites=True),
    )),
    Listed('verl-reward-on-answer', 'rlhf_patches.patches.verl.reward_on_answer:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.5.0,<0.7.1', modules=('verl.trainer.ppo.core_algos',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.7.1,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), rewrites=True),
    )),
    Listed('verl-rloo-singletons', 'rlhf_patches.patches.verl.rloo_singletons:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.0,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), rewrites=True),
    )),
    Listed('verl-rollout-seed', 'rlhf_patches.patches.verl.rollout_seed:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.9.0,<0.9.1', modules=('verl.workers.rollout.vllm_rollout.vllm_async_server', 'verl.experimental.agent_loop.single_turn_agent_loop'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.9.1,<=0.9.1', modules=('verl.workers.rollout.vllm_rollout.vllm_async_server', 'verl.experimental.agent_loop.single_turn_agent_loop', 'verl.experimental.agent_loop.tool_agent_loop'), independent=True, rewrites=True),
    )),
    Listed('verl-rotary-precision', 'rlhf_patches.patches.verl.rotary_precision:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.2,<0.6.0', modules=('verl.workers.fsdp_workers',), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.6.0,<0.7.1', modules=('verl.workers.engine.fsdp.transformer_impl', 'verl.workers.fsdp_workers'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.7.1,<0.8.0', modules=('verl.workers.engine.fsdp.transformer_impl', 'verl.workers.fsdp_workers'), independent=True, rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.8.0,<=0.9.1', modules=('verl.workers.engine.fsdp.transformer_impl',), independent=True, rewrites=True),
    )),
    Listed('verl-tool-separator', 'rlhf_patches.patches.verl.tool_separator:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.5.0,<0.6.0', modules=('verl.experimental.agent_loop.tool_agent_loop',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.6.0,<0.7.0', modules=('verl.experimental.agent_loop.tool_agent_loop',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.7.0,<=0.7.1', modules=('verl.experimental.agent_loop.tool_agent_loop',), rewrites=True),
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<0.9.0', modules=('verl.experimental.agent_loop.tool_agent_loop',), rewrites=True),
    )),
    Listed('verl-trl-value-head', 'rlhf_patches.patches.verl.trl_value_head:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.4.1,<=0.7.1', modules=('verl.utils.model', 'verl.models.transformers.monkey_patch'), independent=True, rewrites=True, co_installed=ListedCoInstalled(distribution='trl', versions='>=0.29.0,<=1.16.0', package='trl')),
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<=0.9.0', modules=('verl.utils.model', 'verl.models.transformers.monkey_patch'), independent=True, rewrites=True, co_installed=ListedCoInstalled(distribution='trl', versions='>=0.29.0,<=1.16.0', package='trl')),
        ListedVariant(distribution='verl', versions='>=0.9.1,<=0.9.1', modules=('verl.models.transformers.monkey_patch',), rewrites=True, co_installed=ListedCoInstalled(distribution='trl', versions='>=1.13.0,<=1.16.0', package='trl')),
    )),
    Listed('verl-vision2seq', 'rlhf_patches.patches.verl.vision2seq:ADVICE', (
        ListedVariant(distribution='verl', versions='>=0.3.0.post0,<=0.5.0', modules=('verl.workers.fsdp_workers',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.0.0rc3,<=5.24.0', package='transformers')),
        ListedVariant(distribution='verl', versions='>=0.6.0,<=0.7.0', modules=('verl.utils.model',), rewrites=True, is_advice=True, co_installed=ListedCoInstalled(distribution='transformers', versions='>=5.0.0rc3,<=5.24.0', package='transformers')),
    )),
    Listed('verl-watch-rollouts', 'rlhf_patches.patches.verl.watch_rollouts:WATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.0,<0.8.0', modules=('verl.trainer.ppo.ray_trainer', 'verl.utils.tracking'), independent=True),
        ListedVariant(distribution='verl', versions='>=0.8.0,<0.9.0', modules=('verl.trainer.ppo.ray_trainer', 'verl.trainer.main_ppo_sync', 'verl.utils.tracking'), independent=True),
        ListedVariant(distribution='verl', versions='>=0.9.0', modules=('verl.trainer.ppo.ray_trainer', 'verl.trainer.ppo.v1.trainer_base', 'verl.utils.tracking'), independent=True),
    ), watches=True),
    Listed('vllm-watch-requests', 'rlhf_patches.patches.vllm.watch_requests:WATCH', (
        ListedVariant(distribution='vllm', versions='>=0.7.3', modules=('vllm.v1.worker.gpu_worker',)),
    ), watches=True),
)
