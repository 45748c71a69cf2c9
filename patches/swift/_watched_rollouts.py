"""What `swift-watch-rollouts` reads in a training process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_patches import watching

from .._rollouts import dropout, figures, samples
from .watch_rollouts import NAME, ONE_SEED, OTHER_POLICY

_KL = "rollout_correction/kl"
_TEMPERATURES = (0.9, 1.1)
"""In this range the mean log-probability at 1 is off by (1/T - 1)^2 / 2 of its variance: 0.03 nats for 5."""

# One rank records this figure: with Megatron only the last pipeline stage has it, which is not rank 0's.
_difference = figures.log_probabilities(NAME, OTHER_POLICY, local=True)
_equal = figures.equal_completions(NAME, ONE_SEED)
FIGURES = (_difference, _equal)


def observed() -> dict[str, Any]:
    """The figures of this process so far."""
    return watching.observed(*FIGURES)


def around_log(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Wrap `GRPOTrainer.log`, which adds the mean of each metric to its dictionary."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        if instance.accelerator.is_main_process:
            _note(instance, args[0], instance.state.global_step)
    return result


def around_on_log(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Wrap `BaseMegatronTrainer.on_log`, which converts the metrics in its dictionary to numbers."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        logs, prefix = args
        if not prefix and _is_last_rank():
            _note(instance, logs, instance.state.iteration)
    return result


def around_outputs(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Wrap `_postprocess_rollout_outputs`, which gets this rank's rows and the engine's results for them."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        if instance.model.training and not instance.is_multimodal and _is_the_policys(instance):
            _look(instance, args[1], f"step {instance.state.global_step}")
    return result


def _note(trainer: Any, logs: Mapping[str, Any], step: int) -> None:
    found = logs.get(_KL)
    if isinstance(found, float) and _is_the_policys(trainer):
        models = getattr(trainer, "unwrapped_models", None) or [trainer.model]
        _difference.note(abs(found), f"step {step}", trainer, lambda: dropout.active(*models))


def _look(trainer: Any, outputs: Any, at: str) -> None:
    responses = [output.response for output in outputs]
    choices = [response.choices[0] for response in responses]
    if not choices or any(choice.logprobs is None for choice in choices):
        return
    prompts = [response.prompt_token_ids for response in responses]
    completions = [choice.token_ids for choice in choices]
    known = [[each["logprob"] for each in choice.logprobs["content"]] for choice in choices]
    if samples.of_rows(prompts, int) and samples.of_rows(completions, int) and samples.of_rows(known, float):
        groups = [tuple(prompt) for prompt in prompts]
        _equal.note(samples.surprise_of_equals(groups, completions, known), at, trainer)


def _is_the_policys(trainer: Any) -> bool:
    """Whether rollouts come from the trained weights, and log-probabilities from the sampled distribution."""
    if trainer.async_generate or trainer.multi_turn_scheduler or trainer.enable_server_multi_turn:
        return False
    asked = trainer.request_config
    sampling = {name: getattr(asked, name, None) for name in samples.SAMPLING}
    least, most = _TEMPERATURES
    whole = samples.is_whole(sampling) and not getattr(asked, "structured_outputs_regex", None)
    return whole and least <= asked.temperature <= most


def _is_last_rank() -> bool:
    from torch import distributed

    return not distributed.is_initialized() or distributed.get_rank() == distributed.get_world_size() - 1
