"""As OpenRLHF's own driver: a critic and then an actor train on a mini-batch, each a Ray actor in its own process.

Its arguments are two free ports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray


@ray.remote(num_cpus=1)
class Role:
    def __init__(self, kind: str, port: str) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # before a release's folder that has tests, too
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        from tests.harness import loading

        loading.openrlhf()
        loading.openrlhf_trainers()
        from rlhf_patches.patches.deepspeed.proofs import on_cpu

        on_cpu.start()
        from tests.patches.openrlhf import rehearsal_ranks

        self._trainer: Any
        if kind == "actor":
            self._trainer, self._given = rehearsal_ranks.actor_trainer(2, zero=0)
            return
        self._trainer, self._given = rehearsal_ranks.critic_trainer(2)
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
        self._trainer.critic = on_cpu.engine(self._trainer.critic, {"stage": 0}, self._trainer.critic_optim, **sizes)

    def fit(self) -> str:
        self._trainer.ppo_train(*self._given)
        return "trained"


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    roles = {kind: Role.remote(kind, port) for kind, port in zip(("critic", "actor"), sys.argv[1:], strict=True)}
    for kind, role in roles.items():
        print(kind, ray.get(role.fit.remote()), flush=True)


if __name__ == "__main__":
    main()
