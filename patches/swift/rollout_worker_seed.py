"""ms-swift's rollout server: each data-parallel worker samples with its own seed."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def seed_of(args: Any, rank: int) -> dict[str, int]:
    """The engine's ``seed`` for a worker other than the first, whose seed does not change.

    Args:
        args: the server's, with or without a seed in ``vllm_engine_kwargs``.
        rank: the worker's number, from 0.
    """
    if not rank:
        return {}
    given = getattr(args, "vllm_engine_kwargs", None)
    seed = given.get("seed") if isinstance(given, dict) else None
    return {"seed": (seed if isinstance(seed, int) else 0) + rank}  # 0 is vLLM's default


def has_the_first_ones_seed(data_parallel_rank: Any) -> bool | None:
    """Whether a worker is not the first: its engine draws the first one's random numbers."""
    return data_parallel_rank > 0 if isinstance(data_parallel_rank, int) else None


_WORKER = "swift.llm.infer.rollout:llm_worker"


def _variant(versions: str, arguments: str) -> Variant:
    return Variant(
        Guard("ms-swift", versions),
        (
            Rewrite(
                target=_WORKER,
                pattern=f"SwiftRolloutDeploy.get_infer_engine({arguments})",
                replacement=f"SwiftRolloutDeploy.get_infer_engine({arguments}, **$SEED_OF(args, data_parallel_rank))",
                uses={"SEED_OF": f"{__name__}:{seed_of.__name__}"},
            ),
        ),
    )


PATCH = Patch(
    name="swift-rollout-worker-seed",
    summary="the rollout server's data-parallel workers sample differently",
    harm="wrong data",
    affects_rollouts=True,
    bug="the data-parallel workers of the rollout server share a seed, and return the same samples of a prompt",
    when="swift rollout with vllm_data_parallel_size above 1, and a group's samples on several workers",
    excluded_by=("vllm_mode=colocate", "use_vllm=false|absent", "vllm_data_parallel_size=1"),
    symptom="""\
`swift rollout` with `--vllm_data_parallel_size` above 1: if the samples of one prompt are on two workers, both return
the same completions. A group of eight has four different completions, each twice. With one sample per worker, all are
the same, rewards have no spread, and advantages are 0. No error is raised.""",
    cause="""\
Each worker has its own engine, none gets a seed, and vLLM's default is 0. Up to 0.31.0, vLLM does not add the worker's
number. Requests have no seed in server mode.""",
    repair="""\
A worker's seed is the first worker's seed plus the worker's number. The first worker's seed does not change: vLLM's 0,
or the one in `--vllm_engine_kwargs`. Rollouts are reproducible, as before; 3.12.3 draws seeds at random. With one
worker, nothing changes. Requests with their own seed are not affected.

The patch does not repair `vllm_use_async_engine`, where one vLLM engine has the data-parallel workers; 3.12.3 does not
either.""",
    changes_numbers="""\
Since ms-swift 3.5.0, the rollout server's data-parallel workers drew the same random numbers, so the samples of a group
could be copies of each other. With the patch, they differ. A run with copies was trained with smaller groups than
configured.""",
    references=("https://github.com/modelscope/ms-swift/pull/7858",),
    variants=(
        _variant(">=3.5.0,<3.7.0", "args, **kwargs"),
        _variant(">=3.7.0,<3.12.3", "args, template=args.get_template(None)"),
    ),
    obsolete_when="when the oldest ms-swift in use is 3.12.3",
    conditions=(Condition(_WORKER, f"{__name__}:{has_the_first_ones_seed.__name__}"),),
)
