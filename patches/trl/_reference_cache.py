"""The key of the cache of a reference's log-probabilities, with the settings that they depend on."""

from __future__ import annotations

import glob
import hashlib
import os
from typing import Any

import rlhf_patches

from .. import _released

_NAME = "trl-precompute-cache"
_METHODS = ("_precompute_ref_logps", "compute_ref_log_probs", "compute_reference_log_probs")
"""What computes the log-probabilities and stores them, in one release or another."""


def keyed(trainer: Any, dataset: Any, key: str) -> str:
    """The released key of a data set and a model, and that of the settings; or the released key alone."""
    file = dataset._get_cache_file_path(key)
    if key not in os.path.basename(file):  # the data set has no file: its cache has a random name
        rlhf_patches.decided(_NAME, False)
        return key
    if other := _replaced(trainer):
        _released.stays(_NAME, f"{other} is not the release's own", "the cache of the reference")
        return key
    whole = key + hashlib.sha256(repr(_settings(trainer)).encode()).hexdigest()[:16]
    _decide(file, key, whole)
    return whole


def keyed_without_arguments(trainer: Any, dataset: Any, key: str) -> str:
    """As `keyed`, unless the data set was filtered by the release's function, which holds the trainer's arguments.

    Its fingerprint, and with it the released key, then depends on all of them.
    """
    length, mode, *of_collator = _settings(trainer)
    filters = length is not None and mode == "keep_start" and not _released.others(trainer, "_prepare_dataset")
    if filters and of_collator[:2] == [length, mode]:
        rlhf_patches.decided(_NAME, False)
        return key
    return keyed(trainer, dataset, key)


def _settings(trainer: Any) -> tuple[Any, ...]:
    """By what sequences are truncated, in one release or another; and DPO's weight of a longer answer's rest."""
    owners = (trainer.args, trainer.data_collator)
    truncation = [getattr(owner, name, None) for owner in owners for name in ("max_length", "truncation_mode")]
    return (*truncation, getattr(trainer, "ld_alpha", None))


def _replaced(trainer: Any) -> str:
    """What computes the log-probabilities and is not the release's own: its settings are unknown."""
    collator = trainer.data_collator
    own = (
        ""
        if _released.is_released(collator, ("trl",))
        else getattr(collator, "__qualname__", type(collator).__qualname__)
    )
    return own or _released.others(trainer, *_METHODS)


def _decide(file: str, key: str, whole: str) -> None:
    """Note whether the released key is that of another run's file. A file that a release wrote does not say it."""
    root, ending = os.path.splitext(file)
    for each in (ending, ".npz"):
        if os.path.exists(root + each):
            return
    found = {os.path.basename(path) for path in glob.glob(f"{glob.escape(root)}*")}
    rlhf_patches.decided(_NAME, any(whole not in name for name in found))
