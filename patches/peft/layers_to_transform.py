"""LoRA on some layers of a mixture of experts: the layer's number counts, not the expert's."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_TARGET = "peft.tuners.tuners_utils:check_target_module_exists"


def _first_number(first: str, fixed: str, of_a_pattern: str) -> Variant:
    texts = (r'r".*\.[^.]*\.(\d+)\."', of_a_pattern)
    changes = (
        Rewrite(_TARGET, f"re.match({text}, key)", f"re.match({text.replace('.*', '.*?', 1)}, key)") for text in texts
    )
    return Variant(Guard("peft", f">={first},<{fixed}"), tuple(changes))


PATCH = Patch(
    name="peft-layers-to-transform",
    summary="layers_to_transform means layers in a mixture of experts too",
    harm="wrong weights",
    bug="layers_to_transform takes an expert's number for its layer's: other modules are adapted",
    when="LoraConfig or another one with layers_to_transform, and target_modules within experts that are modules",
    never_with=("layers_to_transform=absent",),
    symptom="""\
With `layers_to_transform=[1]` and targets within the experts of a mixture (`model.layers.0.mlp.experts.1.up_proj`),
expert 1 of every layer is adapted, and of layer 1 nothing but that. No error; `print_trainable_parameters` shows
another number. Attention, dense layers and mixtures whose experts are one tensor are right.""",
    cause="""\
`check_target_module_exists` looks for the number of the layer with `.*`, which takes as much of the name as it can, so
that the last number of the name counts.""",
    repair="""\
The first number counts, as in 0.20.0. With names that have one number nothing changes, and the same modules are adapted
as before.

An adapter that was trained with the bug has weights for other modules than it has with the patch: PEFT says which keys
are missing or unexpected when it is loaded, as 0.20.0 does. Load it with the patch off:
`RLHF_PATCHES_DISABLE=peft-layers-to-transform`.""",
    changes_numbers="""\
Adapters on some layers of a mixture of experts, PEFT 0.8.0 to 0.19.1, were on the experts of these numbers in all
layers. With the patch they are on the layers. A run that was trained so should be begun again, or go on without it.""",
    references=("https://github.com/huggingface/peft/pull/3318",),
    variants=(
        _first_number("0.8.0", "0.9.0", r'r".*\.{layer}\.(\d+)\.".format(layer=pattern)'),
        _first_number("0.9.0", "0.20.0", r'rf".*\.{pattern}\.(\d+)\."'),
    ),
    retire="when the oldest peft in use is 0.20.0",
)
