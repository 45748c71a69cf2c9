"""Every built-in patch and advice. Written by tools/derive.py (``make docs``); a test compares."""

from __future__ import annotations

# fmt: off
# ruff: noqa: E501, Q
from rlhf_patches import Listed, ListedBeside, ListedVariant

LISTED = (
    Listed('accelerate-fsdp2-load-by-position', 'rlhf_patches.patches.accelerate.fsdp2_load_by_position:PATCH', (
        ListedVariant(distribution='accelerate', versions='>=1.6.0,<1.14.0', modules=('accelerate.utils.fsdp_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('accelerate-fsdp2-upcast', 'rlhf_patches.patches.accelerate.fsdp2_upcast:PATCH', (
        ListedVariant(distribution='accelerate', versions='==1.13.0', modules=('accelerate.utils.fsdp_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'accelerate 1.13.0 trained bfloat16 parameters where every other release trains float32: most updates of a small\nlearning rate were lost. With the patch such a run learns more from the same number of steps, and needs twice the memory\nfor what it trains. A learning rate that was raised to make up for it should be lowered again. A checkpoint has lost\nnothing but those updates, and can be trained on.'),
    Listed('accelerate-optimizer-train', 'rlhf_patches.patches.accelerate.optimizer_train:ADVICE', (
        ListedVariant(distribution='accelerate', versions='>=0.30.0rc0,<=0.33.0', modules=('accelerate.optimizer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=4.45.0,<4.52.0', package='transformers')),
    ), None),
    Listed('accelerate-resume-dispatched', 'rlhf_patches.patches.accelerate.resume_dispatched:PATCH', (
        ListedVariant(distribution='accelerate', versions='>=0.16.0,<=1.15.0', modules=('accelerate.data_loader',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('accelerate-resume-order', 'rlhf_patches.patches.accelerate.resume_order:PATCH', (
        ListedVariant(distribution='accelerate', versions='>=0.24.0,<1.15.0', modules=('accelerate.data_loader',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('deepspeed-empty-groups', 'rlhf_patches.patches.deepspeed.empty_groups:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.3.13,<=0.19.8', modules=('deepspeed.runtime.engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since DeepSpeed 0.3.13, without torch 2.10's check, groups behind an empty one were trained at another group's learning\nrate. It matters where the rates differ: with PEFT's LoRA+ the B matrices had the rate of the embeddings, and the ratio\nthat was set had no effect. With the patch each group has the rate that it was given. A run that was tuned with another\none should have its learning rates looked at again; checkpoints can be trained on."),
    Listed('deepspeed-group-learning-rates', 'rlhf_patches.patches.deepspeed.group_learning_rates:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.17.2,<0.19.4', modules=('deepspeed.runtime.lr_schedules',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "DeepSpeed 0.17.2 to 0.19.3 trained all parameter groups at the first group's learning rate. With the patch each has its\nown, as its optimizer was given. A run that was tuned with it should have all groups but the first looked at again."),
    Listed('deepspeed-offload-accumulation', 'rlhf_patches.patches.deepspeed.offload_accumulation:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.15.2,<0.19.0', modules=('deepspeed.runtime.zero.stage_1_and_2',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since DeepSpeed 0.15.2, ZeRO-2 with an offloaded optimizer and an accumulation of N micro-batches, 3 or more (ZenFlow,\nof ZeRO-1 too: an `update_interval` of N; what it selects is trained in each micro-batch and was right), trained on the\nfirst and the last of them, divided by N: the gradient was as if of 2 N-ths of its size and of noisier batches. With the\npatch gradient norms rise (by a factor of N / 2 where micro-batches agree) to what a run without offload logs. A run\nthat was tuned with it should have its learning rate and its clipping threshold looked at again; SGD and clipping see\nthe factor, Adam mostly the noise. A checkpoint is as good as what it was trained on, and can be trained on.'),
    Listed('deepspeed-offload-rare-parameters', 'rlhf_patches.patches.deepspeed.offload_rare_parameters:ADVICE', (
        ListedVariant(distribution='deepspeed', versions='>=0.5.9,<=0.19.8', modules=('deepspeed.runtime.zero.stage_1_and_2',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=None),
    ), None),
    Listed('deepspeed-pipeline-accumulation', 'rlhf_patches.patches.deepspeed.pipeline_accumulation:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.18.3,<0.18.4', modules=('deepspeed.runtime.engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='deepspeed', versions='>=0.18.4,<0.19.3', modules=('deepspeed.runtime.engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "From 0.18.3 to 0.19.2 every stage but the last has trained on a gradient that was `gradient_accumulation_steps` times\ntoo small, once for each stage after it. With the patch it has the whole one, and the norm rises. Adam divides such a\nfactor away, apart from its epsilon, clipping and weight decay; with SGD earlier stages have hardly trained. A run that\nwas tuned without it should have its learning rate and its clipping threshold looked at again. Checkpoints can be\ntrained on; Adam's moments in them are those of the smaller gradients for some steps."),
    Listed('deepspeed-topk-drops', 'rlhf_patches.patches.deepspeed.topk_drops:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.15.0,<0.19.0', modules=('deepspeed.moe.sharded_moe',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'From 0.15.0 to 0.18.9 a `MoE` layer with k above 2 has dropped tokens whose logits were negative from experts that had\nroom, as if the capacity was smaller, and did so in evaluation too. With the patch each expert takes what its capacity\nallows: outputs have more experts in them. A model that was trained without it goes on from there, but wants its\nevaluation repeated, and its capacity factor looked at again.'),
    Listed('deepspeed-unscaled-accumulation', 'rlhf_patches.patches.deepspeed.unscaled_accumulation:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.16.0,<0.16.5', modules=('deepspeed.runtime.engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='deepspeed', versions='>=0.16.5,<0.16.6', modules=('deepspeed.runtime.engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='deepspeed', versions='>=0.16.6,<0.18.0', modules=('deepspeed.runtime.engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='deepspeed', versions='>=0.18.0,<0.18.3', modules=('deepspeed.runtime.engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "From 0.16.0 to 0.18.2 gradients of pipelines, and of micro-batches in `no_sync()`, were `gradient_accumulation_steps`\ntimes too large. With the patch their norms fall by that factor. Adam's steps hardly change where nothing is clipped;\na run whose learning rate or clipping threshold was tuned without it (SGD, or clipping that was always active) should\nhave both looked at again. Where only some micro-batches are in `no_sync()`, all weigh the same now. Code that divides\nby the steps itself inside `no_sync()`, to make up for it, has to stop. Checkpoints can be trained on."),
    Listed('deepspeed-zero1-last-micro-batch', 'rlhf_patches.patches.deepspeed.zero1_last_micro_batch:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.18.3,<0.19.0', modules=('deepspeed.runtime.engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since DeepSpeed 0.18.5, ZeRO-1 with bfloat16 parameters and float32 accumulation took the last micro-batch of each step\nfrom one rank in place of the mean over all. With the patch gradients are less noisy and their norms lower: of one\nmicro-batch a step on N ranks, as from N times the data. A run that was tuned with it should have its learning rate\nlooked at again; checkpoints are as good as what they were trained on, and can be trained on.'),
    Listed('deepspeed-zero2-accumulation', 'rlhf_patches.patches.deepspeed.zero2_accumulation:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.17.6,<0.18.3', modules=('deepspeed.runtime.zero.stage_1_and_2',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "DeepSpeed 0.17.6 to 0.18.2 trained ZeRO-2 on the last of a step's N micro-batches, divided by N. With the patch gradient\nnorms rise (by a factor of N where micro-batches agree) to what ZeRO-3 and other releases log. A run that was tuned with\nit should have its learning rate and its clipping threshold looked at again; Adam mostly sees less noise. A checkpoint\nis as good as what it was trained on, and can be trained on."),
    Listed('deepspeed-zero3-rare-parameters', 'rlhf_patches.patches.deepspeed.zero3_rare_parameters:PATCH', (
        ListedVariant(distribution='deepspeed', versions='>=0.9.2,<0.17.5', modules=('deepspeed.runtime.zero.stage3',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='deepspeed', versions='>=0.17.5,<=0.19.8', modules=('deepspeed.runtime.zero.stage3',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "ZeRO-3 trained parameters that a step, or its first micro-batch, did not use on the gradient of an earlier step (with an\noffloaded optimizer also where the last micro-batch did not use them, and then without this step's). With the patch that\nis gone: experts, towers and adapters that are used rarely move less, and the gradient norm is that of the step. A run\nthat was tuned with it should have the learning rate of such parameters looked at again. A checkpoint is as good as what\nit was trained on, and can be trained on."),
    Listed('math-verify-thread', 'rlhf_patches.patches.math_verify.thread:PATCH', (
        ListedVariant(distribution='math-verify', versions='>=0.6.1,<=0.9.0', modules=('math_verify.utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('megatron-bridge-disable-adapter', 'rlhf_patches.patches.megatron_bridge.disable_adapter:PATCH', (
        ListedVariant(distribution='megatron-bridge', versions='>=0.3.0,<=0.6.2', modules=('megatron.bridge.peft.base',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since 0.3.0 what was computed in a context of `disable_adapter` after an inner one was left had the adapter in it. A run\nwhose reference pass did that was held to itself in place of its reference: its KL divergence was too small.'),
    Listed('megatron-bridge-no-sync-reentry', 'rlhf_patches.patches.megatron_bridge.no_sync_reentry:PATCH', (
        ListedVariant(distribution='megatron-bridge', versions='>=0.1.0a0,<=0.6.2', modules=('megatron.bridge.training.setup',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('megatron-core-attention-sink-norm', 'rlhf_patches.patches.megatron_core.attention_sink_norm:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.15.0rc4,<=0.20.0', modules=('megatron.core.transformer.dot_product_attention', 'megatron.core.extensions.transformer_engine'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformer-engine', versions='>=1.0', package='transformer_engine')),
    ), "Since megatron-core 0.15.0 `grad_norm` lacked (TP - 1)/TP of the sinks' squares. A run whose norms are above `clip_grad`\ntakes smaller steps now: to go on as before, multiply its `clip_grad` by the factor by which `grad_norm` grows at the\nfirst step. Where the norm stays below, nothing changes but what is logged."),
    Listed('megatron-core-cross-entropy-in-place', 'rlhf_patches.patches.megatron_core.cross_entropy_in_place:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.8.0,<=0.20.0', modules=('megatron.core.tensor_parallel.cross_entropy', 'megatron.core.fusions.fused_cross_entropy'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('megatron-core-duplicated-norm', 'rlhf_patches.patches.megatron_core.duplicated_norm:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.11.0rc0,<0.17.0', modules=('megatron.core.extensions.transformer_engine',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformer-engine', versions='>=1.0', package='transformer_engine')),
    ), "Since 0.11.0 `grad_norm` was too large: with a weight that has a share s of the squared norm, by the root of\n1 + (TP - 1) s; 1.36 to 1.52 times at TP 8 were reported for DeepSeek-V3's shape. A run whose norms were mostly above\n`clip_grad` has taken steps that much smaller than meant, and takes larger ones now: divide its `clip_grad` by that\nfactor to go on as before. Where the norm was below, nothing changes but what is logged."),
    Listed('megatron-core-expert-bias-counts', 'rlhf_patches.patches.megatron_core.expert_bias_counts:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.12.0rc2,<=0.20.0', modules=('megatron.core.transformer.moe.router', 'megatron.core.distributed.finalize_model_grads'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since megatron-core 0.12.0, with bf16 or fp16, an expert's bias could move the wrong way wherever its tokens were within\none rounding of the mean: 0.4 % of it in bf16 for each addition. With the patch each moves as its count says. A run that\nwas balanced by a higher `moe_router_bias_update_rate` or an auxiliary loss beside it may need less of them."),
    Listed('megatron-forward-pre-hook-reentry', 'rlhf_patches.patches.megatron_core.forward_pre_hook_reentry:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.9.0,<=0.20.0', modules=('megatron.core.distributed.distributed_data_parallel',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('megatron-core-gdn-norm-gradient', 'rlhf_patches.patches.megatron_core.gdn_norm_gradient:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.16.0,<=0.18.2', modules=('megatron.core.ssm.gated_delta_net', 'megatron.core.distributed.finalize_model_grads'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='megatron-core', versions='>=0.19.0,<=0.20.0', modules=('megatron.core.ssm.gated_delta_net.common', 'megatron.core.distributed.finalize_model_grads'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "the gradient of `out_norm` was wrong on each rank, by about its own norm with two ranks and more with more, since\nmegatron-core 0.16.0, the first with Gated DeltaNets; all other gradients were those of the model as each rank had it.\nCopies that have parted stay apart: go on from a checkpoint, which has rank 0's copy for all, and not from memory. The\ngradient of this weight is a sum over all heads now: with SGD it moves further, with Adam in another direction."),
    Listed('megatron-core-grouped-experts-norm', 'rlhf_patches.patches.megatron_core.grouped_experts_norm:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.9.0,<0.19.0', modules=('megatron.core.extensions.transformer_engine',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformer-engine', versions='>=2.13.0,<=2.20.2', package='transformer_engine')),
    ), "Since TransformerEngine 2.13.0 `grad_norm` lacked (TP - 1)/TP of the experts' squares. A run whose norms are above\n`clip_grad` takes smaller steps now, as it did with TransformerEngine 2.12: to go on as before, multiply its `clip_grad`\nby the factor by which `grad_norm` grows at the first step. Where the norm stays below, nothing changes but what is\nlogged."),
    Listed('megatron-core-moe-auxiliary-context', 'rlhf_patches.patches.megatron_core.moe_auxiliary_context:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.8.0,<=0.11.0', modules=('megatron.core.pipeline_parallel.schedules',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='megatron-core', versions='>=0.12.0rc2,<=0.13.1', modules=('megatron.core.pipeline_parallel.schedules',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='megatron-core', versions='>=0.14.0,<0.16.0', modules=('megatron.core.pipeline_parallel.schedules',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since megatron-core 0.8.0, with context parallelism, a mixture's auxiliary losses had 1 / CP of the weight that was set.\nWith the patch they have all of it. A run that was tuned with it has the balance that it had with coefficients divided\nby CP."),
    Listed('megatron-core-moe-auxiliary-global', 'rlhf_patches.patches.megatron_core.moe_auxiliary_global:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.15.0rc3,<0.16.0', modules=('megatron.core.transformer.moe.router',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='megatron-core', versions='>=0.16.0,<=0.20.0', modules=('megatron.core.transformer.moe.router',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since megatron-core 0.15.0 `global_aux_loss` had 1 / DP of the weight that was set; all other gradients were right.\nWith the patch it has all of it. A run that was tuned without it has the balance that it had with the coefficient\ndivided by the number of data-parallel ranks.'),
    Listed('megatron-core-moe-auxiliary-padding', 'rlhf_patches.patches.megatron_core.moe_auxiliary_padding:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.19.0,<=0.20.0', modules=('megatron.core.transformer.moe.router',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'In megatron-core 0.19.0 to 0.19.2, with `--calculate-per-token-loss` and a padding mask, load balancing had TP x CP\ntimes the weight that was set. With the patch it has that weight. A run that was tuned with it has the balance that it\nhad with coefficients multiplied by that number.'),
    Listed('megatron-core-moe-auxiliary-per-token', 'rlhf_patches.patches.megatron_core.moe_auxiliary_per_token:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.12.0rc2,<=0.12.3', modules=('megatron.core.transformer.moe.router',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='megatron-core', versions='>=0.13.0rc0,<=0.13.1', modules=('megatron.core.transformer.moe.router',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='megatron-core', versions='>=0.14.0,<0.16.0', modules=('megatron.core.transformer.moe.router',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='megatron-core', versions='>=0.16.0,<0.19.0', modules=('megatron.core.transformer.moe.router',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since megatron-core 0.12.0, with `--calculate-per-token-loss`, a mixture's auxiliary losses had 1 / (TP x CP) of the\nweight that was set (`seq_aux_loss`, since 0.16.0, that over the micro-batch's size). With the patch they have all of\nit. A run that was tuned with it has the balance that it had with coefficients divided by that number."),
    Listed('megatron-core-offloaded-weights', 'rlhf_patches.patches.megatron_core.offloaded_weights:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.13.0rc0,<=0.20.0', modules=('megatron.core.optimizer.cpu_offloading.hybrid_optimizer', 'megatron.core.optimizer.distrib_optimizer'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since megatron-core 0.13.0, the first with `HybridDeviceOptimizer.update_fp32_param_by_new_param`, such a run went on\nfrom the weights that the optimizer was built with. With the patch it goes on from those that were loaded. A run that\nwas trained without the patch was not a fine-tuning of its checkpoint: begin it again.'),
    Listed('megatron-core-reshardable-buckets', 'rlhf_patches.patches.megatron_core.reshardable_buckets:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.15.0rc0,<=0.19.2', modules=('megatron.core.optimizer.distrib_optimizer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since megatron-core 0.15.0, the first with this format, each resume from such a checkpoint went on from shifted master\nweights and moments. With the patch a resumed run is the one that was not interrupted. What was trained after such a\nresume was trained from wrong weights.'),
    Listed('megatron-core-resume-groups', 'rlhf_patches.patches.megatron_core.resume_groups:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.16.0,<0.19.0', modules=('megatron.core.optimizer.optimizer', 'megatron.core.optimizer.distrib_optimizer'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since megatron-core 0.16.0 a resumed run with `--decoupled-lr` trained embedding, output layer and all else at one rate,\nthat of the last group. With the patch each has the rate that was saved. What was trained after such a resume was\ntrained at the wrong rate, and what it saved holds it: go back to the checkpoint that it resumed from.'),
    Listed('megatron-lm-no-sync-reentry', 'rlhf_patches.patches.megatron_lm.no_sync_reentry:PATCH', (
        ListedVariant(distribution='megatron-core', versions='>=0.6.0,<=0.20.0', modules=('megatron.training.training',), independent=False, rewrites=True, may_be_missing='before 0.17 megatron.training is in git only; a checkout that is installed calls itself megatron-core', is_advice=False, beside=None),
    ), None),
    Listed('nemo-rl-async-prefix-cache', 'rlhf_patches.patches.nemo_rl.async_prefixes:PATCH', (
        ListedVariant(distribution='nemo-rl', versions='>=0.4.0,<0.7.0', modules=('nemo_rl.algorithms.async_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='nemo-rl', versions='>=0.7.0,<=0.7.0', modules=('nemo_rl.algorithms.async_utils.trajectory_collector',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since 0.4.0, GRPO with `async_grpo.enabled` and without in-flight updates sampled with prefixes as older weights had\ncomputed them. Log-probabilities of generation were those of that mixture, which importance sampling corrected for. With\nthe patch they are those of the weights of the last update, and the first requests after an update compute their\nprompts. Checkpoints can be trained on.'),
    Listed('nemo-rl-logprob-backward', 'rlhf_patches.patches.nemo_rl.logprob_backward:PATCH', (
        ListedVariant(distribution='nemo-rl', versions='>=0.4.0,<=0.7.0', modules=('nemo_rl.distributed.model_utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('nemo-rl-watch-rollouts', 'rlhf_patches.patches.nemo_rl.watch_rollouts:WATCH', (
        ListedVariant(distribution='nemo-rl', versions='>=0.6.0', modules=('nemo_rl.algorithms.grpo', 'nemo_rl.utils.logger'), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None, watches=True),
    Listed('openrlhf-k3-gradient', 'rlhf_patches.patches.openrlhf.k3_gradient:PATCH', (
        ListedVariant(distribution='openrlhf', versions='>=0.8.6,<0.9.9', modules=('openrlhf.models.utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='>=0.9.9,<0.11.1', modules=('openrlhf.models.utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='==0.11.1', modules=('openrlhf.models.utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('openrlhf-masked-nan', 'rlhf_patches.patches.openrlhf.masked_nan:PATCH', (
        ListedVariant(distribution='openrlhf', versions='>=0.3.6.post1,<0.8.9', modules=('openrlhf.models.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='>=0.8.9,<0.8.10', modules=('openrlhf.models.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='>=0.8.10,<0.9.1', modules=('openrlhf.models.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='>=0.9.1,<0.9.3', modules=('openrlhf.models.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='>=0.9.3,<0.10.3', modules=('openrlhf.models.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='>=0.10.3,<0.11.1', modules=('openrlhf.models.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='==0.11.1', modules=('openrlhf.models.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='openrlhf', versions='==0.11.2', modules=('openrlhf.models.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('openrlhf-own-sampling-params', 'rlhf_patches.patches.openrlhf.own_sampling:PATCH', (
        ListedVariant(distribution='openrlhf', versions='>=0.9.1,<=0.11.2', modules=('openrlhf.utils.agent',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('openrlhf-watch-rollouts', 'rlhf_patches.patches.openrlhf.watch_rollouts:WATCH', (
        ListedVariant(distribution='openrlhf', versions='>=0.8.1', modules=('openrlhf.trainer.ppo_utils.experience_maker',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None, watches=True),
    Listed('peft-adapter-freeze', 'rlhf_patches.patches.peft.adapter_freeze:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.18.0rc0,<0.21.0', modules=('peft.tuners.tuners_utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since 0.18.0 an adapter beside which a frozen one was loaded has not been trained, and a frozen one beside which another\nwas loaded has been: a run that did either has to be trained again if that was not meant, and one that called\n`set_adapter` or `set_requires_grad` afterwards is as it was.'),
    Listed('peft-clear-device-cache', 'rlhf_patches.patches.peft.clear_device_cache:ADVICE', (
        ListedVariant(distribution='peft', versions='>=0.15.0,<=0.21.2', modules=('peft.utils.loftq_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='accelerate', versions='>=0.21.0,<0.32.0', package='accelerate')),
    ), None),
    Listed('peft-disable-adapter-fsdp', 'rlhf_patches.patches.peft.disable_adapter_fsdp:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.6.0,<0.19.0', modules=('peft.tuners.tuners_utils', 'peft.utils.other'), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('peft-disable-adapter-restore', 'rlhf_patches.patches.peft.disable_adapter_restore:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.11.0,<=0.21.2', modules=('peft.peft_model',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), 'In every release since 0.6 gradients of frozen parts of active adapters have counted in the clipping norm from the first\nreference pass on. With the patch the norm is smaller and a clipped step larger; a run without frozen parts is as it\nwas.'),
    Listed('peft-hybrid-cache', 'rlhf_patches.patches.peft.hybrid_cache:ADVICE', (
        ListedVariant(distribution='peft', versions='>=0.16.0,<=0.17.1', modules=('peft.peft_model',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=5.0.0rc3,<=5.24.0', package='transformers')),
    ), None),
    Listed('peft-layers-to-transform', 'rlhf_patches.patches.peft.layers_to_transform:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.8.0,<0.9.0', modules=('peft.tuners.tuners_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='peft', versions='>=0.9.0,<0.20.0', modules=('peft.tuners.tuners_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Adapters on some layers of a mixture of experts, PEFT 0.8.0 to 0.19.1, were on the experts of these numbers in all\nlayers. With the patch they are on the layers. A run that was trained so should be begun again, or go on without it.'),
    Listed('peft-lora-merge-drift', 'rlhf_patches.patches.peft.lora_merge_drift:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.7.0,<=0.21.2', modules=('peft.tuners.lora.layer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), 'In every release since 0.6 each weight synchronisation has moved half-precision base weights at random. An adapter from\nsuch a run was trained on weights that no longer exist: loaded onto the original model it computes something else than\nin training, so evaluate it anew, and train it on if that is worse.'),
    Listed('peft-save-adapter-prefix', 'rlhf_patches.patches.peft.save_adapter_prefix:PATCH', (
        ListedVariant(distribution='peft', versions='>=0.7.0,<0.20.0', modules=('peft.utils.save_and_load',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('skyrl-advantage-padding', 'rlhf_patches.patches.skyrl.advantage_padding:PATCH', (
        ListedVariant(distribution='skyrl', versions='==0.1.0', modules=('skyrl.backends.skyrl_train.utils.ppo_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='skyrl', versions='>=0.2.0,<=0.4.0', modules=('skyrl.train.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'All releases of SkyRL from 0.1.0 on subtract too small a mean with `advantage_batch_normalize=true`, by the share of\npadding in the batch, so all tokens of a step were pushed up or down together by what was left, most where long\nresponses are better or worse than short ones. With the patch such a run sees other advantages from the next step on. A\ncheckpoint can be trained on; a learning rate or a clipping range that was chosen for it may want another look. Runs\nwithout that setting, which is off by default, are as they were.'),
    Listed('skyrl-bf16-logits', 'rlhf_patches.patches.skyrl.bf16_logits:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.2.0', modules=('skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper', 'skyrl.backends.skyrl_train.distributed.megatron.megatron_utils'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('skyrl-entropy-backward', 'rlhf_patches.patches.skyrl.entropy_backward:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.3.0', modules=('skyrl.backends.skyrl_train.distributed.megatron.model_utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='skyrl', versions='==0.4.0', modules=('skyrl.backends.skyrl_train.distributed.megatron.model_utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('skyrl-fp8-alignment', 'rlhf_patches.patches.skyrl.fp8_alignment:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.2.0', modules=('skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='skyrl', versions='>=0.2.0,<0.3.0', modules=('skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('skyrl-logprob-backward', 'rlhf_patches.patches.skyrl.logprob_backward:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.4.0', modules=('skyrl.backends.skyrl_train.distributed.megatron.model_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('skyrl-loss-outputs-once', 'rlhf_patches.patches.skyrl.loss_outputs_once:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.3.0', modules=('skyrl.backends.skyrl_train.workers.worker_dispatch',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('skyrl-loss-outputs-packed', 'rlhf_patches.patches.skyrl.loss_outputs_packed:PATCH', (
        ListedVariant(distribution='skyrl', versions='==0.3.0', modules=('skyrl.backends.skyrl_train.workers.worker', 'skyrl.backends.skyrl_train.workers.megatron.megatron_worker'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('skyrl-rollout-temperature', 'rlhf_patches.patches.skyrl.rollout_temperature:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<0.3.0', modules=('skyrl.backends.skyrl_train.inference_servers.utils', 'skyrl.train.entrypoints.main_base', 'skyrl.backends.skyrl_train_backend'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='skyrl', versions='>=0.3.0,<=0.4.0', modules=('skyrl.backends.skyrl_train.inference_servers.utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since 0.1.0, with a temperature other than 1, importance ratios between trainer and rollout were off by\np(token; temperature T) / p(token; temperature 1): with T below 1 far above 1 for likely tokens and near 0 for unlikely\nones, so that clipping and masks of off_policy_correction acted on that. With the patch they are near 1 where the\nweights are the same. A run with such a correction trains on other weights of its tokens from then on; bounds that were\ntuned to the old ratios should be looked at again. Checkpoints can be trained on.'),
    Listed('skyrl-sequence-parallel-logits', 'rlhf_patches.patches.skyrl.sequence_parallel_logits:PATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0,<=0.4.0', modules=('skyrl.backends.skyrl_train.distributed.megatron.megatron_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('skyrl-watch-rollouts', 'rlhf_patches.patches.skyrl.watch_rollouts:WATCH', (
        ListedVariant(distribution='skyrl', versions='>=0.1.0', modules=('skyrl.train.trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None, watches=True),
    Listed('slime-async-dropped-groups', 'rlhf_patches.patches.slime.async_groups:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.3.0,<=0.3.1', modules=('slime.rollout.fully_async_rollout',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), '0.3.0 and 0.3.1 trained on a choice of what was ready, those of the earliest prompts, and lost the others. With the\npatch a run takes more steps for an epoch, each sooner, and on groups that have waited in the queue: where far more are\nsampled at once than a step takes (`--sglang-server-concurrency` times the engines against `--rollout-batch-size`), they\nwere sampled by the weights of as many steps before as it holds batches. Lower `--sglang-server-concurrency` where that\nis too many. Checkpoints can be trained on.'),
    Listed('slime-context-parallel-whitening', 'rlhf_patches.patches.slime.context_parallel_whitening:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.3.1', modules=('slime.backends.megatron_utils.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'From 0.2.0 to 0.3.1 a run with `--normalize-advantages` under context parallelism had advantages with another shift and\nscale on each part of the sequences: on a small batch of two context-parallel ranks up to 0.67 off, and 11 of 63 had\nanother sign. With the patch they are those of a run without context parallelism. A learning rate that was tuned with it\nshould be looked at again; checkpoints can be trained on.'),
    Listed('slime-eps-clip-c', 'rlhf_patches.patches.slime.eps_clip_c:PATCH', (
        ListedVariant(distribution='slime', versions='==0.0.1', modules=('slime.backends.megatron_utils.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.3.1', modules=('slime.backends.megatron_utils.loss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Every release up to 0.3.1 has ignored --eps-clip-c. A run that was started with it has been trained on PPO's loss\nwithout that bound, and with the patch is trained on the one it asked for; to go on as before, leave the option out.\nCheckpoints can be trained on."),
    Listed('slime-linear-attention-gradient', 'rlhf_patches.patches.slime.linear_attention_gradient:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.3.1', modules=('slime_plugins.models.hf_attention',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "In v0.2.0 to v0.2.3, with sequence parallelism, the gradient of everything before a layer of linear attention had a part\nthat was TP times too large, and products of it over the layers. From v0.2.4 to 0.3.1, with context parallelism, it\nlacks what goes back to other ranks' tokens: in a test it was 0.45 of its norm off on one of two ranks, and 0.26 on the\nother. With the patch it is that of one rank. A learning rate that was tuned with it should be looked at again;\ncheckpoints can be trained on."),
    Listed('slime-logprob-entropy', 'rlhf_patches.patches.slime.logprob_entropy:PATCH', (
        ListedVariant(distribution='slime', versions='==0.0.1', modules=('slime.utils.ppo_utils', 'slime.backends.megatron_utils.loss'), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.2.1', modules=('slime.utils.ppo_utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='slime', versions='>=0.2.2,<=0.3.0', modules=('slime.utils.ppo_utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='slime', versions='==0.3.1', modules=('slime.utils.ppo_utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('slime-no-sync-reentry', 'rlhf_patches.patches.slime.no_sync_reentry:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.0.1,<=0.3.1', modules=('slime.backends.megatron_utils.model',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('slime-partial-rollout-budget', 'rlhf_patches.patches.slime.partial_budget:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.3.0,<=0.3.1', modules=('slime.rollout.sglang_rollout', 'slime.rollout.sglang_streaming_rollout'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'In 0.3.0 and 0.3.1 a sample that was aborted could be longer than --rollout-max-response-len, and was trained on and\nrewarded so. With the patch it is truncated there, as it was until 0.2.4. A run that has learned to answer at that\nlength loses the reward of those answers: raise --rollout-max-response-len where they are wanted. Checkpoints can be\ntrained on.'),
    Listed('slime-uneven-groups', 'rlhf_patches.patches.slime.uneven_groups:PATCH', (
        ListedVariant(distribution='slime', versions='>=0.2.0,<=0.3.1', modules=('slime.ray.rollout',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since 0.2.0 slime has normalised rewards over the whole batch wherever prompts had different numbers of samples: easy\nprompts were reinforced as such, hard ones discouraged, and advantages had the scale of the spread between prompts. With\nthe patch they are relative to their own prompt. A run of that kind should have its learning rate looked at again; its\ncheckpoints can be trained on.'),
    Listed('slime-watch-rollouts', 'rlhf_patches.patches.slime.watch_rollouts:WATCH', (
        ListedVariant(distribution='slime', versions='>=0.2.2', modules=('slime.utils.logging_utils', 'slime.ray.rollout'), independent=True, rewrites=False, may_be_missing='main, which still calls itself 0.3.1, logs elsewhere', is_advice=False, beside=None),
    ), None, watches=True),
    Listed('swift-async-rollout-lora', 'rlhf_patches.patches.swift.async_rollout_lora:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.10.0,<4.0.0', modules=('swift.llm.infer.infer_engine.vllm_engine', 'swift.llm.infer.infer_engine.grpo_vllm_engine'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.5.0', modules=('swift.infer_engine.vllm_engine', 'swift.infer_engine.grpo_vllm_engine'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since ms-swift 3.10.0 asynchronous rollouts with `vllm_enable_lora` were samples of the base model, so GRPO trained off\npolicy, ever further. With the patch they are samples of the policy. An adapter that was trained so should be trained\nagain.'),
    Listed('swift-fp32-gradients', 'rlhf_patches.patches.swift.fp32_gradients:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.3.2', modules=('swift.megatron.utils.megatron_lm_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "ms-swift 4.0.0 to 4.3.1 added up Megatron's gradients in bfloat16: each is off by some 1 % at 64 micro-batches, at\nrandom and towards less. With the patch sums are exact to float32. Checkpoints can be trained on, and no learning rate\ndepends on it; memory does, by 2 bytes for each trainable parameter: a run that only just fits can go on as before with\n`--main_grads_dtype bf16`, which needs `--use_precision_aware_optimizer true`."),
    Listed('swift-grpo-loss-scale', 'rlhf_patches.patches.swift.grpo_loss_scale:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.11.0,<4.0.0', modules=('swift.trainers.rlhf_trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.6.0', modules=('swift.rlhf_trainers.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "since ms-swift 3.11.0 loss and gradient of `dapo`, `cispo` and `fipo` were too small by the number of accumulation\nsteps. With Adam alone that changes little; gradient clipping, the weight of CHORD's and SDAR's losses, weight decay\ncoupled to the gradient, and optimizers that are not scale-free do change. A run whose `max_grad_norm`,\n`chord_mu_*` or `sdar_loss_coef` was tuned with it wants the norm multiplied, and the weight of the other loss divided,\nby the number of accumulation steps to go on as before. Runs without accumulation do not change."),
    Listed('swift-kto-sequence-parallel', 'rlhf_patches.patches.swift.kto_sequence_parallel:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.9.0,<3.12.3', modules=('swift.megatron.trainers.kto_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('swift-linear-attention-gradient', 'rlhf_patches.patches.swift.linear_attention_gradient:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.9.0,<3.12.4', modules=('swift.megatron.model.gpt.qwen3_next',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=3.12.4,<4.0.0', modules=('swift.megatron.model.gpt.qwen3_next',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.1.0', modules=('swift.megatron.model.gpts.qwen3_next', 'swift.megatron.model.mm_gpts.qwen3_5'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "From 3.9.0 to 3.12.3 everything before a layer of linear attention had a part of its gradient multiplied by TP, which\nadds up over the layers; from 3.12.4 to 4.0.4 these layers' own weights had 1 / TP of theirs. With the patch all is as\nwith TP of 1. A learning rate, or a clipping, that was tuned with it should be looked at again."),
    Listed('swift-logprob-entropy', 'rlhf_patches.patches.swift.logprob_entropy:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=4.5.3,<=4.6.0', modules=('swift.megatron.trainers.vocab_parallel_utils',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('swift-lora-counted-twice', 'rlhf_patches.patches.swift.lora_counted_twice:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.10.0,<3.12.0', modules=('swift.trainers.rlhf_trainer.rollout_mixin',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=3.12.0,<3.12.1', modules=('swift.trainers.rlhf_trainer.rollout_mixin',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=3.12.1,<4.0.0', modules=('swift.trainers.rlhf_trainer.rollout_mixin',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.0.2', modules=('swift.rlhf_trainers.rollout_mixin',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since ms-swift 3.10.0 a run with `vllm_enable_lora` that was resumed, or began with an adapter, sampled with that\nadapter's change counted twice. With the patch it samples from the policy. What was trained after such a resume should\nbe trained again from there."),
    Listed('swift-megatron-dpo-loss-type', 'rlhf_patches.patches.swift.megatron_dpo_loss_type:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.7.0,<=4.6.0', modules=('swift.megatron.trainers.dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Megatron DPO has minimised the sigmoid loss whatever `--loss_type` said, since ms-swift 3.7.0. A run with another loss\nwas a run with `sigmoid`: its checkpoint is DPO's, and a `beta` or learning rate that was tuned with it belongs to that\nloss (IPO and hinge want others). To go on as before, set `--loss_type sigmoid`. Runs with `sigmoid` do not change."),
    Listed('swift-megatron-grpo-mask', 'rlhf_patches.patches.swift.megatron_grpo_mask:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.11.0,<3.12.0', modules=('swift.megatron.trainers.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=3.12.0,<4.0.0', modules=('swift.megatron.trainers.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.0.3', modules=('swift.megatron.trainers.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Megatron GRPO has not trained the first token of any completion or turn since ms-swift 3.11.0, and importance weights\nbetween rollout and trainer (`--rollout_importance_sampling_mode`) were those of neighbouring tokens. With the patch\nlosses and gradients are those of the completion; a threshold that was tuned for these weights is to be tuned anew.'),
    Listed('swift-no-sync-reentry', 'rlhf_patches.patches.swift.no_sync_reentry:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.3.0', modules=('swift.megatron.trainers.base',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.3.0,<=4.6.0', modules=('swift.megatron.trainers.base',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('swift-null-ref-context', 'rlhf_patches.patches.swift.null_ref_context:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.7.0,<3.9.0', modules=('swift.megatron.trainers.dpo_trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=3.9.0,<=4.6.0', modules=('swift.megatron.trainers.rlhf_mixin',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('swift-null-ref-context-hf', 'rlhf_patches.patches.swift.null_ref_context:PATCH_HF', (
        ListedVariant(distribution='ms-swift', versions='>=3.8.0,<4.0.0', modules=('swift.trainers.rlhf_trainer.grpo_trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.0.3', modules=('swift.rlhf_trainers.grpo_trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.3,<4.4.0', modules=('swift.rlhf_trainers.grpo_trainer', 'swift.rlhf_trainers.dpo_trainer'), independent=True, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.4.0,<=4.6.0', modules=('swift.rlhf_trainers.rlhf_mixin',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('swift-rollout-update-failed', 'rlhf_patches.patches.swift.rollout_update_failed:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.10.0,<4.0.0', modules=('swift.llm.infer.rollout',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<=4.6.0', modules=('swift.pipelines.infer.rollout',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('swift-rollout-worker-seed', 'rlhf_patches.patches.swift.rollout_worker_seed:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.5.0,<3.7.0', modules=('swift.llm.infer.rollout',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=3.7.0,<3.12.3', modules=('swift.llm.infer.rollout',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since ms-swift 3.5.0 the rollout server's data-parallel workers drew the same random numbers, so the samples of a group\ncould be copies of each other. With the patch they differ; a run that was trained with copies had smaller groups than\nit said."),
    Listed('swift-sampler-tail', 'rlhf_patches.patches.swift.sampler_tail:PATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.3.0,<3.12.0', modules=('swift.llm.data_loader',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=3.12.0,<4.0.0', modules=('swift.llm.data_loader',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<=4.6.0', modules=('swift.dataloader.shard',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'since ms-swift 3.3.0 the last samples of a data set, less than the number of data-parallel ranks, were never trained\non. With the patch, and where the ranks do not divide the data set, an epoch has another order, a sample more for each\nrank, and so perhaps a step more, to which learning rate schedules are fitted. A run that is resumed within an epoch\nskips as many batches of the new order: finish that epoch with `RLHF_PATCHES_DISABLE=swift-sampler-tail`, or resume\nfrom a checkpoint at the end of an epoch. Nothing else that was trained before has to be repeated.'),
    Listed('swift-grpo-trl', 'rlhf_patches.patches.swift.trl_samplers:ADVICE_GRPO', (
        ListedVariant(distribution='ms-swift', versions='>=3.4.0,<4', modules=('swift.trainers.rlhf_trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='trl', versions='>=0.14.0,<0.17.0', package='trl')),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<=4.6.0', modules=('swift.rlhf_trainers.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='trl', versions='>=0.14.0,<0.17.0', package='trl')),
    ), None),
    Listed('swift-gkd-trl', 'rlhf_patches.patches.swift.trl_samplers:ADVICE_GKD', (
        ListedVariant(distribution='ms-swift', versions='>=4.2.0,<=4.6.0', modules=('swift.rlhf_trainers.gkd_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='trl', versions='>=0.13.0,<0.22.0', package='trl')),
    ), None),
    Listed('swift-vocab-parallel-logprob-gradient', 'rlhf_patches.patches.swift.vocab_parallel_logprob_gradient:PATCH', (
        ListedVariant(distribution='ms-swift', versions='==3.12.0', modules=('swift.megatron.trainers.gkd_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=3.12.1,<4.5.3', modules=('swift.megatron.trainers.vocab_parallel_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'the gradient of GRPO and GKD under tensor parallelism was wrong, by about half of its norm on two ranks, while losses\nand log-probabilities were right: GKD since ms-swift 3.12.0, GRPO since 3.12.1 with entropies and since 4.0.3 always.\nA run that was trained with it followed another direction with another norm: take its learning rate, clipping and KL\ncoefficient as untuned, and rather start again from the checkpoint before RL than go on from it. Runs without tensor\nparallelism, DPO, KTO and SFT were right.'),
    Listed('swift-watch-rollouts', 'rlhf_patches.patches.swift.watch_rollouts:WATCH', (
        ListedVariant(distribution='ms-swift', versions='>=3.11.0,<4.0.0', modules=('swift.trainers.rlhf_trainer.grpo_trainer', 'swift.trainers.rlhf_trainer.rollout_mixin'), independent=True, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.0.0,<4.4.0', modules=('swift.rlhf_trainers.grpo_trainer', 'swift.rlhf_trainers.rollout_mixin', 'swift.megatron.trainers.base'), independent=True, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='ms-swift', versions='>=4.4.0', modules=('swift.rlhf_trainers.grpo_trainer', 'swift.rlhf_trainers.rollout_mixin', 'swift.megatron.trainers.base'), independent=True, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None, watches=True),
    Listed('torch-stale-build-lock', 'rlhf_patches.patches.torch.stale_build_lock:PATCH', (
        ListedVariant(distribution='torch', versions='>=1.0.0,<2.14.0', modules=('torch.utils.cpp_extension',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('transformer-engine-cross-entropy-backward', 'rlhf_patches.patches.transformer_engine.cross_entropy_backward:PATCH', (
        ListedVariant(distribution='transformer-engine', versions='>=2.2.0,<2.8.0', modules=('transformer_engine.pytorch.triton.cross_entropy',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformer-engine', versions='>=2.8.0,<2.11.0', modules=('transformer_engine.pytorch.triton.cross_entropy',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'TransformerEngine 2.2.0 to 2.7.0 gave every token the weight of the first one in its gradient, and 2.8.0 to 2.10.0 those\nof other tokens where a micro batch had more than one sequence. A run trained so with the fused cross-entropy of\nTransformerEngine has seen another loss than the one it logged, or none: start it again, or at least look for the norm\nof its gradients, and choose the learning rate and the clipping anew.'),
    Listed('transformers-accumulation-scale', 'rlhf_patches.patches.transformers.accumulation_scale:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.48.1,<4.49.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=4.49.0,<4.53.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=4.53.0,<5.2.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.2.0,<5.19.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.19.0,<=5.24.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'T5, BERT, classifiers and the like were trained on a gradient that was multiplied with the accumulation steps and the\nranks (since 4.54.0 or 5.0.0), causal LMs in 5.2.0 to 5.5.3 on one that was divided by the accumulation steps. With the\npatch both have the size that one large batch gives. With Adam the learning rate means what it did, but where\n`max_grad_norm` cut the larger gradient off, or epsilon counts; with SGD it has to be that many times larger (smaller\nfor what 5.2.0 to 5.5.3 trained). Look at clipping and learning rate again in a run that was tuned with it; checkpoints\ncan be trained on.'),
    Listed('transformers-eval-loss-ranks', 'rlhf_patches.patches.transformers.eval_loss:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.46.2,<4.49.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=4.57.0,<5.23.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.23.0,<=5.24.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since 4.57.0 (with `average_tokens_across_devices=True` from 4.46.2 to 4.48.3) `eval_loss` on several ranks has been up\nto as many times too large as there are ranks: that many times for models that do not use `num_items_in_batch`, and for\ncausal language models by what the last step weighs. With the patch it is what one rank has. Do not compare it with\nvalues that were logged without it, and choose thresholds for it anew (early stopping). What was trained is right; which\ncheckpoint was kept as the best may not be.'),
    Listed('transformers-first-token-count', 'rlhf_patches.patches.transformers.first_token_count:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.10.1,<=5.24.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'GPT-2 and the others were trained on a gradient that was smaller by the share of first tokens, where these count: since\n4.46.2, with the patch in 5.10.1 to 5.23.0 no more. It is 0.1 percent for rows of 1024 tokens, and Adam hides a factor\nthat is the same in each step. With rows of few tokens look at clipping and learning rate again.'),
    Listed('transformers-moe-aux-loss', 'rlhf_patches.patches.transformers.moe_aux_loss:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.46.2,<=5.24.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since 4.54.0 (with `average_tokens_across_devices=True` since 4.46.2) the router's auxiliary loss has counted as many\ntimes as there are data-parallel ranks. With the patch it counts once. A run that was tuned with it keeps its balance\nwith `router_aux_loss_coef` multiplied by its number of ranks."),
    Listed('transformers-packed-documents', 'rlhf_patches.patches.transformers.packed_documents:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.55.0,<=4.57.6', modules=('transformers.models.gpt_oss.modeling_gpt_oss',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.0.0rc0,<5.2.0', modules=('transformers.models.gpt_oss.modeling_gpt_oss', 'transformers.models.afmoe.modeling_afmoe'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.2.0,<5.4.0', modules=('transformers.models.gpt_oss.modeling_gpt_oss', 'transformers.models.afmoe.modeling_afmoe'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.4.0,<5.24.0', modules=('transformers.models.gpt_oss.modeling_gpt_oss', 'transformers.models.afmoe.modeling_afmoe'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.24.0,<=5.24.0', modules=('transformers.models.gpt_oss.modeling_gpt_oss', 'transformers.models.afmoe.modeling_afmoe'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'The loss of packed gpt-oss and AFMoE is that of its documents: lower or higher by a percent or so. Checkpoints trained\nwith the bug have learnt to read documents after others; evaluation on single documents was not affected.'),
    Listed('transformers-resume-dispatched', 'rlhf_patches.patches.transformers.resume_dispatched:PATCH', (
        ListedVariant(distribution='transformers', versions='>=5.0.0rc0,<5.3.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.3.0,<=5.24.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('transformers-resume-weights', 'rlhf_patches.patches.transformers.resume_weights:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.52.0,<=4.57.6', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='transformers', versions='>=5.0.0rc1,<=5.24.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since 5.0.0 a mixture of experts that was resumed, or whose best checkpoint was loaded at the end, has had the experts\nand routers that it was built with or those of the last step; since 4.52.0 a vision-language model most of its weights.\nWith the patch these are the checkpoint's. Resume from the checkpoint before the first such stop; a best model that was\nsaved at the end is in its checkpoint's folder."),
    Listed('transformers-smoothed-labels', 'rlhf_patches.patches.transformers.smoothed_labels:PATCH', (
        ListedVariant(distribution='transformers', versions='>=4.45.2,<=5.24.0', modules=('transformers.trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'With `label_smoothing_factor` and `torch_compile`, FSDP2 or prefix tuning, a causal language model was trained to repeat\nits input. With the patch it is trained to predict the next token. Nothing of such a run can be kept: start it again\nfrom the weights before it.'),
    Listed('trl-chunked-divergence-zero3', 'rlhf_patches.patches.trl.chunked_divergence_zero3:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.10.0,<1.15.0', modules=('trl.trainer.distillation_trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('trl-chunked-nll-zero3', 'rlhf_patches.patches.trl.chunked_nll_zero3:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.4.0,<1.15.0', modules=('trl.trainer.sft_trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('trl-distillation-scale', 'rlhf_patches.patches.trl.distillation_scale:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.25.0,<1.7.0', modules=('trl.experimental.gold.gold_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=1.7.0,<=1.16.0', modules=('trl.experimental.gkd.gkd_trainer', 'trl.experimental.gold.gold_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'With A `gradient_accumulation_steps` and N ranks, GKD trained on gradients 1 / N times their size since TRL 1.7.0, GOLD\non 1 / (A N), and on A times with `use_uld_loss` or before 1.7.0. With the patch they have their size, and so has the\nloss in the log. A run that was tuned with it should have its clipping threshold multiplied by what the gradient is now\nlarger, and with SGD its learning rate divided by that; Adam sees the factor in clipping and in its epsilon only. Take a\ncorrection of your own out.'),
    Listed('trl-dpo-liger-label-smoothing', 'rlhf_patches.patches.trl.dpo_liger_label_smoothing:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.19.0,<0.22.0', modules=('trl.trainer.dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=None),
        ListedVariant(distribution='trl', versions='>=0.22.0,<0.29.0', modules=('trl.trainer.dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=None),
    ), None),
    Listed('trl-dpo-liger-settings', 'rlhf_patches.patches.trl.dpo_liger_settings:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.29.0,<1.13.0', modules=('trl.trainer.dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='liger-kernel', versions='>=0.8.1,<=0.8.5', package='liger_kernel')),
    ), 'Since TRL 0.29.0 with Liger 0.8.1 and later, DPO with Liger trained `robust` as if no preference were flipped, which is\n`sigmoid`, and `discopop` with its default temperature. With the patch it is what was asked for, and hardly anything of\nsuch a run carries over: of `robust` gradients are larger, the more so the more pairs disagree with their labels.'),
    Listed('trl-dpo-second-eos', 'rlhf_patches.patches.trl.dpo_second_eos:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.14.0,<0.27.2', modules=('trl.trainer.dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since TRL 0.14.0 at the latest, DPO on conversations had one token more in each answer. With the patch log-probabilities\nand rewards of answers in the log are without it. A model that was trained with it may be trained on. A chat template\nthat writes no end after the assistant's answer had its one end from the trainer, and has none with the patch, as with\nTRL 0.27.2: let the template write it, or switch this patch off."),
    Listed('trl-dpo-vision-mapping', 'rlhf_patches.patches.trl.dpo_vision_mapping:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.9.6,<=0.22.2', modules=('trl.trainer.dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=5.0.0rc3,<=5.24.0', package='transformers')),
    ), None),
    Listed('trl-grpo-dapo-scale', 'rlhf_patches.patches.trl.grpo_dapo_scale:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.22.0,<1.9.1', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.22.0, GRPO with a dapo, cispo or vespo loss, S `steps_per_generation` and A `gradient_accumulation_steps`\nother than S, trained on gradients A / S times their size, and logged their norms so. With the patch they have their\nsize. A run that was tuned with it should have its clipping threshold multiplied by S / A, and with SGD its learning\nrate by A / S; Adam sees the factor in clipping and in its epsilon only.'),
    Listed('trl-grpo-liger-tools', 'rlhf_patches.patches.trl.grpo_liger_tools:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.29.0', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "Since TRL 0.26.0, GRPO with Liger and tools trained on what the tools returned, and divided by the number of these\ntokens too. With the patch loss, gradient norm and KL divergence are of the model's own tokens, and not to be compared\nwith those before."),
    Listed('trl-grpo-tool-overflow', 'rlhf_patches.patches.trl.grpo_tool_overflow:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.26.0,<1.2.0', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('trl-grpo-tool-ranks', 'rlhf_patches.patches.trl.grpo_tool_together:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.29.1,<1.1.0', modules=('trl.trainer.grpo_trainer', 'trl.generation.vllm_generation'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=1.1.0,<=1.16.0', modules=('trl.trainer.grpo_trainer', 'trl.generation.vllm_generation'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 1.0.0, GRPO with tools and a vLLM server trained on several ranks mixed up conversations after a tool call. A\nrun that did not hang or fail has learned from such texts, and is not to be compared with one that has the patch.'),
    Listed('trl-grpo-tool-turns', 'rlhf_patches.patches.trl.grpo_tool_turns:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.0.0,<1.2.0', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=1.2.0,<1.14.1', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 1.0.0, GRPO with tools on a vLLM server trained on conversations whose turns after the first tool call were\nmostly those of others. Runs with the patch are not to be compared with those before; a policy that was trained so may\nhave learned to answer without its tools.'),
    Listed('trl-grpo-truncated-count', 'rlhf_patches.patches.trl.grpo_truncated_count:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.22.0,<0.26.0', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.28.0', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.28.0,<1.9.0', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.22.0, GRPO with `mask_truncated_completions` and a dapo, cispo or vespo loss trained on gradients that were\ntoo small by the share of tokens in truncated completions, another one for each batch, and logged loss and norm so. With\nthe patch batches weigh alike. A run that was tuned with it may want a lower learning rate or clipping threshold, by as\nmuch as that share was on average.'),
    Listed('trl-guided-decoding', 'rlhf_patches.patches.trl.guided_decoding:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.16.0,<=0.17.0', modules=('trl.scripts.vllm_serve',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='vllm', versions='>=0.12.0,<=0.33.0', package='vllm')),
        ListedVariant(distribution='trl', versions='>=0.18.0,<=0.26.2', modules=('trl.scripts.vllm_serve', 'trl.trainer.grpo_trainer'), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='vllm', versions='>=0.12.0,<=0.33.0', package='vllm')),
    ), None),
    Listed('trl-kto-liger-reference', 'rlhf_patches.patches.trl.kto_liger_reference:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.8.0,<1.13.0', modules=('trl.trainer.kto_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 1.8.0, KTO with Liger and PEFT trained against no reference at all. Gradients are larger with the patch, by\nthe saturation of a sigmoid: some thousand times for answers of some hundred tokens. A learning rate that was raised to\nmake up for it should be put back, and such a run begun again.'),
    Listed('trl-metrics-deadlock', 'rlhf_patches.patches.trl.metrics_deadlock:PATCH', (
        ListedVariant(distribution='trl', versions='>=1.0.0rc1,<1.14.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('trl-online-dpo-accumulation', 'rlhf_patches.patches.trl.online_dpo_accumulation:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.12.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer', 'trl.trainer.nash_md_trainer', 'trl.trainer.xpo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.26.0,<1.14.0', modules=('trl.experimental.online_dpo.online_dpo_trainer', 'trl.experimental.nash_md.nash_md_trainer', 'trl.experimental.xpo.xpo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=1.14.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since transformers 4.46.2, but not with 5.2.0 to 5.5.3, Online DPO, Nash-MD and XPO without DeepSpeed trained on\ngradients `gradient_accumulation_steps` times their size, and logged their norms so. With the patch they have their\nsize. A run that was tuned with it should have its clipping threshold divided by that number, and with SGD its learning\nrate multiplied by it; Adam sees the factor in clipping and in its epsilon only. Take a correction of your own out.'),
    Listed('trl-online-dpo-server', 'rlhf_patches.patches.trl.online_dpo_engine:PATCH_SERVER', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.26.0,<1.8.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.26.0 Online DPO with a vLLM server was trained on single tokens. Nothing of such a run carries over.'),
    Listed('trl-online-dpo-server-padding', 'rlhf_patches.patches.trl.online_dpo_engine:PATCH_PADDING', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.26.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.26.0 Online DPO with a vLLM server computed log-probabilities after padding wherever prompts had several\nlengths. With the patch they are those that vLLM samples from. The first gradients differ by a few percent or more, by\nhow much padding there was; a model that was trained so has learnt to answer after it.'),
    Listed('trl-online-dpo-sleep-weights', 'rlhf_patches.patches.trl.online_dpo_engine:PATCH_SLEEP', (
        ListedVariant(distribution='trl', versions='>=0.28.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.28.0 with sleep mode and accumulation, Online DPO was trained on completions of no model, in all\nmicro-batches of a step but one. Such a run has to be repeated.'),
    Listed('trl-online-dpo-tensor-parallel', 'rlhf_patches.patches.trl.online_dpo_engine:PATCH_TOGETHER', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.26.0,<=1.16.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.23.0 Online DPO on an engine of several ranks was trained on completions of a mixture of prompts. Such a run\nhas to be repeated.'),
    Listed('trl-optional-packages', 'rlhf_patches.patches.trl.optional_packages:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.14.0,<0.16.0', modules=('trl.import_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.16.0,<0.17.0', modules=('trl.import_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.17.0,<0.18.0', modules=('trl.import_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.18.0,<0.24.0', modules=('trl.import_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.24.0,<0.26.0', modules=('trl.import_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.27.0', modules=('trl.import_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.27.0,<0.29.0', modules=('trl.import_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.3.0,<=5.24.0', package='transformers')),
    ), None),
    Listed('trl-resume-order', 'rlhf_patches.patches.trl.resume_order:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.17.0,<0.22.0', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.22.0,<=1.16.0', modules=('trl.trainer.utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('trl-sft-first-label', 'rlhf_patches.patches.trl.sft_first_label:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.19.0,<0.22.2', modules=('trl.trainer.sft_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.22.2,<0.23.1', modules=('trl.trainer.sft_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.19.0 SFT with FlashAttention, and padding_free or packing, trained one wrong target for each document. With\nthe patch loss and gradient are means over other tokens, and not to be compared with those before; a run that is\nresumed goes on with them.'),
    Listed('trl-tokenizer-argument', 'rlhf_patches.patches.trl.tokenizer_argument:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.8.2,<=0.11.4', modules=('trl.trainer.sft_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.reward_trainer'), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=5.0.0rc0,<=5.24.0', package='transformers')),
    ), None),
    Listed('trl-grpo-train-sampler', 'rlhf_patches.patches.trl.train_sampler:ADVICE_GRPO', (
        ListedVariant(distribution='trl', versions='>=0.15.0,<=0.16.1', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=4.52.0,<=5.24.0', package='transformers')),
    ), None),
    Listed('trl-kto-train-sampler', 'rlhf_patches.patches.trl.train_sampler:ADVICE_KTO', (
        ListedVariant(distribution='trl', versions='>=0.8.0,<=0.9.6', modules=('trl.trainer.kto_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=4.52.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.10.1,<=0.17.0', modules=('trl.trainer.kto_trainer', 'trl.trainer.bco_trainer'), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=4.52.0,<=5.24.0', package='transformers')),
    ), None),
    Listed('trl-trainer-overrides', 'rlhf_patches.patches.trl.trainer_overrides:ADVICE', (
        ListedVariant(distribution='trl', versions='>=0.8.2,<=0.11.4', modules=('trl.trainer.dpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.cpo_trainer'), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=4.46.0,<5.0.0rc0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.12.0,<=0.12.2', modules=('trl.trainer.dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.kto_trainer'), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=4.47.0,<5.0.0rc0', package='transformers')),
    ), None),
    Listed('trl-vllm-nan-logprob', 'rlhf_patches.patches.trl.vllm_nan_logprob:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.27.1,<1.11.0', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('trl-vllm-raw-logprobs', 'rlhf_patches.patches.trl.vllm_raw_logprobs:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.24.0', modules=('trl.scripts.vllm_serve', 'trl.trainer.grpo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.24.0,<0.27.1', modules=('trl.scripts.vllm_serve',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.23.0 GRPO on a vLLM server has weighted tokens by a ratio that holds the temperature once, not by that of\ntwo policies. With the patch ratios are about 1 where trainer and vLLM have the same weights, so the gradient is that of\nGRPO; runs at another temperature than 1 are not to be compared with those before.'),
    Listed('trl-vllm-serve-dead-worker', 'rlhf_patches.patches.trl.vllm_serve_dead_worker:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.17.0,<1.11.0', modules=('trl.scripts.vllm_serve',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('trl-vllm-sleep-weights', 'rlhf_patches.patches.trl.vllm_sleep_weights:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.25.0,<0.26.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.28.0', modules=('trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer', 'trl.experimental.openenv.utils'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.28.0,<0.29.0', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer', 'trl.experimental.openenv.utils'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.29.0,<=0.29.1', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer', 'trl.experimental.openenv.utils'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=1.0.0rc1,<1.9.0', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer', 'trl.experimental.openenv.utils', 'trl.experimental.dppo.dppo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=1.9.0,<1.10.0', modules=('trl.generation.vllm_generation', 'trl.trainer.grpo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since TRL 0.25.0 with sleep mode at level 2, and for every completion since 0.28.0, GRPO and RLOO trained on samples\nfrom the initial model, so with an importance ratio that grows and is clipped or truncated. With the patch training is\non-policy. Of a run that was tuned without it hardly anything carries over.'),
    Listed('trl-warnings-issued', 'rlhf_patches.patches.trl.warnings_issued:PATCH', (
        ListedVariant(distribution='trl', versions='>=0.14.0,<0.22.0', modules=('trl.trainer.bco_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.online_dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.reward_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.22.0,<0.24.0', modules=('trl.trainer.bco_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.online_dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.reward_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.24.0,<0.25.0', modules=('trl.trainer.bco_trainer', 'trl.trainer.cpo_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.online_dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.rloo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.25.0,<0.26.0', modules=('trl.trainer.cpo_trainer', 'trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.kto_trainer', 'trl.trainer.online_dpo_trainer', 'trl.trainer.orpo_trainer', 'trl.trainer.rloo_trainer', 'trl.experimental.bco.bco_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
        ListedVariant(distribution='trl', versions='>=0.26.0,<0.27.2', modules=('trl.trainer.dpo_trainer', 'trl.trainer.grpo_trainer', 'trl.trainer.rloo_trainer', 'trl.experimental.bco.bco_trainer', 'trl.experimental.cpo.cpo_trainer', 'trl.experimental.kto.kto_trainer', 'trl.experimental.online_dpo.online_dpo_trainer', 'trl.experimental.orpo.orpo_trainer'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='transformers', versions='>=5.1.0,<=5.24.0', package='transformers')),
    ), None),
    Listed('trl-online-dpo-watch-rollouts', 'rlhf_patches.patches.trl.watch_online_dpo:WATCH', (
        ListedVariant(distribution='trl', versions='>=0.23.0,<0.26.0', modules=('trl.trainer.online_dpo_trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.26.0', modules=('trl.experimental.online_dpo.online_dpo_trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None, watches=True),
    Listed('trl-watch-rollouts', 'rlhf_patches.patches.trl.watch_rollouts:WATCH', (
        ListedVariant(distribution='trl', versions='>=0.25.0,<0.29.1', modules=('trl.trainer.grpo_trainer',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='trl', versions='>=0.29.1', modules=('trl.trainer.grpo_trainer', 'trl.generation.vllm_generation'), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None, watches=True),
    Listed('verl-critic-loss-scale', 'rlhf_patches.patches.verl.critic_loss_scale:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.0,<0.9.0', modules=('verl.workers.utils.losses', 'verl.trainer.ppo.core_algos'), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "with verl 0.8.0 (and 0.7.0, 0.7.1 with `trainer.use_legacy_worker_impl=disable`) the critic's gradient was multiplied by\nthe number of micro-batches per mini-batch and rank. With the patch it is smaller by that factor, and does not change\nwith the micro-batch size any more. Adam hides most of a constant factor, except where `critic.optim.clip_grad`, 1.0 by\ndefault, cut the larger gradient off: a run that was tuned with it should have the critic's clipping threshold and\nlearning rate looked at again. Checkpoints can be trained on."),
    Listed('verl-dr-grpo-length-bias', 'rlhf_patches.patches.verl.dr_grpo_length_bias:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<=0.9.1', modules=('verl.workers.engine_workers',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "with `seq-mean-token-sum-norm` and no `loss_scale_factor` in verl's default trainer, 0.9.0 and 0.9.1, or in\n`main_ppo_sync` of 0.8.0, each response was divided by the longest one of its micro-batch. With the patch all are\ndivided by `rollout.response_length`, as the older trainer does: the gradient is smaller, by this length over that of\nresponses as they are, and long responses weigh as much by the token as short ones. Look at learning rate and\n`actor.optim.clip_grad` again. Checkpoints can be trained on."),
    Listed('verl-fp32-gradients', 'rlhf_patches.patches.verl.fp32_gradients:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.0,<=0.7.1', modules=('verl.utils.megatron_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.8.0,<=0.8.0', modules=('verl.utils.megatron_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.9.0,<0.9.1', modules=('verl.utils.megatron_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'verl 0.7.0 to 0.9.0 added up gradients in bfloat16 on Megatron-Bridge: each is off by some 1 % at 64 micro-batches, at\nrandom and towards less. With the patch sums are exact to float32. Checkpoints can be trained on, and no learning rate\ndepends on it; memory does, by 2 bytes for each trainable parameter: a run that only just fits can go on as before with\n`+actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=False`, and the same for a critic.'),
    Listed('verl-fused-logprob-contiguity', 'rlhf_patches.patches.verl.fused_logprob_contiguity:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.4.0,<0.9.0', modules=('verl.utils.experimental.torch_functional',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'With the fused log-probability on hidden states that are not contiguous, verl 0.4.0 to 0.8.0 trained `lm_head` alone.\nWith the patch the whole model is trained. Such a run should be begun again.'),
    Listed('verl-gdpo-whitening', 'rlhf_patches.patches.verl.gdpo_whitening:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.1,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "with verl 0.7.1 to 0.9.1, GDPO's advantages were normalised with each response counted as often as it is long. With the\npatch each counts once: advantages are shifted and scaled, the more, the more rewards and lengths go together; where all\nare of one length, only by the difference between n and n - 1 responses. A run that was tuned with it can be trained on;\nits learning rate and clipping were tuned for the other scale.", "the authors' own code normalises over tokens as verl does, and pull request #6497 is open"),
    Listed('verl-gmpo-micro-batches', 'rlhf_patches.patches.verl.gmpo_micro_batches:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.0,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "with GMPO on verl's engines, 0.7.0 to 0.9.1, the policy's gradient was multiplied by the number of micro-batches per\nmini-batch and rank. With the patch it is smaller by that factor, and does not change with the micro-batch size any\nmore. Adam hides most of a constant factor, except where `actor.optim.clip_grad`, 1.0 by default, cut the larger\ngradient off, and beside a KL or entropy term, which had its right size: a run that was tuned with it should have\nclipping, learning rate and these coefficients looked at again. Checkpoints can be trained on."),
    Listed('verl-logprob-entropy', 'rlhf_patches.patches.verl.logprob_entropy:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.1rc0,<=0.2.0.post2', modules=('verl.utils.megatron.tensor_parallel',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.3.0.post0,<=0.3.0.post1', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.actor.megatron_actor'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.4.0,<=0.5.0', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.actor.megatron_actor'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.6.0,<=0.6.1', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.actor.megatron_actor', 'verl.workers.engine.megatron.transformer_impl'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.7.0,<=0.7.1', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.actor.megatron_actor', 'verl.workers.engine.megatron.transformer_impl'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<=0.8.0', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.engine.megatron.transformer_impl'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.utils.megatron.tensor_parallel', 'verl.workers.engine.megatron.transformer_impl'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('verl-lora-buckets', 'rlhf_patches.patches.verl.lora_buckets:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.1,<0.9.0', modules=('verl.workers.rollout.vllm_rollout.utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'In verl 0.7.1 and 0.8.0 runs with an adapter larger than a bucket were trained on samples of another policy. With the\npatch they are on-policy. A run that is resumed goes on with samples of its own.'),
    Listed('verl-merged-lora', 'rlhf_patches.patches.verl.merged_lora:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.7.1,<0.9.0', modules=('verl.workers.engine.fsdp.transformer_impl',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since verl 0.7.1 runs with FSDP2 and `lora.merge=True` were trained on samples of the base model. With the patch they\nare on-policy. A run that is resumed goes on with samples of what it has learned.'),
    Listed('verl-no-sync-reentry', 'rlhf_patches.patches.verl.no_sync_reentry:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.1,<=0.9.1', modules=('verl.utils.megatron_utils',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), None),
    Listed('verl-padding-only-micro-batch', 'rlhf_patches.patches.verl.padding_only_micro_batch:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<0.9.0', modules=('verl.trainer.distillation.losses',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.trainer.distillation.losses',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "verl 0.8.0 alone: of each process the first micro-batch's distillation loss was averaged over that micro-batch, and of\neach further mini-batch the first one's with the token count of the mini-batch before. With the patch all are averaged\nover their own mini-batch. Where mini-batches have much the same numbers of tokens, that is one too large step at the\nstart; a run can be trained on. 0.9.0 and 0.9.1 change in their metrics only."),
    Listed('verl-qwen2-vl-output', 'rlhf_patches.patches.verl.qwen2_vl_output:ADVICE', (
        ListedVariant(distribution='verl', versions='>=0.4.0,<=0.9.1', modules=('verl.models.transformers.qwen2_vl',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=5.23.0,<=5.24.0', package='transformers')),
    ), None),
    Listed('verl-reinforce-plus-plus-turns', 'rlhf_patches.patches.verl.reinforce_plus_plus_turns:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.4.0,<0.9.0', modules=('verl.trainer.ppo.core_algos',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "with verl 0.5.0 to 0.8.0, REINFORCE++ on trajectories with tools or several turns gave the outcome's reward to the last\nturn only, and whitened over all; up to 0.9.1 it gave it to none where a trajectory ends with another's token. With the\npatch every turn has it, and advantages of the last turn change as well, since mean and variance do. A run that was\ntrained with it learned its last turns: it can be trained on, and its learning rate and KL coefficient were tuned for\nanother signal. Trajectories of one turn are as before; with 0.9.0 and 0.9.1 so are all that end with the model's own\ntokens."),
    Listed('verl-replica-seed', 'rlhf_patches.patches.verl.replica_seed:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.0,<0.6.1', modules=('verl.workers.rollout.vllm_rollout.vllm_async_server',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.6.1,<0.7.1', modules=('verl.workers.rollout.vllm_rollout.vllm_async_server',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'From verl 0.6.0 to 0.7.0 samples on replicas other than the first are drawn anew with the patch: their distribution is\nthe same, and they depend less on each other. Runs with one replica keep their numbers.'),
    Listed('verl-reward-on-answer', 'rlhf_patches.patches.verl.reward_on_answer:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.5.0,<0.7.1', modules=('verl.trainer.ppo.core_algos',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.7.1,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), "with verl 0.5.0 to 0.9.1, GAE, ReMax and the optimal token baseline trained trajectories that end with a tool's or a\nuser's answer, or with a token that was rejected, as if their reward were 0. With the patch they have it, so advantages\nchange, by the whitening of GAE and the baseline of a group for other trajectories of the batch as well. A critic that\nwas trained with it expects too little of such trajectories, and learns the difference: the run can be trained on. Where\nall rewards are on tokens that count nothing changes."),
    Listed('verl-rloo-singletons', 'rlhf_patches.patches.verl.rloo_singletons:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.0,<=0.9.1', modules=('verl.trainer.ppo.core_algos',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'with verl 0.6.0 to 0.9.1, `rloo_vectorized` gave the advantage 0 to every response that was alone in its group. With the\npatch these have their reward, as with `rloo`. A run with `rollout.n=1` was not trained by its rewards at all; one that\nfilters responses gets larger gradients, by the responses that were left alone, and can be trained on.'),
    Listed('verl-rollout-seed', 'rlhf_patches.patches.verl.rollout_seed:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.9.0,<=0.9.1', modules=('verl.workers.rollout.vllm_rollout.vllm_async_server',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'With `rollout.full_determinism=True` runs of verl 0.9.0 and 0.9.1 trained on samples that were the same. With the patch\nthey are drawn anew, so a run can be repeated with the patch, and not with its numbers from before.'),
    Listed('verl-tool-separator', 'rlhf_patches.patches.verl.tool_separator:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.5.0,<0.6.0', modules=('verl.experimental.agent_loop.tool_agent_loop',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.6.0,<0.7.0', modules=('verl.experimental.agent_loop.tool_agent_loop',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.7.0,<=0.7.1', modules=('verl.experimental.agent_loop.tool_agent_loop',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<0.9.0', modules=('verl.experimental.agent_loop.tool_agent_loop',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=None),
    ), 'Since verl 0.5.0 multi-turn rollouts with tools missed one token at each border. With the patch conversations are those\nof the template, and rewards and losses change with them; of a policy that was trained without, the first steps are\nslightly off its distribution, as they are in 0.9.0.'),
    Listed('verl-trl-value-head', 'rlhf_patches.patches.verl.trl_value_head:PATCH', (
        ListedVariant(distribution='verl', versions='>=0.4.1,<=0.7.1', modules=('verl.utils.model', 'verl.models.transformers.monkey_patch'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='trl', versions='>=0.29.0,<=1.16.0', package='trl')),
        ListedVariant(distribution='verl', versions='>=0.8.0.dev0,<=0.9.0', modules=('verl.utils.model', 'verl.models.transformers.monkey_patch'), independent=True, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='trl', versions='>=0.29.0,<=1.16.0', package='trl')),
        ListedVariant(distribution='verl', versions='>=0.9.1,<=0.9.1', modules=('verl.models.transformers.monkey_patch',), independent=False, rewrites=True, may_be_missing=None, is_advice=False, beside=ListedBeside(distribution='trl', versions='>=1.13.0,<=1.16.0', package='trl')),
    ), None),
    Listed('verl-vision2seq', 'rlhf_patches.patches.verl.vision2seq:ADVICE', (
        ListedVariant(distribution='verl', versions='>=0.3.0.post0,<=0.5.0', modules=('verl.workers.fsdp_workers',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=5.0.0rc3,<=5.24.0', package='transformers')),
        ListedVariant(distribution='verl', versions='>=0.6.0,<=0.7.0', modules=('verl.utils.model',), independent=False, rewrites=True, may_be_missing=None, is_advice=True, beside=ListedBeside(distribution='transformers', versions='>=5.0.0rc3,<=5.24.0', package='transformers')),
    ), None),
    Listed('verl-watch-rollouts', 'rlhf_patches.patches.verl.watch_rollouts:WATCH', (
        ListedVariant(distribution='verl', versions='>=0.6.0,<0.8.0', modules=('verl.trainer.ppo.ray_trainer', 'verl.utils.tracking'), independent=True, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.8.0,<0.9.0', modules=('verl.trainer.ppo.ray_trainer', 'verl.trainer.main_ppo_sync', 'verl.utils.tracking'), independent=True, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
        ListedVariant(distribution='verl', versions='>=0.9.0', modules=('verl.trainer.ppo.ray_trainer', 'verl.trainer.ppo.v1.trainer_base', 'verl.utils.tracking'), independent=True, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None, watches=True),
    Listed('vllm-watch-requests', 'rlhf_patches.patches.vllm.watch_requests:WATCH', (
        ListedVariant(distribution='vllm', versions='>=0.7.3', modules=('vllm.v1.worker.gpu_worker',), independent=False, rewrites=False, may_be_missing=None, is_advice=False, beside=None),
    ), None, watches=True),
)
