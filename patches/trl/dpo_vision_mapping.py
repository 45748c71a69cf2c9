"""TRL's DPO before 0.23 with transformers 5, which has a different list of vision models: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_NAME, _FROM = "MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES", "transformers.models.auto.modeling_auto"
_MODULE = "trl.trainer.dpo_trainer:<module>"

ADVICE = Advice(
    name="trl-dpo-vision-mapping",
    summary="DPO of TRL before 0.23 cannot be imported with transformers 5",
    harm="crash",
    bug="DPO of TRL before 0.23 cannot be imported with transformers 5",
    when="DPO of trl 0.9.6 to 0.22.2 with transformers from 5 on, which pip and uv choose for it",
    symptom=f"""\
`from trl import DPOTrainer` (and code that imports it: `trl dpo`, ms-swift, LlamaFactory) raises `ImportError: cannot
import name '{_NAME}' from '{_FROM}'`.""",
    cause="""\
`trl.trainer.dpo_trainer` imports the mapping at its top, and looks up in it whether a model is a vision model.
transformers 5.0.0 no longer has it. Another mapping in its place would decide differently for some models (Gemma 3,
for example), so no patch inserts one.""",
    what_to_do="Pin `transformers<5`, or use trl 0.29.0 or later, or 0.23 to 0.28 with `trl-optional-packages` on.",
    signatures=(Signature("ImportError", f"cannot import name '{_NAME}' from '{_FROM}'", (_MODULE,)),),
    references=(
        "https://github.com/modelscope/ms-swift/issues/9343",
        "https://github.com/huggingface/trl/issues/3982",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.9.6,<=0.22.2", co_installed=CoInstalled("transformers", ">=5.0.0rc3,<=5.24.0")),
            (Shape(_MODULE, f"from {_FROM} import {_NAME}"),),
        ),
    ),
    obsolete_when="when the oldest TRL in use is 0.23.0",
)
