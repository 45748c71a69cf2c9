"""``megatron.training.training:train`` may be called more than once."""

from __future__ import annotations

from rlhf_patches import Guard

from ..megatron_core._no_sync import patch

PATCH = patch(
    name="megatron-lm-no-sync-reentry",
    title="Megatron-LM",
    places={
        Guard(
            "megatron-core",
            ">=0.6.0,<=0.20.0",
            may_be_missing="before 0.17 megatron.training is in git only; a checkout that is installed calls itself "
            "megatron-core",
        ): "megatron.training.training:train"
    },
    references=("https://github.com/THUDM/slime/issues/1779",),
)
