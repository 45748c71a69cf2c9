"""slime's partial rollout: a sample that is resumed has what is left of its response length, not all of it again."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def left(args: Any, sample: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters with the ``max_new_tokens`` that a resumed sample has left; those ``asked`` for otherwise.

    Who asks for less than ``args.rollout_max_response_len``, a turn's own limit say, gets it as long as it is left.
    """
    taken = sample.response_length
    if not taken or sample.status != type(sample).Status.ABORTED:
        return asked
    tokens = asked["max_new_tokens"]
    limit = max(tokens, getattr(args, "rollout_max_response_len", None) or tokens)
    if taken > limit:  # of several turns, which a custom function counts by itself
        return asked
    return {**asked, "max_new_tokens": min(tokens, limit - taken)}


def _resumed(target: str) -> Rewrite:
    prompt = "prompt_ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)"
    return Rewrite(
        target=target,
        pattern=prompt,
        alongside=('sampling_params["max_new_tokens"] >= 0',),
        unless=('sampling_params["max_new_tokens"] -= $TAKEN',),
        replacement=f"{prompt}; sampling_params = $LEFT(args, sample, sampling_params)",
        uses={"LEFT": f"{__name__}:{left.__name__}"},
    )


PATCH = Patch(
    name="slime-partial-rollout-budget",
    summary="a response that is sampled in parts is no longer than --rollout-max-response-len",
    harm="wrong data",
    affects_rollouts=True,
    bug="a sample that is resumed may be as long again as --rollout-max-response-len, each time",
    when="`--partial-rollout`, or the fully asynchronous rollout, and a sample that was aborted",
    symptom="""\
With `--partial-rollout` responses are longer than `--rollout-max-response-len`, up to twice as long, and three times
where a sample is aborted twice: the longest ones, which are those that are aborted. No error, unless the context or the
memory of training runs out.""",
    cause="""\
`generate` and `generate_streaming` ask the engine for `max_new_tokens` whether or not the sample has tokens of a
response already. Until 0.2.4 these were taken off.""",
    repair="""\
Of a sample that was aborted, what it has is taken off: with `--rollout-max-response-len` L and n tokens, L - n are
asked for. Where none is left, it is truncated, as slime does with 0, and no request is sent. The dictionary of the
caller is not written to, as it is upstream (PR 2261), where several turns or samples share one.

Left alone, and so as released: samples without a response, and those that were not aborted (a custom function's later
turns); a `max_new_tokens` that a custom function has made less than what is left; a response of several turns that is
longer than L already. main has been repaired since, and calls itself 0.3.1 all the same: there the patch is refused,
because the code is not that of 0.3.1, and is not needed.""",
    references=("https://github.com/THUDM/slime/pull/2261",),
    variants=(
        Variant(
            Guard("slime", ">=0.3.0,<=0.3.1"),
            (
                _resumed("slime.rollout.sglang_rollout:generate"),
                _resumed("slime.rollout.sglang_streaming_rollout:generate_streaming"),
            ),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest slime in use has it: main since August 2026, which still calls itself 0.3.1",
    changes_numbers="""\
In 0.3.0 and 0.3.1 a sample that was aborted could be longer than --rollout-max-response-len, and was trained on and
rewarded so. With the patch it is truncated there, as it was until 0.2.4. A run that has learned to answer at that
length loses the reward of those answers: raise --rollout-max-response-len where they are wanted. Checkpoints can be
trained on.""",
)
