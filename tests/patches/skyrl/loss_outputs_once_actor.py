"""A Ray actor in the place of SkyRL's worker: it returns what it was given, and where it was told that it stands.

A module of its own, for an actor's process has to put SkyRL's packages in place before it receives a batch.
"""

from __future__ import annotations

from rlhf_patches.patches.skyrl.proofs import loss_outputs_once_ranks, modules

modules.install()


class Worker(loss_outputs_once_ranks.Worker):
    """Of this module, which Ray imports in the actor's process."""
