"""PEFT: leaving ``disable_adapter()`` makes every active adapter trainable."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

PATCH = Patch(
    name="peft-disable-adapter-restore",
    summary="after disable_adapter() those parameters are trainable that were before",
    harm="wrong gradient",
    bug="disable_adapter() leaves frozen parameters trainable",
    when="adapters or parts of one that are frozen, and the policy without its adapter as the reference",
    symptom="""\
The policy without its adapter is the reference: `with model.disable_adapter():`. Afterwards frozen parameters of the
active adapters are trainable: a frozen adapter beside the one in training (a first stage's), an adapter in inference
mode, parts that were frozen by hand (`lora_A`). Their gradients enter the norm by which clipping divides, and add up
from step to step where only the optimizer's own are set to zero; an optimizer that is made afterwards trains them.""",
    cause="""\
Leaving the context calls `enable_adapter_layers`, and that `set_adapter(active adapters)`, which makes them trainable:
without `inference_mode`, and without a look at what was before.""",
    repair="""\
When the context is left, normally or by an exception, each parameter of adapters in layers whose adapters were enabled
has the `requires_grad` that it had. Contexts may be nested or overlap. Left as released: a layer whose active adapter
was switched within the context, and layers that were disabled before (of some enabled and some disabled ones PEFT
enables all, and warns). `enable_adapter_layers`, called by itself, is not changed. PEFT 0.6 to 0.10 have the defect
too.""",
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
    obsolete_when="when the oldest PEFT in use leaves requires_grad as it was; none released so far does",
    changes_numbers="""\
In every release since 0.6 gradients of frozen parts of active adapters have counted in the clipping norm from the first
reference pass on. With the patch the norm is smaller and a clipped step larger; a run without frozen parts is as it
was.""",
    conditions=(Condition("peft.peft_model:PeftModel.disable_adapter"),),
)
