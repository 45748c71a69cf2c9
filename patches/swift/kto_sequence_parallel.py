"""KTO in ms-swift's Megatron trainer: slices of the pipeline's input, under sequence parallelism."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Signature, Variant

from .. import _released

_NAME = "swift-kto-sequence-parallel"


def length_on_this_rank(length: Any, trainer: Any) -> Any:
    """The number of positions of the pipeline's input that this tensor-parallel rank holds for one part of the batch.

    Args:
        length: of the whole part, in tokens: an int, or a tensor without dimensions.
        trainer: its argument ``sequence_parallel`` is read.
    """
    if not trainer.args.sequence_parallel:
        return length
    # known: a user's own version of either has its own arguments, or may divide already.
    if other := _released.others(trainer, "_get_kto_length", "_get_input_tensor", packages=("swift",)):
        _released.stays(_NAME, f"{other} is not ms-swift's own", "the pipeline's input")
        return length
    from megatron.core import parallel_state

    return length // parallel_state.get_tensor_model_parallel_world_size()


PATCH = Patch(
    name=_NAME,
    summary="MegatronKTOTrainer slices the pipeline's input by the length on a sequence-parallel rank",
    harm="crash",
    bug="every pipeline stage but the first slices the input of the reference pass and the KL pass wrongly",
    when="Megatron KTO with pipeline and sequence parallelism",
    excluded_by=("rlhf_type=dpo|grpo|gkd|rm", "pipeline_model_parallel_size=1"),
    symptom="""\
KTO (`megatron rlhf --rlhf_type kto`) with pipeline parallelism and `--sequence_parallel true`: on every pipeline stage
but the first, the slices for the reference and the KL passes are wrong or empty. TransformerEngine raises "Input x is
not allocated!"; other layers raise for shapes, or continue with the wrong tokens.""",
    cause="""\
The stages exchange one tensor, `[policy; reference; policy KL; reference KL]` on dimension 0, the sequence. Under
sequence parallelism, each tensor-parallel rank holds its share of each part, but `forward_step` slices by the length of
the whole part.""",
    repair="""\
The length that `forward_step` slices by is divided by the tensor-parallel size if `args.sequence_parallel` is set, as
in 3.12.3. The patch does not change the loss, which slices the last stage's output (whole sequences), or a trainer with
its own `_get_kto_length` or `_get_input_tensor`, which may have the repair. 3.9.0 to 3.11.3 have the bug of 3.12.0 in
another form. The patch does not see your own `get_input_tensor` or `set_input_tensor` of the model: if they hand out
whole parts, disable it. It does not repair that 3.9.0 to 3.10.0 also ignore context parallelism in this line.""",
    signatures=(Signature("RuntimeError", "cannot reshape tensor of 0 elements", specific=False, raised_below=True),),
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
