"""The observations of `trl-online-dpo-watch-rollouts`, in a process that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import watching

from .._rollouts import figures, samples
from .online_dpo_watch_rollouts import NAME, WATCH

_short = figures.short_completions(NAME, WATCH.points_to)
_long = figures.long_completions(NAME, ())
FIGURES = (_short, _long)
_context = watching.Runs[list[int]](lambda: [0])
"""The number of tokens that the engine's context is known to hold."""


def observed() -> dict[str, Any]:
    """The figures so far in this process."""
    return watching.observed(*FIGURES)


def around_generate(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`OnlineDPOTrainer._generate_vllm_server` and ``_colocate``, which return completions and prompts of this rank."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        completions, prompts, *_ = result
        limit = instance.generation_config.max_tokens
        tokenizer = getattr(instance.processing_class, "tokenizer", instance.processing_class)
        stops = [getattr(instance.generation_config, name, None) for name in ("stop", "stop_token_ids")]
        if samples.of_rows(completions, int) and isinstance(limit, int):
            at = f"step {instance.state.global_step}"
            _long.note(samples.beyond(completions, limit), at, instance)
            if limit > 1 and not any(stops) and not _shaped(instance) and samples.of_rows(prompts, int):
                prompts = samples.without_padding(prompts, tokenizer.pad_token_id)
                context = _context.of(instance)
                context[0] = max(context[0], samples.reach(prompts, completions))
                ends = samples.ends_of(instance.model, tokenizer.eos_token_id)
                _short.note(samples.share_of_single_tokens(prompts, completions, ends, context[0]), at, instance)
    return result


def _shaped(trainer: Any) -> bool:
    """Whether completions are constrained: then a single token may be a whole completion."""
    names = ("structured_outputs", "guided_decoding")
    return any(getattr(trainer.generation_config, name, None) is not None for name in names)
