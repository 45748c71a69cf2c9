"""Megatron-Bridge's ``_update_model_config_funcs`` may run again on one model config."""

from __future__ import annotations

from rlhf_patches import Guard

from ..megatron_core._no_sync import patch

PATCH = patch(
    name="megatron-bridge-no-sync-reentry",
    title="Megatron-Bridge",
    places={Guard("megatron-bridge", ">=0.1.0a0,<=0.6.2"): "megatron.bridge.training.setup:_update_model_config_funcs"},
    references=("https://github.com/THUDM/slime/issues/1779",),
)
