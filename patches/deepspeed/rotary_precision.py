"""bf16 and fp16: rotary frequencies stay in float32, as transformers computes them."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _float32_buffers

_NAME = "deepspeed-rotary-precision"
_CONFIGURE = "deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model"


def _kept(cast: str) -> Rewrite:
    return Rewrite(
        target=_CONFIGURE,
        pattern=f"self.module.{cast}()",
        replacement=f'$KEEPING("{_NAME}", self.module, self.module.{cast})',
        uses={"KEEPING": f"{_float32_buffers.__name__}:{_float32_buffers.keeping.__name__}"},
    )


PATCH = Patch(
    name=_NAME,
    summary="bf16 and fp16 keep rotary frequencies in float32",
    harm="wrong gradient",
    bug="bf16 and fp16 round the frequencies of rotary embeddings, so distant tokens get wrong positions",
    when="bf16 or fp16, at each ZeRO stage, and a model of transformers with rotary embeddings",
    symptom="""\
The model computes other log-probabilities under DeepSpeed than everywhere else: transformers itself, FSDP2, DDP and
inference engines keep `inv_freq` in float32. The difference grows with the distance between two tokens. At the
frequencies of Llama 2 (theta 10,000, heads of 128), bf16 changes an angle by up to 0.3 rad at position 256 and 2.5 rad
at 2,048; fp16 by up to 0.06 and 0.5. No error is raised, and the loss falls: the model learns with these angles, and is
evaluated and served with others.""",
    cause="""\
`DeepSpeedEngine._configure_distributed_model` calls `module.bfloat16()` or `module.half()`. This casts all buffers
too. A bfloat16 number has 8 significant bits, so a frequency is off by up to 0.4 %. The rotary embedding multiplies the
rounded frequency by the position.""",
    repair="""\
The cast leaves the buffers alone that transformers itself keeps in float32 in a model of any `dtype`: the frequencies
(`inv_freq` and other non-persistent buffers whose names end with it), and buffers that the model's class lists in
`_keep_in_fp32_modules_strict`, such as the `e_score_correction_bias` of DeepSeek-V3 and GLM-4.5, which selects experts.
DeepSpeed 0.19.2 leaves all buffers alone. The patch casts all other buffers as released. It does not change a module
that is not transformers' own code, such as a model with `trust_remote_code`: rank 0 logs one warning.""",
    changes_numbers="""\
Before 0.19.2, DeepSpeed trained with rounded rotary frequencies. With the patch, attention between distant tokens is
that of the pretrained model and of the inference engine: losses on long sequences are lower at the start, and the ratio
of a policy to its rollouts is closer to 1. A checkpoint that was trained for long without the patch has adapted to the
rounded frequencies, but is served with exact ones: its loss at the first steps with the patch is its loss at
inference.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/pull/8066",
        "https://github.com/deepspeedai/DeepSpeed/issues/5812",
        "https://github.com/deepspeedai/DeepSpeed/issues/4932",
    ),
    variants=(Variant(Guard("deepspeed", ">=0.5.5,<0.19.2"), (_kept("half"), _kept("bfloat16"))),),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.2",
    conditions=(Condition(_CONFIGURE, f"{__package__}._conditions:rounds_frequencies"),),
)
