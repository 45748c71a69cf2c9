"""When bugs bite, told from attributes: on what has them, and on what has not; test_proofs.py has real frameworks."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace as Has

import pytest

from rlhf_patches.patches import plugin

PATCHES = {patch.name: patch for patch in plugin.rlhf_patches() if getattr(patch, "conditions", ())}
PACKAGE = "rlhf_patches.patches"
GRPO = {"loss_type": "dapo", "mask_truncated_completions": True, "use_liger_kernel": False, "accelerator": Has()}


GPU = {"tensor_model_parallel_size": 2, "context_parallel_size": 1, "expert_model_parallel_size": 1}
ONE = {**GPU, "tensor_model_parallel_size": 1}
TOKENS = {"calculate_per_token_loss": True, "moe_z_loss_coeff": 1e-3, "moe_router_load_balancing_type": "aux_loss"}
HALF = {"moe_router_enable_expert_bias": True, "bf16": True, "fp16": False}
WINDOW = {"loss_type": "dapo", "model_accepts_loss_kwargs": False, "compute_loss_func": None, "accelerator": Has()}
GKD = {"average_tokens_across_devices": True, "use_liger_kernel": False}
FOUR = Has(gradient_accumulation_steps=4)


SKIPPING = Has(args=Has(ignore_data_skip=False))
RANKS = {"world_size": 2, "average_tokens_across_devices": True}


def of_module(name, *methods):
    """Something whose class is defined there, with methods of that module."""
    namespace = {"__name__": name}
    for method in methods:
        exec(f"def {method}(self): pass", namespace)
    return type("Defined", (), {"__module__": name, **{method: namespace[method] for method in methods}})()


LINEAR = of_module("megatron.core.extensions.transformer_engine")
LIGER_LOSS = of_module("liger_kernel.chunked_loss.grpo_loss", "forward")
LIGER = {"use_liger_kernel": True}
WARMUP = of_module("deepspeed.runtime.lr_schedules", "__init__")
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}


def online(steps, kind="NO", by_accelerate=1):
    """A trainer of Online DPO's."""
    accelerator = Has(distributed_type=kind, gradient_accumulation_steps=by_accelerate)
    return Has(args=Has(gradient_accumulation_steps=steps), accelerator=accelerator)


def offloaded(steps, last, **settings):
    """A ZeRO-2 optimizer that takes a gradient of a micro-batch, with its number, the last one of its step."""
    found = {"cpu_offload": True, "partition_gradients": True, "gradient_accumulation_steps": steps}
    return Has(**{**found, "micro_step_id": last, "is_gradient_accumulation_boundary": True, **settings})


def distilling(ranks=4, loss="trl.experimental.gkd.gkd_trainer", **settings):
    """A trainer of GKD's."""
    found = args(**{**GKD, **settings})
    return Has(**vars(found), accelerator=Has(num_processes=ranks), generalized_jsd_loss=of_module(loss))


def args(**settings):
    return Has(args=Has(**settings), model=Has(config=Has(output_router_logits=True), training=True))


def stepping(ranks, steps, by_accelerate, n_gpu=0):
    settings = Has(world_size=ranks, gradient_accumulation_steps=steps, n_gpu=n_gpu)
    return Has(args=settings, accelerator=Has(gradient_accumulation_steps=by_accelerate))


class Settings(dict):
    """As much of OmegaConf's as the predicates read."""

    __getattr__ = dict.__getitem__

    def _get_root(self):
        return self["root"]


def critic(mode="token-mean", rows=2, **numbers):
    """The critic's settings, and a micro-batch of those rows out of 8."""
    data = {"dp_size": 1, "batch_num_tokens": 9, "global_batch_size": 8, **numbers}
    return [Has(loss_agg_mode=mode), type("Data", (dict,), {"batch_size": [rows]})(data)]


def distilling_of_verl(mode="token-mean", rows=2, by_policy=None, **left):
    """The actor's settings with the numbers that are left in them, those of distillation, and a micro-batch."""
    loss = Has(use_policy_gradient=bool(by_policy), policy_loss_mode=by_policy)
    _, data = critic(rows=rows)
    return [Has(global_batch_info=left, loss_agg_mode=mode), Has(distillation_loss=loss), data]


def gmpo(rows, **numbers):
    return [Has(global_batch_info=numbers), [0] * rows]


def dr_grpo(use_v1=True, queued=True, role="actor_rollout", distills=False, loss="vanilla", **actor):
    """A worker of verl's."""
    root = {"trainer": {"use_v1": use_v1}, "transfer_queue": {"enable": queued}}
    settings = {"loss_agg_mode": "seq-mean-token-sum-norm", "policy_loss": {"loss_mode": loss}, **actor}
    return [Has(config=Settings(actor=settings, root=root), role=role, distillation_enabled=distills)]


def hidden(shape, stride, requires_grad=True):
    """Hidden states of this shape."""
    sizes = Has(dim=lambda: len(shape), numel=lambda: math.prod(shape), stride=lambda: stride)
    return [Has(**vars(sizes), shape=shape, requires_grad=requires_grad)]


def bridged(wraps=True, provider=Has(bf16=True, fp16=False), use_megatron_fsdp=False, **override):  # noqa: B008
    """The arguments of verl's make_megatron_module."""
    return [Has(wrap_with_ddp=wraps, use_megatron_fsdp=use_megatron_fsdp), Has(), provider, override]


def replica(rank, mode="STANDALONE", **engine_kwargs):
    return [Has(config={"engine_kwargs": engine_kwargs}, rollout_mode=Has(name=mode), replica_rank=rank)]


def request(request_id="det-0", full_determinism=True, n=8, **sampling_params):
    return [Has(config=Has(full_determinism=full_determinism, n=n)), sampling_params, request_id]


OF_VERL = [
    ("critic_micro_batches", critic(), 4.0),
    ("critic_micro_batches", critic(dp_size=2), 2.0),
    ("critic_micro_batches", critic("seq-mean-token-sum"), 4.0),
    ("critic_micro_batches", critic("seq-mean-token-sum-norm"), None),
    ("critic_micro_batches", critic(rows=8), False),
    ("critic_micro_batches", critic("seq-mean-token-sum", rows=8), None),
    ("critic_micro_batches", critic(rows=4, dp_size=2), None),
    ("critic_micro_batches", critic(rows=16), None),
    ("critic_micro_batches", critic(rows=0), None),
    ("critic_micro_batches", critic(global_batch_size=None), None),
    ("critic_micro_batches", critic(dp_size=Has()), None),
    ("gmpo_micro_batches", gmpo(2, dp_size=1, global_batch_size=8), 4.0),
    ("gmpo_micro_batches", gmpo(2, dp_size=2, global_batch_size=8), 2.0),
    ("gmpo_micro_batches", gmpo(4, dp_size=2, global_batch_size=8), False),
    ("gmpo_micro_batches", gmpo(4), None),
    ("gmpo_micro_batches", gmpo(4, dp_size=2, global_batch_size=None), None),
    ("gmpo_micro_batches", [Has(), [0]], None),
    ("divides_by_the_longest", dr_grpo(), True),
    ("divides_by_the_longest", dr_grpo(loss="geo_mean"), None),
    ("divides_by_the_longest", dr_grpo(distills=True), None),
    ("divides_by_the_longest", dr_grpo(use_v1=None), None),
    ("divides_by_the_longest", dr_grpo(queued=False), None),
    ("divides_by_the_longest", dr_grpo(use_v1=False), None),
    ("divides_by_the_longest", dr_grpo(use_v1=False, queued=False), False),
    ("divides_by_the_longest", dr_grpo(role="rollout"), False),
    ("divides_by_the_longest", dr_grpo(loss_agg_mode="token-mean"), False),
    ("divides_by_the_longest", dr_grpo(loss_scale_factor=8), False),
    ("flattens_to_a_copy", hidden((2, 5, 8), (48, 8, 1)), True),
    ("flattens_to_a_copy", hidden((6, 2, 8), (8, 48, 1)), True),
    ("flattens_to_a_copy", hidden((2, 5, 8), (48, 8, 1), requires_grad=False), False),
    ("flattens_to_a_copy", hidden((2, 6, 8), (48, 8, 1)), False),
    ("flattens_to_a_copy", hidden((2, 3, 8), (48, 16, 1)), False),
    ("flattens_to_a_copy", hidden((1, 5, 8), (48, 8, 1)), False),
    ("flattens_to_a_copy", hidden((6, 1, 8), (48, 8, 1)), False),
    ("flattens_to_a_copy", hidden((0, 5, 8), (48, 8, 1)), False),
    ("flattens_to_a_copy", hidden((10, 8), (8, 1)), False),
    ("adds_up_in_16_bits", bridged(grad_reduce_in_fp32=False), False),
    ("adds_up_in_16_bits", bridged(wraps=False), False),
    ("adds_up_in_16_bits", bridged(provider=None), False),
    ("adds_up_in_16_bits", bridged(provider=Has(bf16=False, fp16=False)), False),
    ("adds_up_in_16_bits", bridged(provider=Has(bf16=False, fp16=False, params_dtype="torch.bfloat16")), None),
    ("adds_up_in_16_bits", bridged(param_name_patterns_for_fp32_local_accumulation=("all",)), None),
    ("adds_up_in_16_bits", bridged(use_megatron_fsdp=True), None),
    ("has_singletons", [["a", "a"]], None),
    ("averages_over_another_mini_batch", distilling_of_verl(), True),
    ("averages_over_another_mini_batch", distilling_of_verl(rows=8), None),
    ("averages_over_another_mini_batch", distilling_of_verl(dp_size=1, batch_num_tokens=9), None),
    ("averages_over_another_mini_batch", distilling_of_verl(dp_size=1, batch_num_tokens=8), True),
    ("averages_over_another_mini_batch", distilling_of_verl(dp_size=2, batch_num_tokens=9), True),
    ("averages_over_another_mini_batch", distilling_of_verl("seq-mean-token-sum", global_batch_size=8), None),
    ("averages_over_another_mini_batch", distilling_of_verl("seq-mean-token-sum", global_batch_size=4), True),
    ("averages_over_another_mini_batch", distilling_of_verl(by_policy="gspo"), None),
    ("averages_over_another_mini_batch", distilling_of_verl(by_policy="vanilla"), True),
    ("averages_over_another_mini_batch", [Has(), Has(distillation_loss=Has()), {}], None),
    ("loads_weights", [{"r": 4}, True], None),
    ("loads_weights", [{"r": 4}, False], False),
    ("loads_weights", [None, True], False),
    ("sends_the_base_model", [Has(module=Has(peft_config={}), model_config=Has(lora={}))], False),
    ("sends_the_base_model", [Has(module=Has(), model_config=Has(lora={"merge": True}))], False),
    ("replica_seed:has_the_first_ones_seed", replica(1), True),
    ("replica_seed:has_the_first_ones_seed", replica(1, "COLOCATED"), True),
    ("replica_seed:has_the_first_ones_seed", replica(0), False),
    ("replica_seed:has_the_first_ones_seed", replica(1, "HYBRID"), None),
    ("replica_seed:has_the_first_ones_seed", replica(1, vllm={"seed": 7}), None),
    ("rollout_seed:shares_its_seed", request(), True),
    ("rollout_seed:shares_its_seed", request(n=1), None),
    ("rollout_seed:shares_its_seed", request("0f"), None),
    ("rollout_seed:shares_its_seed", request(seed=7), False),
    ("rollout_seed:shares_its_seed", request(temperature=0), False),
    ("rollout_seed:shares_its_seed", request(full_determinism=False), False),
]


@pytest.mark.parametrize(
    ("where", "arguments", "told"),
    [
        ("deepspeed._conditions:adds_to_others", [offloaded(2, 1)], False),
        ("deepspeed._conditions:adds_to_others", [offloaded(1, 1, cpu_offload=False)], True),
        ("deepspeed._conditions:adds_to_others", [offloaded(2, 0, cpu_offload=False)], False),
        (
            "deepspeed._conditions:adds_to_others",
            [offloaded(2, 1, cpu_offload=False, partition_gradients=False)],
            False,
        ),
        ("deepspeed._conditions:loses_micro_batches", [Has(cpu_offload=False)], False),
        ("deepspeed._conditions:loses_micro_batches", [offloaded(4, 3)], True),
        ("deepspeed._conditions:loses_micro_batches", [offloaded(2, 1)], None),
        ("deepspeed._conditions:loses_micro_batches", [offloaded(1, 1)], None),
        ("deepspeed._conditions:loses_micro_batches", [offloaded(1, 0)], False),
        *(
            (
                "deepspeed._conditions:loses_micro_batches",
                [offloaded(*each, is_gradient_accumulation_boundary=False)],
                told,
            )
            for each, told in (((4, 0), False), ((4, 1), True), ((2, 0), False), ((1, 0), True))
        ),
        ("deepspeed._conditions:loses_micro_batches", [offloaded(4, 3, partition_gradients=False)], False),
        ("deepspeed._conditions:loses_micro_batches", [offloaded(4, 3, zenflow=True)], None),
        ("deepspeed._conditions:drops_by_logits", [True, "position"], False),
        ("deepspeed._conditions:drops_by_logits", [False, "probs"], False),
        ("deepspeed._conditions:drops_by_logits", [True, "probs"], None),
        *(
            (
                "trl._conditions:part_of_a_generation",
                [
                    Has(
                        **GRPO,
                        model=Has(training=training),
                        args=Has(gradient_accumulation_steps=steps, steps_per_generation=4),
                    )
                ],
                told,
            )
            for steps, training, told in ((2, True, 0.5), (4, True, False), (2, False, False))
        ),
        ("trl._conditions:part_of_a_generation", [Has(loss_type="grpo")], False),
        ("trl._conditions:masks_truncated", [Has(**GRPO)], True),
        ("trl._conditions:masks_truncated", [Has(**{**GRPO, "loss_type": "bnpo"})], False),
        ("trl._conditions:masks_truncated", [Has(**{**GRPO, "mask_truncated_completions": False})], False),
        ("trl._conditions:masks_truncated", [Has(**{**GRPO, "use_liger_kernel": True})], False),
        ("trl._conditions:has_tools", [Has(liger_grpo_loss=LIGER_LOSS), {"tool_mask": 1}], True),
        ("trl._conditions:has_tools", [Has(liger_grpo_loss=len), {"tool_mask": 1}], None),
        ("trl._conditions:has_tools", [Has(), {}], False),
        ("trl._conditions:has_tools", [Has(), {"tool_mask": None}], False),
        ("trl._conditions:micro_batches", [online(4)], 4.0),
        ("trl._conditions:micro_batches", [online(4, "DEEPSPEED")], False),
        ("trl._conditions:micro_batches", [online(4, by_accelerate=4)], False),
        ("trl._conditions:micro_batches", [online(1)], False),
        (
            "transformers._conditions:averaged_over_ranks",
            [args(world_size=2, average_tokens_across_devices=True)],
            True,
        ),
        (
            "transformers._conditions:averaged_over_ranks",
            [args(world_size=2, average_tokens_across_devices=False)],
            False,
        ),
        ("transformers._conditions:averaged_over_ranks", [args(world_size=1)], False),
        ("transformers._conditions:routers_of_ranks", [args(**RANKS), {}], None),
        (
            "transformers._conditions:routers_of_ranks",
            [Has(args=Has(**RANKS), model=Has(training=True)), {"output_router_logits": True}],
            None,
        ),
        ("transformers._conditions:routers_of_ranks", [args(world_size=1), {}], False),
        ("transformers._conditions:routers_of_ranks", [Has(args=Has(**RANKS), model=Has()), {}], False),
        (
            "transformers._conditions:routers_of_ranks",
            [
                Has(
                    args=Has(world_size=2, average_tokens_across_devices=True),
                    model=Has(config=Has(text_config=Has(output_router_logits=True)), training=True),
                ),
                {},
            ],
            None,
        ),
        ("megatron_core._conditions:divided_sinks", [LINEAR, Has(**GPU, softmax_type="learnable")], True),
        ("megatron_core._conditions:divided_sinks", [LINEAR, Has(**GPU, softmax_type="vanilla")], False),
        ("megatron_core._conditions:divided_sinks", [LINEAR, Has(**ONE, softmax_type="learnable")], False),
        ("megatron_core._conditions:divided_sinks", [LINEAR, Has(**GPU)], False),
        ("megatron_core._conditions:whole_on_each_rank", [LINEAR, "duplicated", False, Has(**GPU)], True),
        ("megatron_core._conditions:whole_on_each_rank", [LINEAR, "duplicated", True, Has(**GPU)], False),
        ("megatron_core._conditions:whole_on_each_rank", [LINEAR, "duplicated", False, Has(**ONE)], False),
        ("megatron_core._conditions:whole_on_each_rank", [LINEAR, "column", False, Has(**GPU)], False),
        ("megatron_core._conditions:whole_on_each_rank", [Has(), "duplicated", False, Has(**GPU)], False),
        ("megatron_core._conditions:heads_of_a_rank", [LINEAR, Has(**GPU, sequence_parallel=False)], True),
        ("megatron_core._conditions:heads_of_a_rank", [LINEAR, Has(**GPU, sequence_parallel=True)], False),
        ("megatron_core._conditions:heads_of_a_rank", [LINEAR, Has(**ONE, sequence_parallel=False)], False),
        (
            "megatron_core._conditions:experts_of_a_rank",
            [LINEAR, True, Has(**{**GPU, "expert_model_parallel_size": 2})],
            True,
        ),
        (
            "megatron_core._conditions:experts_of_a_rank",
            [LINEAR, True, Has(**GPU, expert_tensor_parallel_size=2)],
            True,
        ),
        (
            "megatron_core._conditions:experts_of_a_rank",
            [LINEAR, True, Has(**GPU, expert_tensor_parallel_size=1)],
            False,
        ),
        ("megatron_core._conditions:experts_of_a_rank", [LINEAR, True, Has(**GPU)], None),
        (
            "megatron_core._conditions:experts_of_a_rank",
            [LINEAR, True, Has(**ONE, expert_tensor_parallel_size=2)],
            False,
        ),
        ("megatron_core._conditions:experts_of_a_rank", [LINEAR, False, Has(**GPU)], False),
        (
            "megatron_core._conditions:parts_of_a_sequence",
            [Has(context_parallel_size=4, num_moe_experts=8, calculate_per_token_loss=False, **BALANCED)],
            0.25,
        ),
        (
            "megatron_core._conditions:parts_of_a_sequence",
            [Has(context_parallel_size=4, num_moe_experts=8, calculate_per_token_loss=True, **BALANCED)],
            False,
        ),
        ("megatron_core._conditions:parts_of_a_sequence", [Has(context_parallel_size=4, num_moe_experts=None)], False),
        ("megatron_core._conditions:parts_of_a_sequence", [Has(context_parallel_size=1)], False),
        ("megatron_core._conditions:tokens_of_a_rank", [Has(config=Has(**GPU, **TOKENS))], True),
        ("megatron_core._conditions:tokens_of_a_rank", [Has(config=Has(**ONE, **TOKENS))], False),
        ("megatron_core._conditions:tokens_of_a_rank", [Has(config=Has(**GPU, calculate_per_token_loss=False))], False),
        ("megatron_core._conditions:z_loss_of_a_rank", [Has(config=Has(**GPU, **TOKENS))], True),
        (
            "megatron_core._conditions:z_loss_of_a_rank",
            [Has(config=Has(**GPU, **{**TOKENS, "moe_z_loss_coeff": None}))],
            None,
        ),
        ("megatron_core._conditions:z_loss_of_a_rank", [Has(config=Has(**ONE, **TOKENS))], False),
        (
            "megatron_core._conditions:z_loss_of_a_rank",
            [Has(config=Has(**ONE, **{**TOKENS, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}))],
            None,
        ),
        (
            "megatron_core._conditions:z_loss_of_a_rank",
            [Has(config=Has(**ONE, calculate_per_token_loss=False, moe_router_load_balancing_type="seq_aux_loss"))],
            False,
        ),
        ("megatron_core._conditions:counts_in_half", [Has(config=Has(**HALF))], True),
        ("megatron_core._conditions:counts_in_half", [Has(config=Has(**{**HALF, "bf16": False}))], False),
        (
            "megatron_core._conditions:counts_in_half",
            [Has(config=Has(**{**HALF, "moe_router_enable_expert_bias": False}))],
            False,
        ),
        ("swift._conditions:part_of_a_window", [Has(**WINDOW, args=FOUR, model=Has(training=True))], 0.25),
        ("swift._conditions:part_of_a_window", [Has(**WINDOW, args=FOUR, model=Has(training=False))], None),
        (
            "swift._conditions:part_of_a_window",
            [Has(**WINDOW, args=FOUR, model=Has(training=True), compute_loss=lambda *_: None)],
            None,
        ),
        ("swift._conditions:part_of_a_window", [Has(**{**WINDOW, "loss_type": "grpo"})], False),
        (
            "swift._conditions:part_of_a_window",
            [Has(**{**WINDOW, "model_accepts_loss_kwargs": True}, args=FOUR)],
            False,
        ),
        ("swift._conditions:part_of_a_window", [Has(**WINDOW, args=Has(gradient_accumulation_steps=1))], False),
        ("swift._conditions:another_loss", [Has(args=Has(loss_type="hinge"))], None),
        ("swift._conditions:another_loss", [Has(args=Has(loss_type="sigmoid"))], False),
        ("slime._conditions:whitened_in_parts", [Has(normalize_advantages=True, context_parallel_size=2)], True),
        ("slime._conditions:whitened_in_parts", [Has(normalize_advantages=True, context_parallel_size=1)], None),
        ("slime._conditions:whitened_in_parts", [Has(normalize_advantages=False)], False),
        ("slime._conditions:without_eps_clip_c", [Has(eps_clip_c=None)], False),
        ("slime._conditions:without_eps_clip_c", [Has(eps_clip_c=3.0)], None),
        ("transformers._conditions:alone", [stepping(1, 1, 1)], False),
        ("transformers._conditions:alone", [stepping(1, 2, 2)], None),
        ("transformers._conditions:alone", [stepping(1, 1, 2)], None),
        ("transformers._conditions:alone", [stepping(2, 1, 1)], None),
        ("transformers._conditions:alone", [stepping(1, 1, 1, n_gpu=2)], None),
        ("transformers._conditions:not_smoothed", [Has(label_smoother=None)], False),
        ("transformers._conditions:not_smoothed", [Has(label_smoother=1)], None),
        ("transformers._conditions:not_packed", [None], False),
        ("transformers._conditions:not_packed", [1], None),
        ("transformers._conditions:from_a_checkpoint", [None], False),
        ("transformers._conditions:from_a_checkpoint", ["checkpoint-3"], None),
        ("transformers._conditions:within_an_epoch", [SKIPPING, 2, 2, 3], None),
        ("transformers._conditions:within_an_epoch", [SKIPPING, 3, 2, 3], False),
        ("transformers._conditions:within_an_epoch", [SKIPPING, 2, 2, 0], False),
        ("transformers._conditions:within_an_epoch", [Has(args=Has(ignore_data_skip=True)), 2, 2, 3], False),
        ("trl._conditions:flattened", [Has(padding_free=True, return_position_ids=True), [{}]], True),
        ("trl._conditions:flattened", [Has(padding_free=True, return_position_ids=False), [{}]], None),
        ("trl._conditions:flattened", [Has(padding_free=False, return_position_ids=True), [{}]], False),
        (
            "trl._conditions:flattened",
            [Has(padding_free=True, return_position_ids=True), [{"completion_mask": [0, 1]}]],
            None,
        ),
        ("trl._conditions:settings_of_liger", [None], False),
        ("trl._conditions:settings_of_liger", [Has(**LIGER, loss_type=["robust"], label_smoothing=0.1)], True),
        ("trl._conditions:settings_of_liger", [Has(**LIGER, loss_type=["robust"], label_smoothing=0.0)], False),
        ("trl._conditions:settings_of_liger", [Has(**LIGER, loss_type="discopop", discopop_tau=0.1)], True),
        ("trl._conditions:settings_of_liger", [Has(**LIGER, loss_type="discopop", discopop_tau=0.05)], False),
        ("trl._conditions:settings_of_liger", [Has(**LIGER, loss_type=["sigmoid"])], False),
        ("trl._conditions:settings_of_liger", [Has(use_liger_kernel=False, loss_type=["robust"])], False),
        ("trl._conditions:part_of_all_ranks", [distilling(), 8], 0.25),
        ("trl._conditions:part_of_all_ranks", [distilling(), None], False),
        ("trl._conditions:part_of_all_ranks", [distilling(ranks=1), 8], False),
        ("trl._conditions:part_of_all_ranks", [distilling(average_tokens_across_devices=False), 8], False),
        ("trl._conditions:part_of_all_ranks", [distilling(use_liger_kernel=True), 8], None),
        ("trl._conditions:part_of_all_ranks", [distilling(loss="somebody"), 8], None),
        ("trl._conditions:on_a_server", [Has(use_vllm=True, vllm_mode="server")], True),
        ("trl._conditions:on_a_server", [Has(use_vllm=True, vllm_mode="colocate")], False),
        ("trl._conditions:on_a_server", [Has(use_vllm=False, vllm_mode="server")], False),
        ("deepspeed._conditions:rates_of_groups", [WARMUP, Has(param_groups=[{"lr": 1e-3}, {"lr": 1e-4}]), None], True),
        (
            "deepspeed._conditions:rates_of_groups",
            [WARMUP, Has(param_groups=[{"lr": 1e-3}, {"lr": 1e-3}]), None],
            False,
        ),
        (
            "deepspeed._conditions:rates_of_groups",
            [WARMUP, Has(param_groups=[{"lr": Has()}, {"lr": 1e-3}]), None],
            None,
        ),
        ("deepspeed._conditions:rates_of_groups", [WARMUP, Has(), 1e-3], False),
        ("trl._conditions:sleeps", [Has(args=Has(use_vllm=True, vllm_enable_sleep_mode=True))], None),
        ("trl._conditions:sleeps", [Has(args=Has(use_vllm=True, vllm_enable_sleep_mode=False))], False),
        ("trl._conditions:sleeps", [Has(args=Has(use_vllm=False, vllm_enable_sleep_mode=True))], False),
        ("trl._conditions:engine_sleeps", [Has(mode="colocate", enable_sleep_mode=True)], True),
        ("trl._conditions:engine_sleeps", [Has(mode="server", enable_sleep_mode=True)], False),
        ("trl._conditions:engine_sleeps", [Has(mode="colocate", enable_sleep_mode=False)], False),
        *((f"verl.{where if ':' in where else '_conditions:' + where}", *more) for where, *more in OF_VERL),
    ],
)
def test_what_is_told_of_a_call(where, arguments, told):
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)(*arguments)
    assert (type(found), found) == (type(told), told)


@pytest.mark.parametrize("patch", PATCHES.values(), ids=str)
def test_each_is_there_and_imports_no_framework(patch):
    for condition in filter(lambda each: each.predicate, patch.conditions):
        module, _, name = condition.predicate.partition(":")
        tells = getattr(importlib.import_module(module), name)
        assert tells.__code__.co_argcount >= 1
        assert not {"torch", "transformers", "trl", "deepspeed"} & {*tells.__code__.co_names}
