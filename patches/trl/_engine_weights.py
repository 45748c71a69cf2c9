"""Whether the weights of a colocated vLLM engine are those of the policy: for trl-vllm-sleep-weights.

An engine that has slept at level 2 has memory for its weights and no values in it. This module imports no framework.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .. import _released

_LOADED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Owners of an engine (a `VLLMGeneration`, or a trainer before 0.28) that have loaded it since it last slept."""
_ON_ITS_OWN: weakref.WeakSet[Any] = weakref.WeakSet()
"""Owners within a loop that each rank leaves when it has finished."""
_OF_GRPO = ("_generate_and_score_completions", "_generate", "_generate_single_turn")
_OF_ONLINE_DPO = ("training_step", "_generate_vllm", "_generate_vllm_colocate")
"""Methods by which a trainer generates, equally often on all ranks if they are the release's own."""


def loaded(owner: Any, returned: Any) -> Any:
    """Note that the engine has the policy's weights; returns ``returned``."""
    _LOADED.add(owner)
    return returned


def with_weights(generation: Any) -> None:
    """Replaces a reload: loads the policy's weights for one generation, after which the engine sleeps.

    If weights are sharded and other ranks may not take part, it calls upstream's reload of the checkpoint.
    """
    if generation in _LOADED:
        _LOADED.discard(generation)
    elif _may_gather(generation, generation.accelerator):
        generation.sync_weights()
        _LOADED.discard(generation)
    else:
        generation.llm.collective_rpc("reload_weights")


def with_weights_elsewhere(trainer: Any) -> None:
    """The same for a function that a rollout calls as often as it likes. Before 0.28 the trainer is the owner."""
    owner = _owner(trainer)
    with _Alone(owner):
        if owner is not trainer:
            with_weights(owner)
        elif owner in _LOADED:
            _LOADED.discard(owner)
        else:
            trainer.llm.wake_up(tags=["weights"])
            if _may_gather(trainer, trainer.accelerator):
                trainer._move_model_to_vllm()
                _LOADED.discard(owner)
            else:
                trainer.llm.collective_rpc("reload_weights")


def dropped(trainer: Any) -> bool:
    """Whether the engine of a trainer before 0.28, which has just woken, needs its weights whatever the step."""
    _LOADED.discard(trainer)
    return (
        trainer.vllm_mode == "colocate"
        and trainer.args.vllm_enable_sleep_mode
        and _may_gather(trainer, trainer.accelerator)
        and _together(trainer, *_OF_GRPO)
    )


def slept(trainer: Any) -> bool:
    """The same for Online DPO's trainer, which generates once per micro-batch."""
    return bool(trainer.args.vllm_enable_sleep_mode) and _together(trainer, *_OF_ONLINE_DPO)


def generates_with_dropped_weights(self: Any) -> bool | None:
    """Online DPO: whether the engine has slept since it was loaded, and the step says that it need not be loaded.

    None if the trainer does not say, or if a user's own method may load the weights.
    """
    asleep = getattr(getattr(self, "args", None), "vllm_enable_sleep_mode", None)
    if not asleep:
        return None if asleep is None else False
    step, last = getattr(getattr(self, "state", None), "global_step", None), getattr(self, "_last_loaded_step", None)
    if step is None or last is None:
        return None
    if step != last:
        return False
    # known: a user's own version of these may load the weights itself.
    return None if _released.others(self, *_OF_ONLINE_DPO, "_move_model_to_vllm") else True


def on_its_own(trainer: Any, loop: Callable[..., Any]) -> Callable[..., Any]:
    """``loop``, within which this rank may be the only one that generates."""

    def alone(*args: Any, **kwargs: Any) -> Any:
        with _Alone(_owner(trainer)):
            return loop(*args, **kwargs)

    return alone


def awake(generation: Any, empty_cache: Callable[[], None]) -> None:
    """Allocate memory for weights that are about to be loaded, as 0.29.0 does."""
    if generation.mode == "colocate" and generation.enable_sleep_mode:
        empty_cache()
        generation.llm.wake_up(tags=["weights"])


def _owner(trainer: Any) -> Any:
    return getattr(trainer, "vllm_generation", trainer)


def _may_gather(owner: Any, accelerator: Any) -> bool:
    """Whether loading waits for no rank that may not take part."""
    if owner not in _ON_ITS_OWN or accelerator.num_processes == 1:
        return True
    return not _sharded(accelerator)


def _together(trainer: Any, *methods: str) -> bool:
    """Whether loading waits for no rank, or all ranks take part: the release's own code generates, not a user's."""
    accelerator = trainer.accelerator
    return accelerator.num_processes == 1 or not _sharded(accelerator) or not _released.others(trainer, *methods)


def _sharded(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    zero_3 = plugin is not None and plugin.zero_stage == 3
    return zero_3 or getattr(accelerator.state, "fsdp_plugin", None) is not None


class _Alone:
    """Marks the owner's rank as being on its own; it nests."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.outer = owner, owner in _ON_ITS_OWN

    def __enter__(self) -> None:
        _ON_ITS_OWN.add(self.owner)

    def __exit__(self, *_: Any) -> None:
        if not self.outer:
            _ON_ITS_OWN.discard(self.owner)
