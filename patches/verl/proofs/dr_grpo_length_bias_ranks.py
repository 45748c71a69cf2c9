"""Dr.GRPO's loss as verl's own worker makes it, on its real engine, and in float64 from the definition.

``--out FOLDER [--briefly]``, with the folder of a verl release on sys.path and that of what its workers import (hydra),
on one or more data-parallel ranks. The configuration is the release's own; `ActorRolloutRefWorker.init_model` makes the
loss of it. Instead of the engine, which would be for CUDA, a recorder takes what the worker has made.
"""

from __future__ import annotations

import copy
import functools
import importlib
from pathlib import Path
from typing import Any

import torch

from rlhf_patches.patches.verl.proofs import policy_on_fsdp
from rlhf_patches.patches.verl.proofs.critic_loss_scale_ranks import PROMPTS, RESPONSE, on_cpu
from rlhf_patches.proving import states

PATCH = "verl-dr-grpo-length-bias"
LENGTH = 16
"""What a response may have; the longest has less."""
MODE = "seq-mean-token-sum-norm"
CLIP = 0.2


class Recorder:
    """In the place of verl's TrainingWorker."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def reset(self) -> None: ...

    def get_dispatch_collect(self) -> dict[str, Any]:
        return {}

    def set_loss_fn(self, loss_fn: Any) -> None:
        self.loss_function = loss_fn


@functools.cache
def model_folder() -> str:
    """What the worker reads of the model when it only makes configurations."""
    folder = states.folder()
    config = policy_on_fsdp.make_model().config
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@functools.cache
def configuration(*overrides: str) -> Any:
    """verl's own, with what no run can do without, and what `main_ppo` sets for the trainer without padding."""
    import hydra
    import verl

    folder = Path(verl.__file__).parent / "trainer" / "config"
    ours = (
        f"actor_rollout_ref.model.path={model_folder()}",
        "+actor_rollout_ref.model.load_tokenizer=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.name=vllm",
        "transfer_queue.enable=true",
    )
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("ppo_trainer", overrides=[*ours, *overrides])


def make_worker(*overrides: str) -> Any:
    """A worker of verl's that has made its loss of the configuration, and that configuration."""
    workers: Any = importlib.import_module("verl.workers.engine_workers")
    workers.TrainingWorker = Recorder  # 0.8 names it in the function, 0.9 in the class
    workers.aggressive_empty_cache = lambda **_: None  # of a GPU
    members = {"actor_worker_cls": Recorder, "set_dispatch_collect": lambda *_, **__: None}
    worker: Any = object.__new__(type("Worker", (workers.ActorRolloutRefWorker,), members))
    config = copy.deepcopy(configuration(*overrides)).actor_rollout_ref
    worker.config, worker.role = config, "actor"
    worker.distillation_enabled, worker.distillation_config, worker._omega_profiler_config = False, None, None
    worker.init_model()
    return worker


def older_trainer() -> list[str]:
    """Its settings: 0.8 has another program for the trainer without padding."""
    has_both = "use_v1" in configuration().trainer
    return ["transfer_queue.enable=false", *(["trainer.use_v1=false"] if has_both else [])]


def of_a_sequence(length: int, ratios: torch.Tensor, advantages: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """PPO's clipped objective, added up over the tokens and divided by the same number for all sequences."""
    ratio = ratios.exp()
    losses = -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return (losses * counted).sum() / length


@functools.cache
def exactly(length: int) -> torch.Tensor:
    return policy_on_fsdp.exactly(functools.partial(of_a_sequence, length))


def step(
    rows: int, *, mode: str = MODE, length: int = LENGTH, factor: int | None = None, width: int | None = None
) -> dict[str, Any]:
    """One mini-batch; the gradient is compared with Dr.GRPO's of that length, or that factor."""
    worker = make_worker(
        f"data.max_response_length={length}",
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
        *([f"actor_rollout_ref.actor.loss_scale_factor={factor}"] if factor else []),
        *(older_trainer() if width else []),
    )
    found = policy_on_fsdp.step(worker.actor.loss_function, rows, width)
    settings = worker.config.actor
    return {
        **policy_on_fsdp.compared(found, exactly(factor or length)),
        "the user's": [settings.loss_agg_mode, settings.loss_scale_factor, worker.config.rollout.response_length],
    }


def observations(all_of_them: bool) -> dict[str, Any]:
    here = len(PROMPTS) // torch.distributed.get_world_size()
    if not all_of_them:
        return {"micro-batches": {here: step(1)}}
    return {
        "micro-batches": {here // rows: step(rows) for rows in (here, 2, 1)},
        "as before": {
            "the older trainer": step(1, width=LENGTH),
            "a factor": step(1, factor=5),
            "one micro-batch, full length": step(len(PROMPTS), length=RESPONSE) if here == len(PROMPTS) else None,
            **{mode: step(1, mode=mode) for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")},
        },
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("--briefly", action="store_true", help="micro-batches of one row alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu()
    torch.distributed.init_process_group("gloo")
    everything = not options.briefly
    of_states = iter((everything, everything, False))
    states.report(PATCH, lambda: observations(next(of_states)), options.out)
