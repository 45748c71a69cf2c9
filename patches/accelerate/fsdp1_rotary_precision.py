"""FSDP1 with mixed precision: rotary frequencies stay in float32, as with FSDP2."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant, Wrap

from . import _buffer_policies

_NAME = _buffer_policies.NAME
_PLUGIN = "accelerate.utils.dataclasses:FullyShardedDataParallelPlugin"
_CHOICE = f"{_PLUGIN}.set_auto_wrap_policy"


def _changes(made: str) -> tuple[Rewrite | Wrap, ...]:
    return (
        Rewrite(
            target=f"{_PLUGIN}.set_mixed_precision",
            pattern=f"self.mixed_precision_policy = {made}",
            replacement=f"self.mixed_precision_policy = $MADE({made})",
            uses={"MADE": f"{_buffer_policies.__name__}:{_buffer_policies.made.__name__}"},
        ),
        Wrap(
            _CHOICE,
            f"{_buffer_policies.__name__}:{_buffer_policies.for_model.__name__}",
            signature="(self, model)",
            signature_suffices="the plugin's other policy is chosen before; what the function does is left as it is",
        ),
    )


PATCH = Patch(
    name=_NAME,
    summary="FSDP1 with mixed precision keeps rotary frequencies in float32",
    harm="wrong gradient",
    bug="FSDP1 with mixed precision rounds the frequencies of rotary embeddings, so distant tokens get wrong positions",
    when="FSDP1 (accelerate's default version) with bf16 or fp16, and a model of transformers with rotary embeddings",
    excluded_by=("fsdp_config.fsdp_version=2", "mixed_precision=no"),
    symptom="""\
The model computes other log-probabilities under FSDP1 than under FSDP2, DDP, transformers itself and inference engines,
which keep `inv_freq` in float32. The difference grows with the distance between two tokens. At the frequencies of
Llama 2 (theta 10,000, heads of 128), bf16 changes an angle by up to 0.3 rad at position 256 and 2.5 rad at 2,048. No
error is raised, and the loss falls: the model learns with these angles, and is evaluated and served with others.""",
    cause="""\
`FullyShardedDataParallelPlugin.set_mixed_precision` makes a policy with `buffer_dtype` bfloat16 or float16 from
`mixed_precision`. At the first forward pass FSDP1 casts all buffers to this type. A bfloat16 number has 8 significant
bits, so a frequency is off by up to 0.4 %. The rotary embedding multiplies the rounded frequency by the position.
accelerate has an argument for this, `buffer_autocast`, that nothing sets.""",
    repair="""\
Before accelerate wraps a model, and before TRL wraps a reference model, the plugin's policy gets no `buffer_dtype`, so
FSDP1 leaves buffers in the type that they have, as FSDP2 does. This holds for a policy that accelerate has made from
`mixed_precision`, and for a model of which transformers itself keeps each float32 buffer in float32 for any `dtype`:
the frequencies (`inv_freq`), and buffers that the model's class lists in `_keep_in_fp32_modules_strict`. All buffers of
a model with any other buffer of another type are cast as released: a float32, float64 or float16 buffer of your code or
of `trust_remote_code`. Rank 0 then logs one warning if the model has rotary frequencies. The patch does not change a
policy that you pass as a `MixedPrecision` or a dictionary.""",
    changes_numbers="""\
With FSDP1, accelerate trained with rounded rotary frequencies. With the patch, attention between distant tokens is that
of the pretrained model and of the inference engine: losses on long sequences are lower at the start, and the ratio of a
policy to its rollouts is closer to 1. A checkpoint that was trained for long without the patch has adapted to the
rounded frequencies, but is served with exact ones: its loss at the first steps with the patch is its loss at
inference.""",
    references=("https://github.com/huggingface/accelerate/pull/2544",),
    variants=(
        Variant(
            Guard("accelerate", ">=0.17.0,<1.6.0"),
            _changes("MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=$BUFFERS)"),
        ),
        Variant(Guard("accelerate", ">=1.6.0,<=1.15.0"), _changes("MixedPrecision(**dtype_args)")),
    ),
    obsolete_when="when FSDP1 is no longer in use, or accelerate leaves buffers in their type",
    conditions=(Condition(_CHOICE, f"{__package__}._conditions:rounds_frequencies"),),
)
