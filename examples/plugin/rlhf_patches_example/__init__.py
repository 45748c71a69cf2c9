"""One patch of a framework that is not among the built-in ones. It is never imported by name: rlhf_patches finds it."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant, hookimpl

MASKED_MEAN = Patch(
    name="toy-masked-mean",
    summary="The mean loss of masked tokens does not count the padding",
    harm="wrong gradient",
    bug="The mean loss of masked tokens counts the padding",
    when="Sequences of different lengths in a batch",
    symptom="The reported loss shrinks as sequences are padded to a greater length.",
    cause="`masked_mean` divides by the number of all tokens instead of the number of those that the mask keeps.",
    repair="Divides by the sum of the mask, where that is not 0. Without padding nothing changes.",
    references=("https://example.invalid/toy-framework/issues/1",),
    variants=(
        Variant(
            Guard("toy-framework", ">=1.0,<2.0"),
            (Rewrite("toy_framework.losses:masked_mean", "$TOTAL / len($LOSSES)", "$TOTAL / (sum(mask) or 1)"),),
        ),
    ),
    obsolete_when="When toy-framework 1.x is no longer in use.",
)


@hookimpl
def rlhf_patches() -> list[Patch]:
    """The patches of this distribution."""
    return [MASKED_MEAN]
