"""slime's `--normalize-advantages`: over all tokens of the batch, whichever rank has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def whiten(released: Callable[..., Any], advantages: Any, masks: Any, **options: Any) -> Any:
    """slime's own function, which every rank of the group has to call: one without tokens too."""
    try:
        return released(advantages, masks, **options)
    except ValueError:  # no rank has a token that counts: after the collective, so all ranks are here
        if masks.numel():
            raise
        return advantages


_FUNCTION = "slime.backends.megatron_utils.loss:compute_advantages_and_returns"
_REPAIRED = "mpu.get_data_parallel_group(with_context_parallel=True)"

PATCH = Patch(
    name="slime-context-parallel-whitening",
    summary="--normalize-advantages whitens over the tokens of all context-parallel ranks, and hangs on none",
    harm="wrong gradient",
    bug="under context parallelism --normalize-advantages whitens each rank's part of the sequences by itself",
    when="--normalize-advantages with --context-parallel-size above 1; or a data-parallel rank without response tokens",
    symptom="""\
`--normalize-advantages` with `--context-parallel-size` above 1: runs learn less than without it, and two
halves of one response have different advantages, some of another sign. Where a rank has no token of any response (long
prompts and short answers, or responses that were all aborted), training hangs in an all-reduce until a timeout.""",
    cause="""\
Each context-parallel rank has two pieces of every sequence, and advantages are whitened with the mean and the variance
of the data-parallel group, in which all ranks have pieces of the same place: so there is one mean for the beginnings
and the ends, and another one for what lies between. And a rank without response tokens does not take part.""",
    repair="""\
Under context parallelism the group is the one of data and context parallelism, so mean and variance are those of all
tokens, as they are without: (A - mean) / sqrt(var + 1e-8) with slime's own sums over the tokens that the loss mask has.
Every rank takes part, whatever it has. Without context parallelism the group is the one that it was. Where no rank has
a response token, advantages stay as they are, as released.

Left alone: v0.1.0, which whitens over all ranks, and leaves out one without tokens too. main has been repaired since,
and calls itself 0.3.1 all the same: there the patch is refused, and is not needed.""",
    changes_numbers="""\
From 0.2.0 to 0.3.1 a run with `--normalize-advantages` under context parallelism had advantages with another shift and
scale on each part of the sequences: on a small batch of two context-parallel ranks up to 0.67 off, and 11 of 63 had
another sign. With the patch they are those of a run without context parallelism. A learning rate that was tuned with it
should be looked at again; checkpoints can be trained on.""",
    references=("https://github.com/THUDM/slime/pull/2235",),
    variants=(
        # v0.1.0 whitens over all ranks of the world. main, which still calls itself 0.3.1, has been repaired.
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
    obsolete_when="when the oldest slime in use has it: main since August 2026, which still calls itself 0.3.1",
    conditions=(
        Condition(
            "slime.backends.megatron_utils.loss:compute_advantages_and_returns",
            f"{__package__}._conditions:whitened_in_parts",
        ),
    ),
)
