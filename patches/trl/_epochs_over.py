"""The finished epochs of a resumed run, for the sampler of TRL's trainers.

A sampler does not know its trainer, so this module notes the trainer when its ``_get_train_sampler`` creates one.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

import rlhf_patches

_trainers: WeakKeyDictionary[Any, ref[Any] | None] = WeakKeyDictionary()
"""The trainer of each sampler; None after its first order, and for an evaluation's."""


def noted(sampler: Any, generator: torch.Generator) -> torch.Generator:
    """Return the generator that ``RepeatSampler.__init__`` has created, and note the sampler's trainer."""
    # known: transformers requests the training order by this method alone, and its owner is a trainer
    caller = sys._getframe(2)
    name = caller.f_code.co_name
    if name == "_get_eval_sampler" and _is_released(type(sampler)):
        _trainers[sampler] = None
    if name == "_get_train_sampler" and _is_released(type(sampler)):
        trainer = caller.f_locals.get("self")
        if hasattr(trainer, "state") and hasattr(trainer, "callback_handler"):
            _trainers[sampler] = ref(trainer)
    return generator


def _is_released(kind: Any) -> bool:
    """Whether no subclass repairs this itself, or cannot be looked up."""
    is_one_object = kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__
    return is_one_object and not hasattr(kind, "set_epoch")


def advanced(sampler: Any) -> torch.Generator:
    """The generator of a sampler that begins an epoch, after the draws for the epochs that a resumed run skips."""
    generator: torch.Generator = sampler.generator
    if _is_released(type(sampler)) and sampler in _trainers:
        trainer, _trainers[sampler] = _trainers[sampler], None
        skipped = _over(trainer(), sampler) if trainer is not None else 0
        for _ in range(skipped):
            torch.randperm(sampler.num_samples, generator=generator)
        rlhf_patches.decided("trl-resume-order", skipped > 0)
    return generator


def _over(trainer: Any, sampler: Any) -> int:
    """The number of epochs that ``Trainer`` skips: 0 for a run from the start, whose first step is still to come."""
    if trainer is None or not trainer.state.global_step or trainer.args.ignore_data_skip:
        return 0
    loader: Any = getattr(trainer.callback_handler, "train_dataloader", None)
    if not trainer.is_in_train or not _draws_from(loader, sampler):
        return 0  # a loader that other code has requested, not that of this run
    steps = -(-len(loader) // trainer.args.gradient_accumulation_steps)
    return int(trainer.state.global_step // max(steps, 1))


def _draws_from(loader: Any, sampler: Any) -> bool:
    """Looks through accelerate's loaders, whose batch samplers are nested on several ranks."""
    while (inner := getattr(loader, "batch_sampler", None)) is not None:
        loader = inner
    return getattr(loader, "sampler", None) is sampler
