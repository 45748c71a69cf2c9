"""ms-swift's ``BaseMegatronTrainer.setup_model_training`` may run once per training call."""

from __future__ import annotations

from rlhf_patches import Guard

from ..megatron_core.no_sync import patch

PATCH = patch(
    framework="swift",
    title="ms-swift",
    target="swift.megatron.trainers.base:BaseMegatronTrainer.setup_model_training",
    guard=Guard("ms-swift", ">=4.0.0,<=4.6.0"),
    references=("https://github.com/THUDM/slime/issues/1779",),
)
