"""The worker of transformers-collator-eos's proof with a user's collator."""

from __future__ import annotations

from typing import Any

import transformers

from rlhf_patches.patches.transformers.proofs import collator_eos_ranks as worker


class Own(transformers.DataCollatorForLanguageModeling):
    """A user's, which ignores the first token, too."""

    def torch_call(self, examples: Any) -> Any:
        batch = super().torch_call(examples)
        batch["labels"][:, 0] = -100
        return batch


def main() -> None:
    worker.KINDS["own"] = Own
    worker.main()
