"""ZeRO-3 with bf16 or fp16: rotary frequencies are computed in float32."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "deepspeed.runtime.zero.partition_parameters:InsertPostInitMethodToModuleSubClasses.patch_init_and_builtins"

PATCH = Patch(
    name="deepspeed-zero3-rotary-init",
    summary="zero.Init leaves rotary frequencies in float32",
    harm="wrong gradient",
    bug="models that ZeRO-3 builds in bf16 or fp16 get rounded rotary frequencies",
    when="ZeRO-3, bf16 or fp16, and a model that transformers builds: from_pretrained before 5.23.0, or zero.Init",
    excluded_by=("zero_optimization.stage=absent|0|1|2",),
    symptom="""\
Under ZeRO-3 the model computes other log-probabilities than everywhere else. No error is raised, and the loss falls.
`inv_freq` differs from that of the same `from_pretrained` without ZeRO-3 by up to 0.4 % in bf16, and an angle by
position x frequency x that: 3.9 rad at position 2,048 with LongRoPE's short factors, 0.9 with Llama's own frequencies.
Which models are affected depends on transformers:

- 4.45 to 4.57: YaRN (gpt-oss, DeepSeek-V3, Qwen2.5 with YaRN), LongRoPE (Phi-3, Phi-4), and the vision towers of
  Qwen2-VL, Qwen2.5-VL and GLM-4V.
- 5.0 to 5.14: these vision towers, and those of Qwen3-VL and Qwen3.5.
- 5.15 to 5.22: also plain rotary embeddings, as of Llama and Qwen3. In 5.22.2, 168 of 236 models differ.
- 5.23 and later: only models that are built in a `with deepspeed.zero.Init():` of your own. All the above are affected
  there.""",
    cause="""\
Within `zero.Init`, DeepSpeed replaces `torch.arange`, `torch.tensor` and other constructors. Each floating-point tensor
that they make becomes bf16 or fp16, also if `dtype=torch.float32` was asked for. The frequencies are computed from
such tensors. transformers 5 computes some of them again afterwards. 5.23.0 keeps `torch.arange` as it is.""",
    repair="""\
A module of transformers without parameters and submodules is initialized a second time with constructors that do not
round. Its non-persistent buffers and tensor attributes get these values. They are the same objects as before. All
parameters, persistent buffers, and buffers of other modules stay as released. Modules that are not transformers' own
code stay as released too: a subclass, a method or a function for frequencies of your own, `trust_remote_code`.
DeepSpeed before 0.19.2 also rounds all buffers later: `deepspeed-rotary-precision` repairs that.""",
    changes_numbers="""\
ZeRO-3 trained with rounded rotary frequencies. With the patch, attention between distant tokens is that of the
pretrained model and of the inference engine: losses on long sequences are lower at the start, and the ratio of a policy
to its rollouts is closer to 1. A checkpoint that was trained for long without the patch has adapted to the rounded
frequencies, but is served with exact ones: its loss at the first steps with the patch is its loss at inference.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/issues/4932",
        "https://github.com/huggingface/transformers/issues/28685",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.10.0,<=0.19.8"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="self._post_init_method(module)",
                    replacement="self._post_init_method($EXACT(self, f, module, args, kwargs))",
                    uses={"EXACT": f"{__package__}._exact_tables:exact"},
                ),
            ),
        ),
    ),
    obsolete_when="when zero.Init of the oldest DeepSpeed in use leaves tensors alone for which a dtype was asked",
    conditions=(Condition(_TARGET),),
)
