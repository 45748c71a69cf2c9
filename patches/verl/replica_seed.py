"""verl's vLLM servers outside the trainer's ranks: seed each replica differently."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def seed_of(seed: Any, server: Any) -> Any:
    """The seed of a vLLM replica.

    Args:
        seed: the configuration's seed; None means vLLM's default, 0.
        server: has ``rollout_mode`` and ``replica_rank``.
    """
    return int(seed or 0) + server.replica_rank if _is_outside(server) else seed


def _is_outside(server: Any) -> bool:
    """Whether vLLM is outside the trainer's ranks; within, it also seeds their own generators, which have to agree."""
    return getattr(getattr(server, "rollout_mode", None), "name", None) in ("STANDALONE", "COLOCATED")


def has_the_first_ones_seed(self: Any) -> bool | None:
    """Whether a server is not of the first replica, and has its seed; None within the trainer, or for a user's seed."""
    users = (self.config.get("engine_kwargs", {}).get("vllm") or {}).get("seed")
    return bool(self.replica_rank > 0) if _is_outside(self) and users is None else None


_MODULE = "verl.workers.rollout.vllm_rollout.vllm_async_server"


def _rewrite(server: str) -> Rewrite:
    seed = 'self.config.get("seed", 0)'
    return Rewrite(
        f"{_MODULE}:{server}.launch_server",
        seed,
        f"$SEED_OF({seed}, self)",
        unless=(f"self.replica_rank + {seed}",),
        uses={"SEED_OF": f"{__name__}:{seed_of.__name__}"},
    )


PATCH = Patch(
    name="verl-replica-seed",
    summary="vLLM replicas outside the trainer's ranks sample with different seeds",
    harm="wrong data",
    affects_rollouts=True,
    bug="replicas use the same random numbers: samples of one prompt on two replicas can be equal",
    when="more than one vLLM replica outside the trainer's ranks (standalone or colocated)",
    symptom="""\
All vLLM replicas start with the same seed, 0, and draw the same random numbers as long as their batches have the same
sizes. Two samples of a prompt on two replicas, at the same position of such batches, are equal, token by token: there
are fewer different samples than requested. The more evenly the load is distributed, the more samples are equal. There
is no error.""",
    cause="""\
`launch_server` starts each vLLM replica with the same `--seed`, the configuration's or 0. vLLM seeds the device's
generator with it, and uses this generator for every request without a seed of its own.""",
    repair="""\
The patch adds the replica's rank to the seed, as in 0.7.1. The seed of the first replica does not change. A seed in
`engine_kwargs.vllm` is the user's for all replicas, and stays. Runs are as reproducible as before.

Where vLLM runs within the trainer's ranks (`init_hybrid`), nothing changes: there vLLM's seed also seeds the trainer's
own generators, and the generators of ranks that train one model together must not differ. So these replicas still draw
the same numbers if `free_cache_engine` is on. From 0.7.1 on vLLM has processes of its own.""",
    changes_numbers="""\
From verl 0.6.0 to 0.7.0, replicas other than the first draw new samples with the patch: their distribution is the same,
and they depend less on each other. Runs with one replica keep their numbers.""",
    references=(
        "https://github.com/verl-project/verl/pull/5179",
        "https://github.com/verl-project/verl/pull/5181",
    ),
    variants=(
        Variant(Guard("verl", ">=0.6.0,<0.6.1"), (_rewrite("vLLMHttpServer"),)),
        Variant(Guard("verl", ">=0.6.1,<0.7.1"), (_rewrite("vLLMHttpServerBase"),)),
    ),
    obsolete_when="when the oldest verl in use is 0.7.1",
    conditions=tuple(
        Condition(f"{_MODULE}:{server}.launch_server", f"{__name__}:{has_the_first_ones_seed.__name__}")
        for server in ("vLLMHttpServer", "vLLMHttpServerBase")
    ),
)
