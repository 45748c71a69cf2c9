"""slime's own `RolloutManager._post_process_rewards` of one tag: before, after, and reverted; and in a real Ray actor.

``--out FOLDER [--ray]`` on one rank, with slime's `ray/rollout` and `utils/types` on sys.path. Of the class only its
``__init__`` is another one here: slime's starts servers.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

import rlhf_patches
from rlhf_patches.proving import states
from tests.harness import own_ray, slime_clone

slime_clone.install()

from tests.patches.slime.uneven_groups_cases import CASES, ESTIMATORS, PER_PROMPT

NAME = "slime-uneven-groups"
ROOT = Path(__file__).resolve().parents[3]


def arguments(prompts: int, estimator: str, **settings: Any) -> SimpleNamespace:
    defaults = {"rewards_normalization": True, "grpo_std_normalization": True, "reward_key": None}
    sizes = {"n_samples_per_prompt": PER_PROMPT, "rollout_batch_size": prompts}
    return SimpleNamespace(advantage_estimator=estimator, **{**sizes, **defaults, **settings})


def set_up(self: Any, args: SimpleNamespace, pg: None = None) -> None:
    """In place of slime's ``__init__``."""
    self.args, self.custom_reward_post_process_func = args, getattr(args, "custom", None)


def manager_class() -> Any:
    """The class behind Ray's."""
    actor = importlib.import_module("slime.ray.rollout").RolloutManager
    found = inspect.getattr_static(actor, "__ray_actor_class__")
    found.__init__ = actor.__ray_metadata__.modified_class.__init__ = set_up
    return found


def samples(rewards: list[float], groups: list[int | None]) -> list[Any]:
    sample = importlib.import_module("slime.utils.types").Sample
    return [sample(group_index=group, reward=reward) for reward, group in zip(rewards, groups, strict=True)]


def observe() -> dict[str, Any]:
    made = manager_class()
    found: dict[str, Any] = {}
    for name, (prompts, rewards, groups) in CASES.items():
        for estimator in ESTIMATORS:
            manager = made(arguments(prompts, estimator))
            raw, found[f"{name}, {estimator}"] = manager._post_process_rewards(samples(rewards, groups))
            assert raw == rewards
    prompts, rewards, groups = CASES["fewer"]
    variations: dict[str, dict[str, Any]] = {
        "not divided": {"grpo_std_normalization": False},
        "not normalized": {"rewards_normalization": False},
        "custom": {"custom": lambda args, samples: ("own", [sample.reward for sample in samples])},
    }
    for name, settings in variations.items():
        manager = made(arguments(prompts, "grpo", **settings))
        _, found[name] = manager._post_process_rewards(samples(rewards, groups))
    return found


def in_an_actor() -> dict[str, Any]:
    """What the actor computes whose class Ray has sent; nothing applies a patch in the actor's own process."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        "env_vars": {"PYTHONPATH": path, "RLHF_PATCHES_AUTOLOAD": "0"},
        "worker_process_setup_hook": "tests.harness.slime_clone.install",
    }
    own_ray.start(num_cpus=2, runtime_env=environment)
    try:
        manager_class()
        prompts, rewards, groups = CASES["fewer"]
        actor = importlib.import_module("slime.ray.rollout").RolloutManager.remote(arguments(prompts, "grpo"), None)
        _, found = ray.get(actor._post_process_rewards.remote(samples(rewards, groups)))
        pid, applied = ray.get([actor.__ray_call__.remote(look) for look in (process, in_force)])
        return {"rewards": found, "another process": pid != os.getpid(), "in force there": applied}
    finally:
        ray.shutdown()


def process(actor: Any) -> int:
    return os.getpid()


def in_force(actor: Any) -> bool:
    return rlhf_patches.in_force(NAME)


def main() -> None:
    parser = states.parser()
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    importlib.import_module("slime.ray.rollout")
    if not options.ray:
        states.report(NAME, observe, options.out)
        return
    rlhf_patches.apply(only=NAME)
    (options.out / "rank0.json").write_text(json.dumps(in_an_actor()))
