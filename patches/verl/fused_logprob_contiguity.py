"""The fused log-probability: hidden states that do not lie in one piece get their gradient."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="verl-fused-logprob-contiguity",
    summary="the fused log-probability passes its gradient on whether or not hidden states are contiguous",
    harm="wrong gradient",
    bug="hidden states that are not contiguous get no gradient: of the whole model only lm_head is trained",
    when="use_fused_kernels, and a model whose last hidden states are a slice or a transpose",
    excluded_by=("use_fused_kernels=false|absent",),
    symptom="""\
With `use_fused_kernels` and the torch backend, and hidden states that are not contiguous (a slice along the sequence, a
transpose), everything below `lm_head` has a gradient of None. The loss moves a little, since `lm_head` is trained;
under LoRA, or where `lm_head` is frozen, nothing is, or backward raises. No error otherwise.""",
    cause="""\
`FusedLinearForPPOFunction` flattens the hidden states. Of those that are contiguous that is a view, of others a copy,
and a copy made in `forward` requires no gradient. `backward` asks the copy.""",
    repair="""\
The copy requires a gradient where the hidden states do, as in 0.9.0. Where they are contiguous nothing changes: the
numbers are bit for bit what they were.""",
    changes_numbers="""\
With the fused log-probability on hidden states that are not contiguous, verl 0.4.0 to 0.8.0 trained `lm_head` alone.
With the patch the whole model is trained. Such a run should be begun again.""",
    references=(
        "https://github.com/verl-project/verl/pull/6913",
        "https://github.com/verl-project/verl/issues/3765",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.4.0,<0.9.0"),
            (
                Rewrite(
                    target="verl.utils.experimental.torch_functional:FusedLinearForPPOFunction.forward",
                    pattern="hidden_states = hidden_states.flatten(0, 1)",
                    # Of a view that is what it says already.
                    replacement=(
                        "hidden_states = hidden_states.flatten(0, 1).requires_grad_(hidden_states.requires_grad)"
                    ),
                    unless=("$STATES.requires_grad_($$$)",),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use is 0.9.0",
)
