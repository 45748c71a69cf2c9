"""A Ray actor in the place of SkyRL's worker: it returns what it was given, and where it was told that it stands.

A module of its own, for an actor's process has to put SkyRL's packages in place before it receives a batch.
"""

from __future__ import annotations

from typing import Any

from tests.harness import skyrl_on_cpu

skyrl_on_cpu.install()


class Worker:
    """As far as `PPORayActorGroup` and `WorkerDispatch` go; ``cfg`` has the mesh rank of each rank as keywords."""

    def __init__(self, cfg: Any, world_size: int, rank: int, **kwargs: Any) -> None:
        self.place = cfg.mesh[rank]
        self.rank = rank

    def get_master_addr_port(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def init_worker_process_group(self) -> None:
        """Nothing here talks to the other actors."""

    def get_mesh_rank(self) -> Any:
        from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank

        return MeshRank(**self.place)

    def save_memory_snapshot(self, tag: str) -> None:
        """Nothing to save."""

    def forward_backward(self, data: Any, loss_fn: str | None = None, loss_fn_config: Any = None) -> Any:
        """As SkyRL's workers: metrics that are the same on every rank, and the outputs of this rank's samples."""
        from skyrl.backends.skyrl_train.distributed import dispatch

        outputs = [{"logprobs": row, "elementwise_loss": [-one for one in row]} for row in data["sequences"].tolist()]
        metrics = {"policy_loss": 0.25, "of_rank": self.rank}
        if hasattr(dispatch, "WorkerOutput"):  # since 0.3.0
            return dispatch.WorkerOutput(loss_fn_outputs=outputs, metrics=metrics)
        return {**metrics, "loss_fn_outputs": outputs}
