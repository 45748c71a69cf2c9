"""DPO's cache of the reference's log-probabilities where something is a user's own: ``--out FOLDER``.

Each case before apply() of trl-precompute-cache, and after it; and a run with the patch after one without.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl
from datasets import Dataset
from trl.trainer import dpo_trainer

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.precompute_cache_ranks import CASES, NAME, fresh, made, reference, run, taken
from rlhf_patches.proving import states

CASE, DEFAULT = "DPO, max_length", "DPO, default mode"


class Collator(dpo_trainer.DataCollatorForPreference):
    """A user's."""


class Computes(trl.DPOTrainer):
    """With the user's own log-probabilities."""

    def compute_ref_log_probs(self, *args: Any) -> Any:
        return super().compute_ref_log_probs(*args)


class Loss(trl.DPOTrainer):
    """With another method."""

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super()._compute_loss(*args, **kwargs)


class Prepares(trl.DPOTrainer):
    """Which filters nothing, so that the data set's key does not depend on the arguments."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        without = SimpleNamespace(max_length=None, dataset_num_proc=None)
        return super()._prepare_dataset(dataset, processing_class, without, name)


def with_a_collator(kind: str, folder: Path, settings: dict[str, Any], own: type = Collator) -> Any:
    length, mode = settings["max_length"], settings.get("truncation_mode", "keep_start")
    return made(kind, folder, settings, data_collator=own(0, max_length=length, truncation_mode=mode))


def with_the_releases_collator(kind: str, folder: Path, settings: dict[str, Any]) -> Any:
    """Which truncates otherwise than the arguments say."""
    arguments = {"max_length": 30}
    own = dpo_trainer.DataCollatorForPreference(
        0, settings["max_length"], settings.get("truncation_mode", "keep_start")
    )
    return made(kind, folder, arguments, data_collator=own)


def in_memory(kind: str, folder: Path, settings: dict[str, Any]) -> Any:
    rows = list(Dataset.load_from_disk(str(folder / "data")))
    config = trl.DPOConfig(
        output_dir=str(folder / "trainer"),
        precompute_ref_log_probs=True,
        per_device_train_batch_size=2,
        **small.STEPS,
        **settings,
    )
    return trl.DPOTrainer(
        small.model(), reference(), config, train_dataset=Dataset.from_list(rows), processing_class=small.tokenizer()
    )


def cases(out: Path) -> dict[str, Any]:
    return {
        "own collator": run(CASE, out, with_a_collator),
        "own log-probabilities": run(CASE, out, lambda *given: made(*given, kinds=Computes)),
        "own loss": run(CASE, out, lambda *given: made(*given, kinds=Loss)),
        "own preparation": run(DEFAULT, out, lambda *given: made(*given, kinds=Prepares)),
        "own instance": run(CASE, out, with_the_releases_collator),
        "in memory": run(CASE, out, in_memory),
    }


def old_file(out: Path) -> dict[str, Any]:
    """A released run, then two runs with the patch, of which the second has the first one's settings."""
    first, second = CASES[CASE]
    folder = fresh("DPO", out)
    made("DPO", folder, first)
    rlhf_patches.apply(only=(NAME,))
    found = {}
    for name, settings in (("another", second), ("the same", first), ("again", second)):
        found[name] = taken(made("DPO", folder, settings).train_dataset, settings, folder)
    rlhf_patches.revert()
    return found


def main() -> None:
    out = states.parser().parse_args().out
    old = old_file(out)
    states.report(NAME, lambda: {**cases(out), "old file": old}, out, reverted=False)
