"""LoRA on some layers of a mixture of experts: the layer's number decides, not the expert's."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "peft.tuners.tuners_utils:check_target_module_exists"


_LAST = r'r".*\.[^.]*\.(\d+)\."'
_NOT_AN_EXPERT = r'r"(?:.*\.(?!\w*experts\.)[^.]*|.*\.[^.]*)\.(\d+)\."'
_CHANGES = (Rewrite(_TARGET, f"re.match({_LAST}, key)", f"re.match({_NOT_AN_EXPERT}, key)"),)

PATCH = Patch(
    name="peft-layers-to-transform",
    summary="layers_to_transform selects layers in a mixture of experts too",
    harm="wrong weights",
    bug="layers_to_transform matches an expert's number instead of its layer's: the wrong modules are adapted",
    when=(
        "LoraConfig or another config with layers_to_transform,"
        " and target_modules within experts that are modules of their own"
    ),
    excluded_by=("layers_to_transform=absent", "use_peft=false|absent", "model_family=qwen2|qwen3|llama|mistral"),
    symptom="""\
With `layers_to_transform=[1]` and targets within the experts of a mixture (`model.layers.0.mlp.experts.1.up_proj`),
PEFT adapts expert 1 of every layer, and no other expert of layer 1. No error; `print_trainable_parameters` shows
another number. Attention, dense layers and mixtures whose experts are one tensor are not affected.""",
    cause="""\
`check_target_module_exists` searches the number of the layer with `.*`, which matches greedily, so the last number of
the name counts.""",
    repair="""\
The patch uses the last number that does not follow `experts`, or another name that ends with `experts`
(`local_experts`). Names without experts keep the number that PEFT used, also with a number before the layers
(`net.members.0.layers.2.q_proj`), and in T5, whose sub-layer counts. So do names that have no number but an expert's,
and names that `layers_pattern` matches.

Not repaired: an expert that has numbered parts itself, and names that begin with the layers, as in a model without a
head (`layers.0.mlp.experts.1.up_proj`). There the number of the expert counts, as without the patch.

An adapter that was trained with the bug has weights for other modules than with the patch: on loading, PEFT reports
which keys are missing or unexpected, as 0.20.0 does. Load it with the patch off:
`RLHF_PATCHES_DISABLE=peft-layers-to-transform`.""",
    changes_numbers="""\
PEFT 0.8.0 to 0.19.1 put adapters for some layers of a mixture of experts on the experts with these numbers, in all
layers. With the patch the adapters are on the experts of these layers. Restart a run that was trained without the
patch, or continue it without the patch.""",
    references=("https://github.com/huggingface/peft/pull/3318",),
    variants=(Variant(Guard("peft", ">=0.8.0,<0.20.0"), _CHANGES),),
    obsolete_when="when the oldest peft in use is 0.20.0",
    conditions=(Condition(_TARGET, f"{__package__}._conditions:taken_for_another_layer"),),
)
