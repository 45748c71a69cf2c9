"""slime's partial rollout: a resumed sample gets the rest of its response length, not all of it again."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def left(args: Any, sample: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters with the ``max_new_tokens`` that a resumed sample has left; otherwise those ``asked`` for.

    A caller that asks for less than ``args.rollout_max_response_len``, for example a turn's own limit, gets it if as
    many are left.
    """
    taken = sample.response_length
    if not taken or sample.status != type(sample).Status.ABORTED:
        return asked
    tokens = asked["max_new_tokens"]
    rest = _rest(args, taken, tokens)
    return asked if rest is None else {**asked, "max_new_tokens": min(tokens, rest)}


def asks_for_too_much(args: Any, sample: Any, sampling_params: Any) -> bool | None:
    """Whether an aborted sample could become longer than the limit; None for what a custom function may count."""
    taken, status = getattr(sample, "response_length", None), getattr(sample, "status", None)
    aborted = getattr(getattr(type(sample), "Status", None), "ABORTED", None)
    tokens = sampling_params.get("max_new_tokens") if isinstance(sampling_params, dict) else None
    if taken is None or status is None or aborted is None or tokens is None:
        return None
    if not taken or status != aborted:
        return False
    rest = _rest(args, taken, tokens)
    return None if rest is None else rest < tokens


def _rest(args: Any, taken: int, tokens: int) -> int | None:
    """How many tokens a sample has left; None after several turns, which a custom function counts itself."""
    limit = max(tokens, getattr(args, "rollout_max_response_len", None) or tokens)
    return None if taken > limit else limit - taken


_FUNCTIONS = (
    "slime.rollout.sglang_rollout:generate",
    "slime.rollout.sglang_streaming_rollout:generate_streaming",
)


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
    summary="a response that is sampled in parts is not longer than --rollout-max-response-len",
    harm="wrong data",
    affects_rollouts=True,
    bug="each time a sample is resumed, it may grow by --rollout-max-response-len again",
    when="`--partial-rollout`, or the fully asynchronous rollout, and a sample that was aborted",
    symptom="""\
With `--partial-rollout`, responses are longer than `--rollout-max-response-len`: up to twice as long, and up to three
times if a sample is aborted twice. This affects the longest responses, because these are the ones that are aborted. No
error is raised, unless the context or the training memory runs out.""",
    cause="""\
`generate` and `generate_streaming` ask the engine for `max_new_tokens` even if the sample already has response tokens.
Until 0.2.4, these were subtracted.""",
    repair="""\
For an aborted sample, the patch subtracts the tokens that it already has: with `--rollout-max-response-len` L and n
tokens, it asks for L - n. If no tokens are left, the sample is truncated, as slime does itself if `max_new_tokens` is
0, and no request is sent. Unlike upstream's fix (PR 2261), the patch does not write to the caller's dictionary, which
several turns or samples may share.

The following stay as released: samples without a response, and those that were not aborted (a custom function's later
turns); a `max_new_tokens` that a custom function has already reduced below the number of tokens that are left; a
response of several turns that is already longer than L. slime's main branch has the repair, and still has version
0.3.1. The patch is refused there, because the code is not that of release 0.3.1. It is not needed there either.""",
    references=("https://github.com/THUDM/slime/pull/2261",),
    variants=(
        Variant(
            Guard("slime", ">=0.3.0,<=0.3.1"),
            tuple(_resumed(function) for function in _FUNCTIONS),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest slime in use has the repair: main since August 2026, still with version 0.3.1",
    conditions=tuple(Condition(function, f"{__name__}:{asks_for_too_much.__name__}") for function in _FUNCTIONS),
    changes_numbers="""\
In 0.3.0 and 0.3.1, an aborted sample could be longer than --rollout-max-response-len, and was trained on and rewarded
at that length. With the patch, it is truncated at the limit, as it was until 0.2.4. A run that has learned to answer at
greater length loses the reward of those answers: raise --rollout-max-response-len to allow them. Training can continue
from checkpoints.""",
)
