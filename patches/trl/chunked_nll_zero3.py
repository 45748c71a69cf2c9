"""``SFTTrainer(loss_type="chunked_nll")`` under DeepSpeed ZeRO-3: one gather of the head per pass, not per chunk."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Signature, Variant, Wrap

TARGET = "trl.trainer.sft_trainer:_chunked_cross_entropy_loss"

PATCH = Patch(
    name="trl-chunked-nll-zero3",
    summary="SFT with loss_type='chunked_nll' runs under DeepSpeed ZeRO-3 with a partitioned output head",
    harm="hang",
    bug="ranks wait for each other forever, or the first step raises",
    when="SFTTrainer with loss_type chunked_nll under ZeRO-3",
    excluded_by=("zero_optimization.stage=absent|0|1|2", "loss_type=nll|dft", "trl=dpo|grpo|kto|reward|rloo"),
    symptom="""\
`SFTTrainer` with `loss_type="chunked_nll"` under DeepSpeed ZeRO-3:

- trl 1.4.0 to 1.5.1: `RuntimeError: size mismatch, got input (99), mat (99x16), vec (0)` from `_chunk`;
- trl 1.6.0 to 1.14.2: the first step hangs (until the process group's timeout) as soon as ranks have different numbers
  of chunks, because completion-only or assistant-only masks leave them different numbers of tokens. Or, if the head
  is trained, backward raises `RuntimeError: The size of tensor a (0) must match the size of tensor b (16)`, or
  `returned an invalid gradient at index 0 - got [64, 16] but expected shape compatible with [0]`.

In a run of `SFTTrainer` the bug occurs only if DeepSpeed does not gather the head by itself: with `torch_compile`, for
example, DeepSpeed does not notice that the weight is read.""",
    cause="""\
The loss reads `lm_head.weight` without calling the module `lm_head`. ZeRO-3 gathers the weight only if it notices the
read (DeepSpeed's discovery of external parameters). 1.5.1 and earlier multiply with the empty partition. 1.6.0 and
later gather within each chunk, in forward and again in backward. A rank then runs twice as many collectives as it has
chunks, and ranks with fewer chunks leave the others waiting. Autograd also records the shape of the weight's gradient
before the gather.""",
    repair="""\
If ZeRO-3 manages the head, the patch replaces the loop over the chunks by one autograd function. It gathers the head
(weight and bias together) once in forward and once in backward, on every rank, with or without tokens; it does not
gather a head that is gathered already. The patch calls the release's own `_chunk` with the release's chunk sizes and
order of summation, so results are the same bit for bit, with one exception: on a rank without any valid token, NaN or
infinite hidden states give 0, where TRL returns a NaN loss (1.5.1) or a NaN entropy and gradient (1.14.2). In backward
the head stays gathered until its gradient is accumulated, and DeepSpeed reduces that gradient like all others. Without
ZeRO-3 (DDP, FSDP2, one process) the original function runs.""",
    # In 1.6.0 and later autograd raises in backward, without a frame of TRL's.
    signatures=(Signature("RuntimeError", "size mismatch, got input", frames=(TARGET,), specific=False),),
    references=(
        "https://github.com/huggingface/trl/issues/6696",
        "https://github.com/huggingface/trl/pull/5873",
        "https://github.com/huggingface/trl/pull/6694",
        "https://github.com/huggingface/trl/pull/6698",
    ),
    variants=(
        Variant(
            Guard("trl", ">=1.4.0,<1.15.0"),
            (
                Wrap(
                    target=TARGET,
                    implementation=f"{__package__}._chunked_head:around_nll",
                    fingerprints={
                        "049d735a374630d9": "1.4.0 to 1.5.1: no gather",
                        "7aae60e97f5d4b57": "1.6.0 to 1.7.1: gathers in each chunk",
                        "8523748fe2b17e15": "1.8.0: static shapes",
                        "e05f4e153a955ab1": "1.9.0 to 1.10.0",
                        "9df531774182647a": "1.11.0 to 1.14.2: at least one chunk",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.15, which fuses the loss and gathers once",
    conditions=(Condition(TARGET),),  # False without ZeRO-3; with it DeepSpeed may gather the head itself
)
