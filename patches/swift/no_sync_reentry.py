"""ms-swift's Megatron trainer may enter training more than once on one config.

The assertion is in ``setup_model_training`` since 4.3.0 and was in ``train`` before; a patch each.
"""

from __future__ import annotations

from rlhf_patches import Guard

from ..megatron_core.no_sync import patch

_CLASS = "swift.megatron.trainers.base:BaseMegatronTrainer"
_REFERENCES = ("https://github.com/THUDM/slime/issues/1779",)

PATCH = patch(
    name="swift-no-sync-reentry",
    title="ms-swift",
    target=f"{_CLASS}.setup_model_training",
    guard=Guard("ms-swift", ">=4.3.0,<=4.6.0"),
    references=_REFERENCES,
)

PATCH_OF_TRAIN = patch(
    name="swift-train-no-sync-reentry",
    title="ms-swift (before 4.3)",
    target=f"{_CLASS}.train",
    guard=Guard("ms-swift", ">=4.0.0,<4.3.0"),
    references=_REFERENCES,
)
