"""``slime.backends.megatron_utils.model:train`` runs once per rollout."""

from __future__ import annotations

from rlhf_patches import Guard

from ..megatron_core._no_sync import patch

PATCH = patch(
    name="slime-no-sync-reentry",
    title="slime",
    # The tag v0.1.0 has version 0.0.1 in its metadata; main still had 0.3.1 on 2026-08-21.
    places={Guard("slime", ">=0.0.1,<=0.3.1"): "slime.backends.megatron_utils.model:train"},
    references=(
        "https://github.com/THUDM/slime/issues/1779",
        "https://github.com/THUDM/slime/pull/1857",
        "https://github.com/THUDM/slime/pull/2066",
    ),
)
