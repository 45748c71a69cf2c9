"""verl's fused log-probability: hidden states that are not contiguous get their gradient."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "verl.utils.experimental.torch_functional:FusedLinearForPPOFunction.forward"

PATCH = Patch(
    name="verl-fused-logprob-contiguity",
    summary="the fused log-probability returns a gradient for hidden states that are not contiguous, too",
    harm="wrong gradient",
    bug="hidden states that are not contiguous get no gradient: only lm_head is trained",
    when="use_fused_kernels, and a model whose last hidden states are a slice or a transpose",
    excluded_by=("use_fused_kernels=false|absent",),
    symptom="""\
With `use_fused_kernels` and the torch backend, and hidden states that are not contiguous (a slice along the sequence, a
transpose), everything below `lm_head` has a gradient of None. The loss moves slightly, since `lm_head` is trained.
Under LoRA, or where `lm_head` is frozen, nothing is trained, or backward raises. Otherwise there is no error.""",
    cause="""\
`FusedLinearForPPOFunction` flattens the hidden states. The result is a view of contiguous hidden states and a copy of
others, and a copy made in `forward` requires no gradient. `backward` reads `requires_grad` from the copy.""",
    repair="""\
The copy requires a gradient where the hidden states do, as in 0.9.0. Results for contiguous hidden states are bitwise
identical.""",
    changes_numbers="""\
With the fused log-probability on hidden states that are not contiguous, verl 0.4.0 to 0.8.0 trained `lm_head` alone.
With the patch the whole model is trained. Restart such a run from the beginning.""",
    references=(
        "https://github.com/verl-project/verl/pull/6913",
        "https://github.com/verl-project/verl/issues/3765",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.4.0,<0.9.0"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="hidden_states = hidden_states.flatten(0, 1)",
                    # A view already requires a gradient where its base does.
                    replacement=(
                        "hidden_states = hidden_states.flatten(0, 1).requires_grad_(hidden_states.requires_grad)"
                    ),
                    unless=("$STATES.requires_grad_($$$)",),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use is 0.9.0",
    conditions=(Condition(_TARGET, f"{__package__}._conditions:flattens_to_a_copy"),),
)
