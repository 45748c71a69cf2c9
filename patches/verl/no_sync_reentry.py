"""verl's ``register_megatron_training_hooks`` installs once per model chunk, on a config that chunks can share."""

from __future__ import annotations

from rlhf_patches import Guard

from ..megatron_core._no_sync import patch

PATCH = patch(
    name="verl-no-sync-reentry",
    title="verl",
    places={Guard("verl", ">=0.6.1,<=0.9.1"): "verl.utils.megatron_utils:register_megatron_training_hooks"},
    references=("https://github.com/THUDM/slime/issues/1779",),
    extra="""
verl checks and installs the function in a loop over the model chunks. If virtual pipeline stages share one config,
even the *first* call fails, at its second chunk.
""",
)
