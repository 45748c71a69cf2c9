"""KTO in ms-swift's Megatron trainer: slices of the pipeline's input, under sequence parallelism."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Signature, Variant

from .. import _released

_NAME = "swift-kto-sequence-parallel"


def length_on_this_rank(length: Any, trainer: Any) -> Any:
    """How many positions of the pipeline's input this tensor-parallel rank holds of one part of the batch.

    Args:
        length: of the whole part, in tokens: an int, or a tensor without dimensions.
        trainer: of its arguments ``sequence_parallel`` is read.
    """
    if not trainer.args.sequence_parallel:
        return length
    # known: a user's own of either has what it takes, or may divide already.
    if other := _released.others(trainer, "_get_kto_length", "_get_input_tensor", packages=("swift",)):
        _released.stays(_NAME, f"{other} is not ms-swift's own", "the pipeline's input")
        return length
    from megatron.core import parallel_state

    return length // parallel_state.get_tensor_model_parallel_world_size()


PATCH = Patch(
    name=_NAME,
    summary="MegatronKTOTrainer slices the pipeline's input by what a sequence-parallel rank holds",
    harm="crash",
    bug="pipeline stages but the first slice the reference's and the KL's input wrongly",
    when="Megatron KTO with pipeline and sequence parallelism",
    excluded_by=("rlhf_type=dpo|grpo|gkd|rm", "pipeline_model_parallel_size=1"),
    symptom="""\
KTO (`megatron rlhf --rlhf_type kto`) with pipeline parallelism and `--sequence_parallel true`: on every pipeline
stage but the first, the slices for the reference and the KL passes are wrong or empty. TransformerEngine stops with
"Input x is not allocated!"; other layers fail on shapes, or go on with the wrong tokens.""",
    cause="""\
The stages exchange one tensor, `[policy; reference; policy KL; reference KL]` on dimension 0, the sequence. Under
sequence parallelism each tensor-parallel rank holds its share of each part, but `forward_step` slices by the length
of the whole part.""",
    repair="""\
The length that `forward_step` slices by is divided by the tensor-parallel size when `args.sequence_parallel` is set,
as 3.12.3 does. The loss, which slices the last stage's output (whole sequences), is left alone, and so is a trainer
with a `_get_kto_length` or a `_get_input_tensor` of its own, which may have the repair. 3.9.0 to 3.11.3 have the defect
of 3.12.0 in another form. Not repaired: 3.9.0 to 3.10.0 forget context parallelism in this line too.""",
    signatures=(Signature("RuntimeError", "cannot reshape tensor of 0 elements", specific=False),),
    references=("https://github.com/modelscope/ms-swift/pull/7882",),
    variants=(
        Variant(
            Guard("ms-swift", ">=3.9.0,<3.12.3"),
            (
                Rewrite(
                    target="swift.megatron.trainers.kto_trainer:MegatronKTOTrainer.forward_step",
                    pattern="length = $LENGTH",
                    alongside=("$REF.set_input_tensor(self._get_input_tensor(input_tensor, $KL, True, length, 0))",),
                    unless=("length //= $SIZE",),
                    replacement="length = $LENGTH_ON_THIS_RANK($LENGTH, self)",
                    uses={"LENGTH_ON_THIS_RANK": f"{__name__}:{length_on_this_rank.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest ms-swift in use is 3.12.3",
)
