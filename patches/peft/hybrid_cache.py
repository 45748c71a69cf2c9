"""PEFT 0.16 and 0.17 with transformers 5, which has no `HybridCache`: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

ADVICE = Advice(
    name="peft-hybrid-cache",
    summary="PEFT 0.16 and 0.17 cannot be imported with transformers 5",
    harm="crash",
    bug="PEFT 0.16 and 0.17 cannot be imported with transformers 5",
    when="peft 0.16.0 to 0.17.1 with transformers from 5 on, which pip and uv choose for it",
    symptom="""\
`import peft`, and code that imports it (TRL, verl, transformers' Trainer with an adapter), raises `ImportError: cannot
import name 'HybridCache' from 'transformers'`.""",
    cause="""\
`peft.peft_model` imports the class at its top. transformers 5.0.0 no longer has it. Prefix tuning of Gemma creates
such a cache, so with a stand-in of that name the import would pass and prefix tuning would fail.""",
    what_to_do="Use peft 0.18.0 or later, or pin `transformers<5`.",
    signatures=(
        Signature("ImportError", "cannot import name 'HybridCache' from 'transformers'", ("peft.peft_model:<module>",)),
    ),
    references=(
        "https://github.com/huggingface/peft/issues/3333",
        "https://github.com/huggingface/transformers/issues/44351",
    ),
    variants=(
        Variant(
            Guard("peft", ">=0.16.0,<=0.17.1", co_installed=CoInstalled("transformers", ">=5.0.0rc3,<=5.24.0")),
            (Shape("peft.peft_model:<module>", "from transformers import HybridCache"),),
        ),
    ),
    obsolete_when="when the oldest PEFT in use is 0.18.0",
)
