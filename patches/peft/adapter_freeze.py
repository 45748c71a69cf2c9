"""PEFT: adding an adapter changes which of the other adapters are trainable."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

PATCH = Patch(
    name="peft-adapter-freeze",
    summary="loading a second adapter leaves the existing ones as trainable as they were",
    harm="wrong gradient",
    bug="loading a second, frozen adapter freezes the adapter in training",
    when="load_adapter() of a reference in addition to a trainable adapter",
    excluded_by=("use_peft=false|absent",),
    symptom="""\
A policy with a trainable adapter gets a frozen one for the reference: `load_adapter(path, adapter_name="reference")`.
From then on no parameter is trainable: PyTorch raises "element 0 of tensors does not require grad". If other
parameters are trained too (a value head, `modules_to_save` of a wrapper), there is no error, and the adapter never
changes.

Conversely, a frozen active adapter becomes trainable when another one is loaded with `is_trainable=True`, or created
by `add_adapter`.""",
    cause="""\
Since 0.18.0 `inject_adapter` ends with `set_adapter(active adapters, inference_mode of the new adapter)`, and each
layer that gets the new adapter does the same: the active adapters then have the new adapter's mode.""",
    repair="""\
The patch restores `requires_grad` of all parameters that existed before `inject_adapter`, as in 0.21.0. The new
adapter, which is not active yet, is left as the release has it: frozen until `set_adapter`. (0.21.0 also makes it
trainable at once if it was loaded with `is_trainable=True`.)

The patch does not change the first adapter, which freezes the base model, and `inject_adapter_in_model`, which
activates the new adapter. Not repaired: before 0.18.0 no adapter is frozen, but a frozen active adapter becomes
trainable.""",
    references=(
        "https://github.com/huggingface/peft/pull/3495",
        "https://github.com/huggingface/peft/issues/3487",
        "https://github.com/huggingface/peft/issues/3580",
    ),
    variants=(
        Variant(
            Guard("peft", ">=0.18.0rc0,<0.21.0"),
            (
                Wrap(
                    target="peft.tuners.tuners_utils:BaseTuner.inject_adapter",
                    implementation=f"{__package__}._requires_grad:of_the_others",
                    fingerprints={
                        "432fb89f9f592366": "0.18.0rc0 to 0.18.1",
                        "264720142e726286": "0.19.0 to 0.20.0",
                    },
                ),
            ),
        ),
    ),
    changes_numbers="""\
Since 0.18.0 a frozen adapter that was loaded later has stopped the training of an adapter, and a later adapter has
made a frozen one trainable: if that was not intended, repeat such a run. A run that called `set_adapter` or
`set_requires_grad` afterwards is as it was.""",
    obsolete_when="when the oldest PEFT in use is 0.21.0",
    conditions=(Condition("peft.tuners.tuners_utils:BaseTuner.inject_adapter"),),
)
