"""The worker of trl-vlm-image-labels's proof with a user's collator."""

from __future__ import annotations

from typing import Any

from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from rlhf_patches.patches.trl.proofs import vlm_image_labels_ranks as worker


class Own(DataCollatorForVisionLanguageModeling):
    """A user's, which ignores the first token, too."""

    def _collate_language_modeling(self, examples: Any) -> Any:
        output = super()._collate_language_modeling(examples)
        output["labels"][:, 0] = -100
        return output


def main() -> None:
    worker.KINDS["own"] = Own
    worker.main()
