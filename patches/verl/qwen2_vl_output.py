"""verl with transformers 5.23 and later, which has no `Qwen2VLCausalLMOutputWithPast`: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_NAME = "Qwen2VLCausalLMOutputWithPast"
_FROM = "transformers.models.qwen2_vl.modeling_qwen2_vl"

ADVICE = Advice(
    name="verl-qwen2-vl-output",
    summary="verl's SFT and vision models cannot be imported with transformers 5.23 and later",
    harm="crash",
    bug="verl's SFT and vision models cannot be imported with transformers 5.23 and later",
    when="verl 0.4.0 to 0.9.1 with transformers 5.23 and later, which pip and uv install with verl up to 0.8",
    symptom=f"""\
`ImportError: cannot import name '{_NAME}' from
'{_FROM}'`: with Qwen2-VL and Qwen2.5-VL; from 0.7.0 on also when
`verl.utils.dataset.multiturn_sft_dataset` is imported, for example by `verl.trainer.sft_trainer`, with any model.""",
    cause="""\
`verl.models.transformers.qwen2_vl` imports the class at module level. transformers 5.23.0 removed the class. verl 0.9
requires `transformers<5.11`; the releases before have no upper bound.""",
    what_to_do="Pin `transformers<5.23`; for verl up to 0.7.0 pin `transformers<5` (see `verl-vision2seq`).",
    signatures=(
        Signature(
            "ImportError",
            f"cannot import name '{_NAME}' from '{_FROM}'",
            ("verl.models.transformers.qwen2_vl:<module>",),
        ),
    ),
    references=("https://github.com/verl-project/verl/blob/v0.8.0/verl/models/transformers/qwen2_vl.py",),
    variants=(
        Variant(
            Guard("verl", ">=0.4.0,<=0.9.1", co_installed=CoInstalled("transformers", ">=5.23.0,<=5.24.0")),
            (Shape("verl.models.transformers.qwen2_vl:<module>", f"from {_FROM} import {_NAME}"),),
        ),
    ),
    obsolete_when="when the oldest verl in use does not import the class",
)
