"""PEFT: adding an adapter changes which of the others are trainable."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

PATCH = Patch(
    name="peft-adapter-freeze",
    summary="loading a second adapter leaves those that are there as trainable as they were",
    harm="wrong gradient",
    bug="loading a second, frozen adapter freezes the one in training",
    when="load_adapter() of a reference beside a trainable adapter",
    symptom="""\
A policy with a trainable adapter gets a frozen one for the reference: `load_adapter(path, adapter_name="reference")`.
From then on no parameter is trainable: "element 0 of tensors does not require grad", or, where something else is
trained too (a value head, `modules_to_save` of a wrapper), no error, and an adapter that never changes.

The other way round, a frozen adapter that is active becomes trainable when another one is loaded with
`is_trainable=True`, or made by `add_adapter`.""",
    cause="""\
Since 0.18.0 `inject_adapter` ends with `set_adapter(active adapters, inference_mode of the new adapter)`, and each
layer that gets the new adapter does the same: the new adapter's mode is that of the active ones from then on.""",
    repair="""\
Parameters that were there before `inject_adapter` have the `requires_grad` that they had when it is left, as in
0.21.0. The new adapter, which is not active yet, is left as the release has it: frozen until `set_adapter`. (0.21.0
also makes it trainable at once where it was loaded with `is_trainable=True`.)

Not touched: the first adapter, which freezes the base model, and `inject_adapter_in_model`, which makes the new adapter
the active one. Before 0.18.0 nothing is frozen, but a frozen active adapter becomes trainable; not repaired.""",
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
Since 0.18.0 an adapter beside which a frozen one was loaded has not been trained, and a frozen one beside which another
was loaded has been: a run that did either has to be trained again if that was not meant, and one that called
`set_adapter` or `set_requires_grad` afterwards is as it was.""",
    obsolete_when="when the oldest PEFT in use is 0.21.0",
    conditions=(Condition("peft.tuners.tuners_utils:BaseTuner.inject_adapter"),),
)
