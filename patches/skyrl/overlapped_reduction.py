"""An advice for SkyRL's Megatron workers with overlap_grad_reduce and a changing number of micro-batches."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_TARGET = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper:MegatronModelWrapper"

ADVICE = Advice(
    name="skyrl-overlapped-reduction",
    summary="with overlap_grad_reduce, gradients are reduced too early if the number of micro-batches changes",
    harm="wrong gradient",
    bug="gradients are reduced over ranks before the last micro-batch, or the step raises",
    when="Megatron with ddp_config.overlap_grad_reduce=true, and steps with different numbers of micro-batches",
    excluded_by=("trainer.strategy=fsdp|fsdp2",),
    symptom="""\
SkyRL with Megatron and `trainer.policy.megatron_config.ddp_config.overlap_grad_reduce=true`, which is not the default:
if a step has more micro-batches than the first step of the run, the gradients of the last ones stay on their rank.
Ranks then train on different gradients. There is no error. If it has fewer, megatron-core raises `AssertionError:
Communication call has not been issued for this bucket`. The number changes with `max_tokens_per_microbatch`, and with
batches that are not full.""",
    cause="""\
megatron-core reduces a bucket of gradients once each of its parameters has had as many gradients as in the first step,
unless a trainer disables that for all micro-batches but the last by `no_sync_func`. SkyRL sets none.""",
    what_to_do="""\
Leave `overlap_grad_reduce` false. A run is reported when a step has another number of micro-batches than the first.""",
    references=("https://github.com/NovaSky-AI/SkyRL/pull/2146",),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<=0.4.0"),
            (
                Shape(
                    f"{_TARGET}.forward_backward_mini_batch",
                    "forward_backward_func = get_forward_backward_func()",
                    unless=("$A.no_sync()", "$A.no_sync_func"),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest SkyRL in use disables the reduction until the last micro-batch; 0.4.0 does not",
    conditions=(Condition(f"{_TARGET}.forward_backward_mini_batch", f"{__package__}._conditions:reduces_too_early"),),
)
