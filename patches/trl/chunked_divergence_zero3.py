"""``DistillationTrainer`` under DeepSpeed ZeRO-3: one gather of both heads per pass, not two per chunk."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

TARGET = "trl.trainer.distillation_trainer:_chunked_divergence_loss"

PATCH = Patch(
    name="trl-chunked-divergence-zero3",
    summary="DistillationTrainer runs under DeepSpeed ZeRO-3 with partitioned output heads",
    harm="hang",
    bug="ranks wait for each other forever, or backward raises",
    when="DistillationTrainer under ZeRO-3",
    excluded_by=("zero_optimization.stage=absent|0|1|2", "trl=sft|dpo|grpo|kto|reward|rloo"),
    symptom="""\
`DistillationTrainer` of trl 1.10.0 to 1.14.2 under DeepSpeed ZeRO-3: a step hangs (until the process group's timeout)
as soon as ranks have different numbers of chunks, because their completions differ in length. Or backward raises
`RuntimeError: The size of tensor a (0) must match the size of tensor b` if the student's head is trained and DeepSpeed
has not discovered that it is read.""",
    cause="""\
`_chunked_divergence_loss` gathers the student's head and the teacher's within each chunk, in forward and again in
backward. A rank runs four times as many collectives as it has chunks, and ranks with fewer chunks leave the others
waiting. The trainer reads the teacher's head after the teacher's forward pass, where DeepSpeed does not discover the
read.""",
    repair="""\
The repair is that of `trl-chunked-nll-zero3`: if ZeRO-3 manages one of the heads, the patch replaces the loop over the
chunks by one autograd function. It gathers each head once in forward and once in backward, on every rank; it does not
gather a head that is gathered already. The patch calls the release's own `_chunk`, so results are the same bit for
bit, with one exception: on a rank without any valid token, NaN or infinite hidden states give 0, where TRL's loss,
entropy and gradient are NaN (1.14.2). Without ZeRO-3 the original function runs.""",
    references=(
        "https://github.com/huggingface/trl/pull/6698",
        "https://github.com/huggingface/trl/issues/6696",
    ),
    variants=(
        Variant(
            Guard("trl", ">=1.10.0,<1.15.0"),
            (
                Wrap(
                    target=TARGET,
                    implementation=f"{__package__}._chunked_head:around_divergence",
                    fingerprints={
                        "c4ef116d3690c7b8": "1.10.0",
                        "a054e2695a826a96": "1.11.0 to 1.12.0: at least one chunk",
                        "62c2de8dbb288f54": "1.13.0 to 1.14.2: multiplies in the hidden states' dtype",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.15, which fuses the loss and gathers once",
    conditions=(Condition(TARGET),),  # False without ZeRO-3; with it DeepSpeed may gather the head itself
)
