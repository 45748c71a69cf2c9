"""The observations of `trl-watch-rollouts`, in a process that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_patches import watching

from .. import _released
from .._rollouts import dropout, figures, samples
from .watch_rollouts import NAME, OTHER_POLICY, OTHER_PROMPT

_DIFFERENCE = "sampling/sampling_logp_difference/mean"

_difference = figures.log_probabilities(NAME, OTHER_POLICY)
_equal = figures.equal_completions(NAME, ())
_short = figures.short_completions(NAME, ())
_long = figures.long_completions(NAME, ())
_other = figures.other_prompts(NAME, OTHER_PROMPT)
FIGURES = (_difference, _equal, _short, _long, _other)
_context = watching.Runs[list[int]](lambda: [0])
"""The number of tokens that the engine's context is known to hold."""

_SHAPES = ("structured_outputs", "guided_decoding")
_SHAPED = watching.Known(
    "Structured outputs are on: vLLM may normalize its log-probabilities over the tokens that they allow, and the "
    "trainer over the whole vocabulary. No patch repairs this: set `vllm_importance_sampling_correction=False`."
)
_OF_NO_COMPLETION = frozenset({"seed", "detokenize", "skip_special_tokens", *samples.SAMPLING})
"""The `generation_kwargs` that neither end nor constrain a completion."""
_ENDS = frozenset({"max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"})
"""The `generation_kwargs` that end a completion without changing the probabilities of its tokens."""


def observed() -> dict[str, Any]:
    """The figures so far in this process."""
    return watching.observed(*FIGURES)


def around_prepare_inputs(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`GRPOTrainer._prepare_inputs`, which samples a batch of rollouts if none is left."""
    before = 0
    with watching.looking(NAME):
        before = len(_differences(instance))
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        for value in _differences(instance)[before:]:
            _difference.note(float(value), _step(instance), instance, lambda: _known(instance))
    return result


def around_generate(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`GRPOTrainer._generate`, which samples a completion for each prompt of this rank."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        own = instance.rollout_func is not None or _released.others(instance, "_generate", "_generate_single_turn")
        if instance.use_vllm and not own and instance.model.training:
            _look(instance, result)
    return result


def around_engine(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`VLLMGeneration.generate`, for a turn of each conversation that continues; a `rollout_func` may call it too."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        prompts, images, *_ = args
        _look_at_prompts(instance, prompts, images, result[0])
    return result


def _look_at_prompts(engine: Any, prompts: Any, images: Any, answered: Any) -> None:
    if any(images or ()):  # an engine inserts an image's tokens into the prompt
        return
    if samples.of_rows(prompts, int) and (answered == [] or samples.of_rows(answered, int)):
        _other.note(samples.of_other_prompts(prompts, answered), run=engine)


def _look(trainer: Any, result: tuple[Any, ...]) -> None:
    prompts, completions = result[0], result[1]
    if not (samples.of_rows(prompts, int) and samples.of_rows(completions, int)):
        return
    at = _step(trainer)
    own = _own(trainer)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    known = (tokenizer.eos_token_id, tokenizer.pad_token_id, *(getattr(trainer, "eos_token_ids", None) or ()))
    context = _context.of(trainer)
    context[0] = max(context[0], samples.reach(prompts, completions))
    limit = trainer.max_completion_length
    if limit is not None and "max_tokens" not in own:
        _long.note(samples.beyond(completions, limit), at, trainer)
    if _is_shaped(trainer):
        return
    if own.keys() <= _OF_NO_COMPLETION and (limit is None or limit > 1):
        ends = samples.ends_of(trainer.model, *known)
        _short.note(samples.share_of_single_tokens(prompts, completions, ends, context[0]), at, trainer)
    sampling = {name: own.get(name, getattr(trainer, name, None)) for name in samples.SAMPLING}
    log_probabilities = next((each for each in result[2:] if samples.of_rows(each, float)), None)
    plain = own.keys() <= _OF_NO_COMPLETION | _ENDS and samples.is_plain(sampling)
    if log_probabilities is not None and plain and not getattr(trainer, "tools", None):
        groups = [tuple(prompt) for prompt in prompts]
        _equal.note(samples.surprise_of_equals(groups, completions, log_probabilities), at, trainer)


def _known(trainer: Any) -> watching.Known | None:
    """Harmless causes of different log-probabilities."""
    return _SHAPED if _is_shaped(trainer) else dropout.active(trainer.model)


def _own(trainer: Any) -> Mapping[str, Any]:
    return getattr(trainer, "generation_kwargs", None) or getattr(trainer.args, "generation_kwargs", None) or {}


def _is_shaped(trainer: Any) -> bool:
    """Whether completions are constrained: then a token may be certain that the model considers unlikely."""
    asked = (getattr(trainer.args, f"vllm_{name}_regex", None) for name in _SHAPES)
    return any(each is not None for each in (*asked, *map(_own(trainer).get, _SHAPES)))


def _differences(trainer: Any) -> Sequence[float]:
    metrics = getattr(trainer, "_metrics", None)
    found = metrics["train"].get(_DIFFERENCE, ()) if isinstance(metrics, dict) and "train" in metrics else ()
    return found if isinstance(found, list) else ()


def _step(trainer: Any) -> str:
    return f"step {trainer.state.global_step}"
