"""Continuous batching of GRPO, RLOO and Online DPO: the trained weights stay in float32."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_CASTS = tuple(f"unwrapped_model.to(torch.{name})" for name in ("bfloat16", "float16"))
_CONTEXT = 'profiling_context(self, "transformers.generate_batch")'
_GRPO, _RLOO = (f"trl.trainer.{name.lower()}_trainer:{name}Trainer." for name in ("GRPO", "RLOO"))
_ONLINE_DPO, _EXPERIMENTAL = (
    f"trl.{where}.online_dpo_trainer:OnlineDPOTrainer._generate" for where in ("trainer", "experimental.online_dpo")
)
_BEFORE_24, _SINCE_24 = "_generate_and_score_completions", "_generate_single_turn"
_TARGETS = (_GRPO + _SINCE_24, _RLOO + _SINCE_24, _GRPO + _BEFORE_24, _RLOO + _BEFORE_24, _ONLINE_DPO, _EXPERIMENTAL)


def _kept(target: str) -> tuple[Rewrite, ...]:
    """The context in which the model is cast, and both casts."""
    context = Rewrite(
        target,
        _CONTEXT,
        f"{_CONTEXT}, $KEPT(self) as kept_weights",
        alongside=_CASTS,
        uses={"KEPT": f"{__package__}._kept_weights:Kept"},
    )
    casts = (
        Rewrite(
            target,
            each,
            each.replace("unwrapped_model.to(", "kept_weights.cast(unwrapped_model, "),
            alongside=(_CONTEXT,),
        )
        for each in _CASTS
    )
    return (context, *casts)


def _variant(versions: str, *targets: str) -> Variant:
    return Variant(
        Guard("trl", versions), tuple(each for target in targets for each in _kept(target)), independent=True
    )


PATCH = Patch(
    name="trl-continuous-batching-weights",
    summary="GRPO, RLOO and Online DPO with continuous batching train weights that are not cast to 16 bits",
    harm="wrong weights",
    bug="to generate, the trainer casts the trained model to bf16 or fp16 for good; on several ranks DDP stops working",
    when="""\
use_transformers_continuous_batching (use_transformers_paged before 1.7) with bf16, TRL's default, or fp16""",
    excluded_by=(
        "use_vllm=true",
        "trl=sft|dpo|kto|reward",
    ),
    symptom="""\
`GRPOTrainer` and `RLOOTrainer` with `use_transformers_continuous_batching=True` (before 1.7.0
`use_transformers_paged=True`), and `OnlineDPOTrainer` of 0.23.0 to 1.1.0, with `bf16`, which is TRL's default, or
`fp16`: since the first generation the trained weights are in 16 bits, and so are the optimizer's states. At the
learning rates of RLHF most updates are rounded away: at 1e-6, 97 of 100 weights do not move in two steps. With DDP, the
ranks of GRPO and RLOO do not average their gradients since 0.25.0, and each trains a model of its own. (Before, and in
Online DPO, continuous batching raises with DDP.)

With `bf16` there is no error, except after `resume_from_checkpoint`: the optimizer's states are loaded in float32, and
fused AdamW, the default, raises `RuntimeError: expected scalar type BFloat16 but found Float`. With `fp16` on a GPU,
clipping the gradients, the default, raises `ValueError: Attempting to unscale FP16 gradients.` in the first step.""",
    cause="""\
The trainer calls `unwrapped_model.to(torch.bfloat16)` before `generate_batch`, and nothing casts the model back. TRL
loads models in float32. The optimizer makes its states in the type of the weights. DDP's hooks belong to nodes of
autograd's graph, which torch makes anew if a parameter's type changes. The hooks then do not run.""",
    repair="""\
During the cast and the generation, the model has other parameters, which the release casts. Afterwards it has its own
again: the same objects, with the same values, types and gradients, also if the generation raises. Tied weights stay
tied while generating. Log-probabilities, gradients and updates are then those of TRL's other way to generate, bit for
bit for the same completions, and ranks stay equal. The patch puts back buffers that the cast rounds, too. The rotary
frequencies of transformers' models, and buffers such as `e_score_correction_bias` that it loads in float32 for each
`dtype`, stay in float32 while generating, as in all other forward passes. Otherwise the weights that generate are as
released, also with `cast_lm_head_to_fp32`. A model that is in the run's type already
stays as released, bit for bit. LoRA's base in bf16 is not touched. The patch puts back its adapters, which PEFT has
in float32.

Memory: while it generates, the copy in 16 bits exists beside the trained weights, so a weight takes 2 bytes more.
Weights, gradients and the optimizer's states stay in float32, as without continuous batching.

Not repaired: a model under DeepSpeed or FSDP, which keep references to the weights that they partition. With bf16 or
fp16, DeepSpeed has weights in 16 bits in the model and in float32 in the optimizer, so nothing is lost there. FSDP2's
shards stay in 16 bits after the cast. The patch also leaves a model with modules that are not torch's, transformers',
PEFT's, TRL's or accelerate's own, with a `to` or `_apply` of its own, with quantized or distributed tensors, or with a
manager of yours that is kept (`persistent_manager=True`). It logs the reason in one line on rank 0.""",
    changes_numbers="""\
Since TRL 0.20.0, runs with continuous batching trained weights that were rounded to 16 bits, and lost most of their
updates. With DDP, since 0.25.0, they did not average gradients. Their checkpoints are in 16 bits, have learned little,
and with DDP come from rank 0 alone. Train again with the patch. If you raised a learning rate because a run learned
nothing, lower it again.""",
    references=(
        "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_trainer.py",
        "https://github.com/huggingface/trl/pull/5765",
    ),
    variants=(
        _variant(">=0.20.0,<0.22.0", _GRPO + _BEFORE_24),
        _variant(">=0.22.0,<0.23.0", _GRPO + _BEFORE_24, _RLOO + _BEFORE_24),
        _variant(">=0.23.0,<0.24.0", _GRPO + _BEFORE_24, _RLOO + _BEFORE_24, _ONLINE_DPO),
        _variant(">=0.24.0,<0.26.0", _GRPO + _SINCE_24, _RLOO + _SINCE_24, _ONLINE_DPO),
        _variant(">=0.26.0,<1.2.0", _GRPO + _SINCE_24, _RLOO + _SINCE_24, _EXPERIMENTAL),
        _variant(">=1.2.0,<=1.16.0", _GRPO + _SINCE_24, _RLOO + _SINCE_24),
    ),
    obsolete_when="when the oldest trl in use generates without a cast of the trained model; no release so far does",
    conditions=tuple(Condition(each, f"{__package__}._conditions:casts_the_trained") for each in _TARGETS),
)
