"""ms-swift's Megatron trainer may enter training more than once on one config."""

from __future__ import annotations

from rlhf_patches import Guard

from ..megatron_core._no_sync import patch

_CLASS = "swift.megatron.trainers.base:BaseMegatronTrainer"

PATCH = patch(
    name="swift-no-sync-reentry",
    title="ms-swift",
    places={
        Guard("ms-swift", ">=4.0.0,<4.3.0"): f"{_CLASS}.train",
        Guard("ms-swift", ">=4.3.0,<=4.6.0"): f"{_CLASS}.setup_model_training",
    },
    references=("https://github.com/THUDM/slime/issues/1779",),
)
