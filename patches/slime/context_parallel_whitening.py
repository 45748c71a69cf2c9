"""slime's `--normalize-advantages`: over all tokens of the batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def whiten(released: Callable[..., Any], advantages: Any, masks: Any, **options: Any) -> Any:
    """slime's own function, which every rank of the group must call, including one without tokens."""
    try:
        return released(advantages, masks, **options)
    except ValueError:  # no rank has a valid token: raised after the collective, so all ranks are here
        if masks.numel():
            raise
        return advantages


_FUNCTION = "slime.backends.megatron_utils.loss:compute_advantages_and_returns"
_REPAIRED = "mpu.get_data_parallel_group(with_context_parallel=True)"

PATCH = Patch(
    name="slime-context-parallel-whitening",
    summary="--normalize-advantages whitens over the tokens of all context-parallel ranks, and does not hang",
    harm="wrong gradient",
    bug="under context parallelism, --normalize-advantages whitens each rank's part of the sequences separately",
    when="--normalize-advantages with --context-parallel-size above 1; or a data-parallel rank without response tokens",
    symptom="""\
With `--normalize-advantages` and `--context-parallel-size` above 1, runs learn less than without context parallelism.
Two halves of one response have different advantages, some with another sign. If a rank has no token of any response
(long prompts and short answers, or only aborted responses), training hangs in an all-reduce until a timeout.""",
    cause="""\
Each context-parallel rank has two pieces of every sequence. Advantages are whitened with the mean and the variance of
the data-parallel group, whose ranks all have pieces of the same position. So the beginnings and ends have one mean, and
the pieces between have another. A rank without response tokens does not take part in the all-reduce.""",
    repair="""\
Under context parallelism, the group covers data and context parallelism, so mean and variance are those of all tokens,
as without context parallelism: (A - mean) / sqrt(var + 1e-8), with slime's own sums over the tokens of the loss mask.
Every rank takes part, with or without tokens. Without context parallelism, the group is unchanged. If no rank has a
response token, advantages are not changed, as released.

The patch does not repair v0.1.0, which whitens over all ranks and also omits a rank without tokens. main has the repair
and still has version 0.3.1: the patch is refused there, and is not needed.""",
    changes_numbers="""\
From 0.2.0 to 0.3.1, a run with `--normalize-advantages` under context parallelism had advantages with a different shift
and scale on each part of the sequences: on a small batch on two context-parallel ranks they differed by up to 0.67, and
11 of 63 had another sign. With the patch, they equal those without context parallelism. If you tuned a learning rate
without the patch, check it again. Training can continue from checkpoints.""",
    references=("https://github.com/THUDM/slime/pull/2235",),
    variants=(
        # v0.1.0 whitens over all ranks of the world. main, still with version 0.3.1, has the repair.
        Variant(
            Guard("slime", ">=0.2.0,<=0.3.1"),
            (
                Rewrite(
                    target=_FUNCTION,
                    pattern="dp_group = mpu.get_data_parallel_group()",
                    unless=(_REPAIRED,),
                    replacement="dp_group = mpu.get_data_parallel_group(with_context_parallel=cp_size > 1)",
                ),
                Rewrite(
                    target=_FUNCTION,
                    pattern="all_masks.numel() > 0",
                    unless=(_REPAIRED,),
                    replacement="True",
                ),
                Rewrite(
                    target=_FUNCTION,
                    pattern="distributed_masked_whiten($ADVANTAGES, $MASKS, process_group=dp_group, shift_mean=True)",
                    unless=(_REPAIRED,),
                    replacement=(
                        "$WHITEN(distributed_masked_whiten, $ADVANTAGES, $MASKS,"
                        " process_group=dp_group, shift_mean=True)"
                    ),
                    uses={"WHITEN": f"{__name__}:{whiten.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest slime in use has the repair: main since August 2026, still with version 0.3.1",
    conditions=(
        Condition(
            "slime.backends.megatron_utils.loss:compute_advantages_and_returns",
            f"{__package__}._conditions:whitened_in_parts",
        ),
    ),
)
