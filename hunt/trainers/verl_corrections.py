"""verl's rollout correction: what the trainer makes of the engine's log-probabilities, then the actor's step.

The first is the trainer's own method since 0.9, which writes what it has computed back into the batch; the batch is a
dictionary in place of a store. Before, it is the function that the trainer calls, then what hands its batch to workers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hunt import policy_formulas
from hunt.outcomes import Outcome
from hunt.policy_formulas import Limits
from hunt.trainers import CannotRun, trainer, verl

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token-truncated": {"rollout_is": "token", "rollout_is_threshold": 1.5},
    "sequence-truncated": {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    "token-icepop": {"rollout_is": "token", "rollout_is_threshold": "0.6_1.5"},
    "token_k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.5"},
    "token_k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.1},
    "seq_sum_k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.2"},
    "seq_mean_k2": {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.1},
    "seq_max_k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.2},
}
"""By what is done: a weight for each token or response, or which of them are rejected; verl's own settings."""


def drawn(order: str, answers: int, apart: float | None, *, bypass: bool) -> list[dict[str, Any]]:
    """Rows with log-probabilities of the engine; the old policy's are the same in bypass mode."""
    import torch

    rows = verl.made(order, answers, apart=apart)
    for row in rows:
        generator = torch.Generator().manual_seed(50 + row["index"])
        far = torch.zeros(len(row["mask"]))
        far[row["mask"]] = 0.4 * torch.randn(int(row["mask"].sum()), generator=generator)
        sampled = torch.where(row["mask"], (row["old_log_probs"] + far).clamp(max=-0.05), row["old_log_probs"])
        row["rollout_log_probs"] = row["old_log_probs"] if bypass else sampled
    return rows


def kept(name: str, apart: Any) -> Any:
    """Which tokens are not rejected, given the logarithms of their ratios of trainer to engine."""
    import torch

    settings = CORRECTIONS[name]
    if "rollout_rs" not in settings:
        return torch.ones(len(apart), dtype=torch.bool)
    over, kind = settings["rollout_rs"].rsplit("_", 1)
    found = policy_formulas.divergence(kind, -apart, 0 * apart) if kind == "k1" else None
    if found is None:
        found = apart**2 / 2 if kind == "k2" else apart.exp() - 1 - apart
    of_all = {"seq_sum": found.sum, "seq_mean": found.mean, "seq_max": found.max}
    found = found if over == "token" else of_all[over]().expand(len(found))
    if kind != "k1":
        return found <= settings["rollout_rs_threshold"]
    low, high = map(float, settings["rollout_rs_threshold"].split("_"))
    return (found.exp() >= low) & (found.exp() <= high)


def weights(name: str, apart: Any) -> Any:
    """Of the tokens, given the logarithms of their ratios."""
    import torch

    settings = CORRECTIONS[name]
    if "rollout_is" not in settings:
        return torch.ones_like(apart)
    found = (apart.sum().expand(len(apart)) if settings["rollout_is"] == "sequence" else apart).exp()
    if isinstance(border := settings["rollout_is_threshold"], str):
        low, high = map(float, border.split("_"))
        return found * (found >= low) * (found <= high)
    return found.clamp(max=border)


def formula(kind: str, name: str, average: str, rows: list[dict[str, Any]], policies: Sequence[Any]) -> Any:
    """PPO's or REINFORCE's loss of the tokens that are kept, times their weights; a mean over those that are kept."""
    losses = []
    for row, policy in zip(rows, policies, strict=True):
        response = verl.response_of(row, policy)
        sampled = row["rollout_log_probs"][row["mask"]].double()
        apart = (response.old if kind == "decoupled" else policy.detach()) - sampled
        loss = policy_formulas.LOSSES["gpg" if kind == "reinforce" else "ppo"](response, Limits(dual=3.0))
        if kind != "bypass":  # whose ratio is to the engine already
            loss = loss * weights(name, apart)
        losses.append(loss[kept(name, apart)])
    if average == "token-mean":
        return policy_formulas.averaged(losses, average, 1.0)
    of_each = [each.mean() if len(each) else each.sum() for each in losses]
    return sum(of_each) / len(losses)


def written(rows: list[dict[str, Any]], settings: dict[str, Any], average: str) -> dict[str, list[Any]]:
    """What the trainer makes of the batch, by name, for each row; ``average`` is the loss's."""
    import torch

    given = {name: [row[name] for row in rows] for name in ("old_log_probs", "rollout_log_probs")}
    given |= {"rm_scores": given["old_log_probs"], "response_mask": [row["mask"].long() for row in rows]}
    try:
        module = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    except ModuleNotFoundError:
        found = by_function(
            {name: torch.nn.utils.rnn.pad_sequence(each, True) for name, each in given.items()}, settings
        )
        found = {name: [each[at, : len(row["mask"])] for at, row in enumerate(rows)] for name, each in found.items()}
        return {**found, "loss_mask": found["response_mask"]}  # as left_right_2_no_padding does
    nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in given.items()}
    nested["loss_mask"] = nested["response_mask"]  # as the agent loop does
    return {name: list(each.unbind()) for name, each in by_trainer(module, nested, settings, average).items()}


def by_function(given: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """As the trainers before 0.9 call it."""
    from omegaconf import OmegaConf
    from verl import DataProto

    try:
        module = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    except ModuleNotFoundError as error:
        raise CannotRun("this verl has no rollout correction") from error
    data, config = DataProto.from_dict(tensors=given), OmegaConf.create(settings)
    try:
        found, _ = module.compute_rollout_correction_and_add_to_batch(data, config)
    except (TypeError, ValueError) as error:
        raise CannotRun(str(error)) from error
    return {name: found.batch[name] for name in ("response_mask", "rollout_is_weights") if name in found.batch}


class Keys(SimpleNamespace):
    """A batch of the trainer's, of which it knows the keys only."""

    keys: list[str]

    def __len__(self) -> int:
        return len(self.keys)


def by_trainer(module: Any, given: dict[str, Any], settings: dict[str, Any], average: str) -> dict[str, Any]:
    """By the trainer's `_compute_advantage`, whose advantages are others."""
    import torch
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    out: dict[str, Any] = {}
    number = len(given["response_mask"].unbind())

    def get(select_fields: list[str], **_: Any) -> Any:
        every = {**given, "uid": torch.arange(number)}
        return TensorDict({name: every[name] for name in select_fields if name in every}, batch_size=number)

    def put(fields: Any, **_: Any) -> None:
        out.update(fields.items())

    def advantages(data: Any, **_: Any) -> Any:
        data.batch["advantages"] = data.batch["returns"] = torch.zeros_like(data.batch["old_log_probs"])
        return data

    module.tq = SimpleNamespace(kv_batch_get=get, kv_batch_put=put)
    module.compute_advantage_for_multi_trajectories = advantages
    # not a subclass of our own, which the patches leave as released
    one: Any = object.__new__(importlib.import_module("verl.trainer.ppo.v1.trainer_sync").PPOTrainerSync)
    one.config = OmegaConf.create(
        {
            "algorithm": {"use_kl_in_reward": False, "rollout_correction": settings, "adv_estimator": "grpo"}
            | {"gamma": 1.0, "lam": 1.0},
            "actor_rollout_ref": {
                "rollout": {"n": 1},
                "actor": {
                    "loss_agg_mode": average,
                    "ppo_mini_batch_size": number,
                    "policy_loss": {"loss_mode": "vanilla"},
                },
            },
        }
    )
    writers = importlib.import_module("verl.trainer.ppo.v1.agent_loop_tq")
    one.agent_loop_manager = object.__new__(writers.AgentLoopManagerTQ)
    one.agent_loop_manager.agent_loop_workers_class = writers.AgentLoopWorkerTQ
    one._compute_advantage(Keys(keys=[str(at) for at in range(number)], partition_id="train"), {})
    return {name: out[name] for name in ("response_mask", "loss_mask", "rollout_is_weights") if name in out}


NAMES = [
    *(f"decoupled-{name}-token-mean" for name in CORRECTIONS),
    *(f"decoupled-{name}-seq-mean-token-mean" for name in ("token_k3", "seq_sum_k1")),
    *(f"bypass-{name}-token-mean" for name in ("token_k1", "token_k3", "seq_mean_k1")),
    "bypass-seq_mean_k1-seq-mean-token-mean",
    *(f"reinforce-{name}-token-mean" for name in ("token-truncated", "sequence-truncated", "token-icepop")),
    "reinforce-seq_mean_k1-token-mean",
]


@trainer(*(f"verl_corrections/{name}" for name in NAMES))
def corrected(
    *, name: str, by: str = "trainer", micro_batch: int = 8, answers: int = 0, apart: float | None = None
) -> Outcome:
    from verl.workers.config import ActorConfig

    kind = name.partition("-")[0]
    average = "seq-mean-token-mean" if name.endswith("seq-mean-token-mean") else "token-mean"
    correction = name.removeprefix(f"{kind}-").removesuffix(f"-{average}")
    settings = {"rollout_is": None, "rollout_rs": None, "bypass_mode": kind != "decoupled", **CORRECTIONS[correction]}
    settings["loss_type"] = "reinforce" if kind == "reinforce" else "ppo_clip"
    rows = drawn("given", answers, 0.3 if apart is None else apart, bypass=kind != "decoupled")
    if by == "formula":
        return verl.by_formula(rows, functools.partial(formula, kind, correction, average))
    losses = importlib.import_module("verl.workers.utils.losses")
    try:
        policy = type(ActorConfig.__dataclass_fields__["policy_loss"].default_factory())
        chosen = policy() if kind == "decoupled" else policy(loss_mode="bypass_mode", rollout_correction=settings)
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=average, policy_loss=chosen
        )
    except (ValueError, TypeError) as error:
        raise CannotRun(str(error)) from error
    more = written(rows, settings, average) if kind == "decoupled" else {}
    return verl.step(
        rows,
        functools.partial(losses.ppo_loss, config),
        functools.partial(verl.of_tokens, "log_probs"),
        micro_batch=micro_batch,
        ranks=1,
        nested=verl._nested(None, 0),
        padding=0,
        more=more,
    )
