"""What `trl-watch-rollouts` looks at, in a process that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_patches import watching

from ..rollouts import figures, samples
from .watch_rollouts import NAME, OTHER_POLICY, OTHER_PROMPT

_DIFFERENCE = "sampling/sampling_logp_difference/mean"

_difference = figures.log_probabilities(NAME, OTHER_POLICY)
_equal = figures.equal_completions(NAME, ())
_short = figures.short_completions(NAME, ())
_long = figures.long_completions(NAME, ())
_other = figures.other_prompts(NAME, OTHER_PROMPT)
FIGURES = (_difference, _equal, _short, _long, _other)


def observed() -> dict[str, Any]:
    """What was seen so far in this process."""
    return watching.observed(*FIGURES)


def around_prepare_inputs(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`GRPOTrainer._prepare_inputs`, which samples a batch of rollouts where there is none left."""
    before = 0
    with watching.looking(NAME):
        before = len(_differences(instance))
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        for value in _differences(instance)[before:]:
            _difference.note(float(value), _step(instance))
    return result


def around_generate(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`GRPOTrainer._generate`, which samples a completion for each prompt of this rank."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        if instance.use_vllm and instance.rollout_func is None and instance.model.training:
            _look(instance, result)
    return result


def around_engine(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`VLLMGeneration.generate`, of a turn of each conversation that goes on; also of a `rollout_func`."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        prompts, images, *_ = args
        _look_at_prompts(prompts, images, result[0])
    return result


def _look_at_prompts(prompts: Any, images: Any, answered: Any) -> None:
    if any(images or ()):  # an engine puts as many tokens in a prompt as an image has
        return
    if samples.of_rows(prompts, int) and (answered == [] or samples.of_rows(answered, int)):
        _other.note(samples.of_other_prompts(prompts, answered))


def _look(trainer: Any, result: tuple[Any, ...]) -> None:
    prompts, completions = result[0], result[1]
    if not (samples.of_rows(prompts, int) and samples.of_rows(completions, int)):
        return
    at = _step(trainer)
    own = getattr(trainer, "generation_kwargs", None) or getattr(trainer.args, "generation_kwargs", None) or {}
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *(getattr(trainer, "eos_token_ids", None) or ())}
    limit = trainer.max_completion_length
    if limit is not None and "max_tokens" not in own:
        _long.note(samples.beyond(completions, limit), at)
    if not own.keys() & {"stop", "stop_token_ids", "max_tokens"} and (limit is None or limit > 1):
        _short.note(samples.share_of_single_tokens(completions, ends), at)
    sampling = {name: getattr(trainer, name, None) for name in samples.SAMPLING}
    log_probabilities = next((each for each in result[2:] if samples.of_rows(each, float)), None)
    if log_probabilities is not None and not own and not getattr(trainer, "tools", None) and samples.is_plain(sampling):
        groups = [tuple(prompt) for prompt in prompts]
        _equal.note(samples.surprise_of_equals(groups, completions, log_probabilities), at)


def _differences(trainer: Any) -> Sequence[float]:
    metrics = getattr(trainer, "_metrics", None)
    found = metrics["train"].get(_DIFFERENCE, ()) if isinstance(metrics, dict) and "train" in metrics else ()
    return found if isinstance(found, list) else ()


def _step(trainer: Any) -> str:
    return f"step {trainer.state.global_step}"
