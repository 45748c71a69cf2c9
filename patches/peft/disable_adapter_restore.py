"""PEFT: leaving ``disable_adapter()`` makes every active adapter trainable."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

PATCH = Patch(
    name="peft-disable-adapter-restore",
    summary="disable_adapter() restores which parameters are trainable",
    harm="wrong gradient",
    bug="disable_adapter() leaves frozen parameters trainable",
    when="frozen adapters, or partly frozen ones, and the policy without its adapter as the reference",
    excluded_by=("use_peft=false|absent",),
    symptom="""\
A run uses the policy without its adapter as the reference: `with model.disable_adapter():`. Afterwards frozen
parameters of the active adapters are trainable. Examples are a frozen adapter of an earlier stage beside the one in
training, an adapter in inference mode, and parts that you have frozen (`lora_A`). Their gradients count in the clipping
norm. They accumulate from step to step if the run sets only the gradients of the optimizer's own parameters to zero. An
optimizer that is created afterwards trains these parameters.""",
    cause="""\
On exit the context calls `enable_adapter_layers`, which calls `set_adapter(active adapters)`. This makes the adapters
trainable, without `inference_mode`, and without checking the previous state.""",
    repair="""\
On exit from the context, normally or by an exception, the patch restores `requires_grad` of each parameter of adapters
in layers whose adapters were enabled. Contexts may be nested or overlap. Left as released: a parameter that was made
trainable within the context, a layer whose active adapter was switched within the context, and layers that were
disabled before (if only some were, PEFT enables all, and warns). `enable_adapter_layers`, called by itself, is not
changed. PEFT 0.6 to 0.10 have the bug too.""",
    references=(
        "https://github.com/huggingface/peft/issues/3447",
        "https://github.com/huggingface/peft/pull/3453",
    ),
    variants=(
        Variant(
            Guard("peft", ">=0.11.0,<=0.21.2"),
            (
                Wrap(
                    target="peft.peft_model:PeftModel.disable_adapter",
                    implementation=f"{__package__}._requires_grad:after_disabling",
                    fingerprints={
                        "ef1972fab50bf1fa": "0.11.0 to 0.18.0rc0",
                        "4cf9e6921c04116d": "0.18.0 to 0.20.0",
                        "c9d2ec9207586799": "0.21.0 to 0.21.2: nested contexts",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest PEFT in use does not change requires_grad there; no release so far does",
    changes_numbers="""\
In every release since 0.6 gradients of frozen parts of active adapters have counted in the clipping norm from the first
reference pass on. With the patch the norm is smaller and a clipped step larger; a run without frozen parts does not
change.""",
    conditions=(Condition("peft.peft_model:PeftModel.disable_adapter"),),
)
