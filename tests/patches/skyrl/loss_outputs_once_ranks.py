"""SkyRL's `WorkerDispatch.forward_backward` with a real Ray actor group, and for many meshes without actors.

``--out FOLDER PART``, on one rank, with the folder of a SkyRL release on sys.path. `WorkerDispatch`,
`PPORayActorGroup`, `MeshDispatch`, `MeshRank` and the Tinker backend's `forward_backward` are real. The GPUs that
the group asks for are numbers that Ray is told.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

import rlhf_patches
from rlhf_patches.patches.skyrl.proofs.loss_outputs_once_ranks import (
    PER_RANK,
    make_batch,
    make_dispatch,
    make_mesh,
    run,
    without_a_store,
    without_actors,
)
from tests.harness import own_ray, skyrl_on_cpu
from tests.patches.skyrl import loss_outputs_once_actor as actor

ROOT = Path(__file__).resolve().parents[3]
NAME = "skyrl-loss-outputs-once"


def meshes() -> dict[str, Any]:
    """Every combination of sizes in Megatron's order, FSDP's, and one that nobody has."""
    found = {}
    for sizes in itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2)):
        for order in ("tsdp", "stdp", "shuffled"):
            mesh = make_mesh(*sizes, order="tsdp" if order == "shuffled" else order)
            if order == "shuffled":
                random.Random(7).shuffle(mesh)
            found["-".join(map(str, (*sizes, order)))] = mesh
    return found


@without_a_store()
def of_meshes(module: Any) -> dict[str, Any]:
    return {
        name: run(make_dispatch(module, without_actors(module, mesh)), PER_RANK * mesh[0]["dp_size"])
        for name, mesh in meshes().items()
    }


def of_ray(module: Any) -> dict[str, Any]:
    """Two data-parallel ranks of two tensor-parallel ones, each a process."""
    config = SimpleNamespace(mesh=make_mesh(2, 1, 2, 1))
    worker = ray.remote(actor.Worker)
    group = module.PPORayActorGroup(config, 1, 4, worker, num_gpus_per_actor=1.0)
    dispatch = make_dispatch(module, group)
    found: dict[str, Any] = {"before": run(dispatch, 6)}
    rlhf_patches.apply(only=NAME)
    found["after"] = run(dispatch, 6)
    staged = dispatch.stage_data("policy", make_batch(6), [(0, 6)])[0]
    status = dispatch.forward_backward_from_staged("policy", staged)
    found["staged"] = [int(output["logprobs"][0]) for output in status["loss_fn_outputs"]]
    rlhf_patches.revert()
    found["reverted"] = run(dispatch, 6)
    found["processes"] = len({info.handle._actor_id.hex() for info in group.actor_infos})
    return found


@without_a_store()
def of_tinker(module: Any) -> dict[str, Any]:
    """What two clients of the Tinker API get: one sent samples 0 to 2, the other 3 and 4. The batch is padded to 6."""
    backend_module = skyrl_on_cpu.tinker_backend()
    found = {}
    for name, sizes in {"dp 2, tp 2": (2, 1, 2, 1), "dp 2, pp 2": (2, 1, 1, 2), "dp 2": (2, 1, 1, 1)}.items():
        backend = backend_module.SkyRLTrainBackend.__new__(backend_module.SkyRLTrainBackend)
        trainer = SimpleNamespace(strategy="megatron", micro_train_batch_size_per_gpu=1)
        backend._cfg, backend._inference_engines_initialized = SimpleNamespace(trainer=trainer), False
        backend._dispatch = make_dispatch(module, without_actors(module, make_mesh(*sizes)))
        # Tokenizing is not the matter here.
        backend._to_training_batch = lambda prepared: make_batch(5)
        backend._sleep_inference_engines = lambda: None
        prepared = SimpleNamespace(
            all_model_inputs=[None] * 5,
            all_loss_fns=["cross_entropy"] * 5,
            all_loss_fn_configs=[None] * 5,
            request_batch_slices=[("first", "model", 0, 3), ("second", "model", 3, 5)],
        )
        results = backend.forward_backward(prepared)
        found[name] = {
            client: [int(one["logprobs"]["data"][0]) for one in result.loss_fn_outputs]
            for client, result in results.items()
        }
    return found


@without_a_store()
def without_a_collecting_rank(module: Any) -> dict[str, Any]:
    """A mesh of which no rank is the last pipeline stage."""
    mesh = [{**place, "pp_size": 2} for place in make_mesh(2, 1, 2, 1)]
    found, said = {}, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rlhf_patches").addHandler(handler)
    for state in ("after", "again", "before"):
        if state == "before":
            rlhf_patches.revert()
        found[state] = run(make_dispatch(module, without_actors(module, mesh)), 6)
    return {**found, "said": [line for line in said if "MeshRank" in line]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("part", choices=("all", "meshes"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "all":
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"env_vars": {"PYTHONPATH": path}}
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # its "GPUs" are numbers
        own_ray.start(num_cpus=4, num_gpus=4, runtime_env=environment)
    module = skyrl_on_cpu.worker_dispatch()
    report: dict[str, Any] = {"before": of_meshes(module)}
    if options.part == "all":
        report["ray"] = of_ray(module)
        report["tinker_before"] = of_tinker(module)
    rlhf_patches.apply(only=NAME)
    report["report"] = [row.to_dict() for row in rlhf_patches.report() if row.name == NAME]
    report["after"] = of_meshes(module)
    if options.part == "all":
        report["tinker_after"] = of_tinker(module)
        report["without_a_collecting_rank"] = without_a_collecting_rank(module)
    rlhf_patches.revert()
    report["reverted"] = of_meshes(module)
    if options.part == "all":
        ray.shutdown()
    (options.out / "rank0.json").write_text(json.dumps(report))
