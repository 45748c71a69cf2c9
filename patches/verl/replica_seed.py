"""verl's servers of vLLM that run beside the trainer: each replica draws with random numbers of its own."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def seed_of(seed: Any, server: Any) -> Any:
    """What vLLM begins with.

    Args:
        seed: of the configuration; None is vLLM's 0.
        server: with ``rollout_mode`` and ``replica_rank``.
    """
    # Within the trainer's ranks vLLM seeds their generators, too, which have to agree.
    if getattr(getattr(server, "rollout_mode", None), "name", None) not in ("STANDALONE", "COLOCATED"):
        return seed
    return int(seed or 0) + server.replica_rank


def _rewrite(server: str) -> Rewrite:
    seed = 'self.config.get("seed", 0)'
    return Rewrite(
        f"verl.workers.rollout.vllm_rollout.vllm_async_server:{server}.launch_server",
        seed,
        f"$SEED_OF({seed}, self)",
        unless=(f"self.replica_rank + {seed}",),
        uses={"SEED_OF": f"{__name__}:{seed_of.__name__}"},
    )


PATCH = Patch(
    name="verl-replica-seed",
    summary="vLLM's replicas beside the trainer draw samples with random numbers of their own",
    harm="wrong data",
    affects_rollouts=True,
    bug="replicas draw with the same random numbers: samples of one prompt on two of them can be the same",
    when="more than one replica of vLLM beside the trainer's ranks (standalone or colocated), not within them",
    symptom="""\
All replicas of vLLM begin with one seed, 0, and draw the same random numbers for as long as their batches have the same
sizes. Two samples of a prompt that are sent to two replicas, at the same place of such batches, are the same, token by
token: there are fewer different samples than were asked for. The more even the load, the more of them. No error.""",
    cause="""\
`launch_server` starts vLLM with `--seed` of the configuration, or 0, whatever the replica. vLLM seeds the device's
generator with it, and draws what has no seed of its own from that one.""",
    repair="""\
The replica's rank is added to the seed, as in 0.7.1. The first replica keeps the one that it had. A seed in
`engine_kwargs.vllm` is what the user has set for all of them, and stays. A run can be repeated as before.

Where vLLM runs within the trainer's ranks (`init_hybrid`), nothing changes, and the replicas' numbers are the same as
well if `free_cache_engine` is on: there vLLM's seed is that of the trainer's own generators, too, and ranks that train
one model together must not differ in these. From 0.7.1 on vLLM has processes of its own.""",
    changes_numbers="""\
From verl 0.6.0 to 0.7.0 samples on replicas other than the first are drawn anew with the patch: their distribution is
the same, and they depend less on each other. Runs with one replica keep their numbers.""",
    references=(
        "https://github.com/verl-project/verl/pull/5179",
        "https://github.com/verl-project/verl/pull/5181",
    ),
    variants=(
        Variant(Guard("verl", ">=0.6.0,<0.6.1"), (_rewrite("vLLMHttpServer"),)),
        Variant(Guard("verl", ">=0.6.1,<0.7.1"), (_rewrite("vLLMHttpServerBase"),)),
    ),
    obsolete_when="when the oldest verl in use is 0.7.1",
)
