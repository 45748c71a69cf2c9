"""PEFT from 0.15 on with accelerate before 0.32, which has no `clear_device_cache`: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

ADVICE = Advice(
    name="peft-clear-device-cache",
    summary="PEFT from 0.15 on cannot be imported with accelerate before 0.32",
    harm="crash",
    bug="PEFT from 0.15 on cannot be imported with accelerate before 0.32",
    when="peft 0.15.0 to 0.21.2 with accelerate before 0.32, which its metadata allow",
    symptom="""\
`import peft`, and code that imports it (transformers' Trainer, TRL, diffusers), raises `ImportError: cannot import
name 'clear_device_cache' from 'accelerate.utils.memory'`.""",
    cause="""\
`peft.utils.loftq_utils` imports the function at its top. accelerate has it since 0.32.0, and PEFT requires only
`accelerate>=0.21.0`.""",
    what_to_do="Use accelerate 0.32.0 or later, or pin `peft<0.15`.",
    signatures=(
        Signature(
            "ImportError",
            "cannot import name 'clear_device_cache' from 'accelerate.utils.memory'",
            ("peft.utils.loftq_utils:<module>",),
        ),
    ),
    references=("https://github.com/hiyouga/LlamaFactory/issues/8142",),
    variants=(
        Variant(
            Guard("peft", ">=0.15.0,<=0.21.2", co_installed=CoInstalled("accelerate", ">=0.21.0,<0.32.0")),
            (Shape("peft.utils.loftq_utils:<module>", "from accelerate.utils.memory import clear_device_cache"),),
        ),
    ),
    obsolete_when="when the oldest accelerate in use is 0.32.0",
)
