"""FSDP with a model in bfloat16: rotary frequencies stay in float32."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from . import _rotary

_WORKERS = "verl.workers.fsdp_workers"


def _kept(target: str, module: str, dtype: str = "torch_dtype") -> Rewrite:
    return Rewrite(
        target=target,
        pattern=f"{module}.to({dtype})",
        replacement=f"$CAST({module}, {dtype})",
        uses={"CAST": f"{_rotary.__name__}:{_rotary.cast.__name__}"},
    )


_ENGINE = (_kept("verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module", "module"),)
_ACTOR_AND_CRITIC = (
    _kept(f"{_WORKERS}:ActorRolloutRefWorker._build_model_optimizer", "actor_module"),
    _kept(f"{_WORKERS}:CriticWorker._build_critic_model_optimizer", "critic_module"),
)
_REWARD = (_kept(f"{_WORKERS}:RewardModelWorker._build_model", "reward_module", "torch.bfloat16"),)

PATCH = Patch(
    name=_rotary.NAME,
    summary="FSDP with model_dtype bf16 keeps rotary frequencies in float32",
    harm="wrong gradient",
    bug="FSDP with model_dtype bf16 rounds the frequencies of rotary embeddings, so distant tokens get wrong positions",
    when="FSDP and model_dtype bf16 or fp16, of the actor, the reference model or the critic",
    symptom="""\
`model_dtype: bf16` in `fsdp_config`, often set to save memory, and always the case for a reference model in a worker of
its own before 0.6.0: the model computes other log-probabilities than transformers itself and the inference engine,
which keep `inv_freq` in float32. The difference grows with the distance between two tokens. At the frequencies of
Llama 2 (theta 10,000, heads of 128), an angle is off by up to 0.3 rad at position 256 and 2.5 rad at 2,048. An actor is
trained with these angles, and its rollouts come from exact ones. If only the reference model is bfloat16, the KL
divergence is not zero before the first update, and grows with the length of the responses. No error is raised.""",
    cause="""\
After it has loaded a model, verl calls `module.to(torch_dtype)`, because some parameters may have another type. This
casts the buffers too, and transformers has computed `inv_freq` in float32. A bfloat16 number has 8 significant bits, so
a frequency is off by up to 0.4 %. The rotary embedding multiplies the rounded frequency by the position. FSDP's
`buffer_dtype`, float32, comes too late.""",
    repair="""\
The cast leaves these buffers alone, which transformers itself keeps in float32 in a model of any `dtype`: the
frequencies (`inv_freq`), and buffers that the model's class lists in `_keep_in_fp32_modules_strict`, such as the
`e_score_correction_bias` of DeepSeek-V3. The patch casts other buffers as released, such as that of GLM-4.5 with
transformers 4, whose class does not list it, and does not change a model in float32. It does not change a module that
is not transformers' own code, such as a model with `trust_remote_code`: rank 0 logs one warning. It covers the actor,
the reference model, the critic, and the reward model of releases before 0.7.1.""",
    changes_numbers="""\
With `model_dtype: bf16`, verl trained with rounded rotary frequencies, or compared the policy with a reference model
that had them. With the patch, log-probabilities of long responses are closer to the rollout's, and KL is zero before
the first update, up to the rounding of bfloat16. If you chose a KL coefficient for such responses, check it again. A
checkpoint that was trained for long without the patch has adapted to the rounded frequencies.""",
    references=("https://github.com/deepspeedai/DeepSpeed/pull/8066",),
    variants=(
        Variant(Guard("verl", ">=0.2,<0.6.0"), (*_ACTOR_AND_CRITIC, *_REWARD), independent=True),
        Variant(Guard("verl", ">=0.6.0,<0.7.1"), (*_ENGINE, *_ACTOR_AND_CRITIC, *_REWARD), independent=True),
        Variant(Guard("verl", ">=0.7.1,<0.8.0"), (*_ENGINE, *_ACTOR_AND_CRITIC), independent=True),
        Variant(Guard("verl", ">=0.8.0,<=0.9.1"), _ENGINE, independent=True),
    ),
    obsolete_when="when the oldest verl in use leaves buffers in their type; 0.9.1, the newest, does not",
    conditions=tuple(Condition(change.target) for change in (*_ENGINE, *_ACTOR_AND_CRITIC, *_REWARD)),
)
