"""PEFT: DoRA on transformers' ``Conv1D`` is unmerged with factors of the wrong axis."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Signature, Variant

_TARGET = "peft.tuners.lora.variants:DoraLinearVariant.unmerge"

PATCH = Patch(
    name="peft-dora-conv1d-unmerge",
    summary="base weights of a Conv1D are the same after a DoRA adapter was merged and unmerged",
    harm="wrong weights",
    bug="unmerging a DoRA adapter ruins the base weights of a Conv1D",
    when="use_dora on a Conv1D (GPT-2), and unmerge_adapter(), or disable_adapter() while an adapter is merged",
    excluded_by=("use_dora=false|absent", "use_peft=false|absent", "model_family=qwen2|qwen3|llama|mistral"),
    symptom="""\
A DoRA adapter on transformers' `Conv1D` (GPT-2) is merged and unmerged. The frozen base weights of a square layer
(`attn.c_proj`) are then others: 11.7 times their norm off here. No error. The weights of other layers (`c_attn`)
make `unmerge` raise "The size of tensor a (48) must match the size of tensor b (16) at non-singleton dimension 0".""",
    cause="""\
`Conv1D` stores its weight transposed. `merge` transposes DoRA's factors for it (`fan_in_fan_out`); `unmerge` does
not, so it divides rows of the weight by the factors of columns.""",
    repair="""\
`unmerge` transposes the factors, as `merge` does and as 0.21.0 does. For `nn.Linear` nothing changes, bit for bit.

Not repaired: PEFT 0.9.0 to 0.15.2, which have the bug in `Linear.unmerge`. Base weights in bf16 or fp16 are rounded as
those of other DoRA layers are.""",
    references=("https://github.com/huggingface/peft/pull/3531",),
    variants=(
        Variant(
            Guard("peft", ">=0.16.0,<0.21.0"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="orig_weight.data / dora_factor.view(-1, 1)",
                    replacement="orig_weight.data / transpose(dora_factor.view(-1, 1), module.fan_in_fan_out)",
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest PEFT in use is 0.21.0",
    signatures=(Signature("RuntimeError", "The size of tensor a", frames=(_TARGET,), specific=False),),
    changes_numbers="""\
Base weights of a Conv1D that were unmerged from a DoRA adapter are useless, and what was trained or evaluated
afterwards in that process is, too. Load the base model again.""",
    conditions=(Condition(_TARGET, f"{__package__}._conditions:stored_transposed"),),
)
