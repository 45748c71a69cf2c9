"""SkyRL's `WorkerDispatch.forward_backward` for meshes without actors: ``--out FOLDER``, on one rank.

`WorkerDispatch`, `PPORayActorGroup`, `MeshDispatch` and `MeshRank` are the release's. In the place of Ray's actors are
plain objects, which return what they were given.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ray
import torch

from rlhf_patches.patches.skyrl.proofs import modules
from rlhf_patches.proving import states

NAME = "skyrl-loss-outputs-once"
PER_RANK = 3


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


def make_mesh(dp: int, sp: int, tp: int, pp: int, order: str = "tsdp") -> list[dict[str, int]]:
    """Each rank's place. ``order``: the dimensions from the fastest to the slowest; megatron-core's is ``tsdp``."""
    sizes = {"d": dp, "s": sp, "t": tp, "p": pp}
    places = []
    for place in itertools.product(*(range(sizes[letter]) for letter in reversed(order))):
        at = dict(zip(reversed(order), place, strict=True))
        places.append(
            {"dp": at["d"], "sp": at["s"], "tp": at["t"], "pp": at["p"], "world_size": dp * sp * tp * pp}
            | {"dp_size": dp, "pp_size": pp}
        )
    return places


def make_batch(samples: int) -> Any:
    """A sample's tokens say which it is."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    sequences = torch.arange(samples)[:, None].repeat(1, 2).float()
    return TrainingInputBatch({"sequences": sequences, "loss_mask": torch.ones(samples, 2)})


class Handle:
    """In the place of a Ray actor's handle: what is called runs here, and its result goes into Ray's store."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Any:
            args = tuple(ray.get(one) if isinstance(one, ray.ObjectRef) else one for one in args)
            return ray.put(getattr(self.worker, name)(*args, **kwargs))

        return SimpleNamespace(remote=remote)


@contextlib.contextmanager
def without_a_store() -> Iterator[None]:
    """There is nothing of Ray in a mesh of plain objects but its store, which is slow."""
    kept = ray.put, ray.get
    ray.put = ray.get = lambda value: value
    try:
        yield
    finally:
        ray.put, ray.get = kept


def without_actors(module: Any, mesh: list[dict[str, int]]) -> Any:
    """SkyRL's actor group, whose actors are plain objects."""
    from skyrl.backends.skyrl_train.distributed.dispatch import ActorInfo

    group = module.PPORayActorGroup.__new__(module.PPORayActorGroup)
    workers = [Worker(SimpleNamespace(mesh=mesh), len(mesh), rank) for rank in range(len(mesh))]
    group.actor_infos = [ActorInfo(Handle(worker), worker.get_mesh_rank()) for worker in workers]
    return group


def make_dispatch(module: Any, group: Any) -> Any:
    placement = SimpleNamespace(colocate_all=False, colocate_policy_ref=False)
    return module.WorkerDispatch(SimpleNamespace(trainer=SimpleNamespace(placement=placement)), group)


def run(dispatch: Any, samples: int) -> dict[str, Any]:
    """Which samples come back, in their order, and whose metrics."""
    status = dispatch.forward_backward("policy", make_batch(samples), loss_fn="cross_entropy")
    if not isinstance(status, dict):  # 0.3.0
        status = {**status.metrics, "loss_fn_outputs": status.loss_fn_outputs}
    outputs = status.pop("loss_fn_outputs")
    return {
        "samples": [int(output["logprobs"][0]) for output in outputs],
        "losses": [-output["elementwise_loss"][1] for output in outputs],
        "metrics": status,
    }


MESHES = {"tensor": (2, 1, 2, 1), "sequence": (2, 2, 1, 1), "pipeline": (2, 1, 1, 2)}
"""Two data-parallel ranks of two ranks each: sizes of `make_mesh`."""


@without_a_store()
def observe(module: Any) -> dict[str, Any]:
    """What comes back of two ranks' samples."""
    return {
        name: run(make_dispatch(module, without_actors(module, make_mesh(*sizes))), 2 * PER_RANK)["samples"]
        for name, sizes in MESHES.items()
    }


def main() -> None:
    options = states.parser().parse_args()
    modules.install()
    module = modules.worker_dispatch()
    states.report(NAME, lambda: observe(module), options.out)
