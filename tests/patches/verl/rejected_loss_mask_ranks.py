"""verl's trainer with rollout correction, then the actor's step on verl's engine for FSDP: ``--out FOLDER``, one rank.

The trainer's own `_compute_advantage` reads eight responses from a dictionary in place of TransferQueue, as the agent
loop has written them, and writes to it. The engine gets what the dictionary has then.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf

import rlhf_patches
from rlhf_patches.patches.verl.proofs import policy_on_fsdp
from rlhf_patches.patches.verl.proofs.critic_loss_scale_ranks import RESPONSES, on_cpu
from rlhf_patches.proving import states
from tests.harness import absent_packages

NAME = "verl-rejected-loss-mask"
TOKENS, WHOLE = "token_k1", "seq_sum_k1"
THRESHOLDS = "0.5_2.0"
CORRECTION = "compute_rollout_correction_and_add_to_batch"
REJECTED = (2, 6)
"""The responses with a token that is rejected; each has all of its others left, or with `WHOLE` none."""
TRAINED = ("tokens", "responses", "without a token mean", "none rejected", "a mini-batch may be empty")
"""The cases of which the gradient is computed, too."""


def stored(apart: tuple[int, ...] = REJECTED) -> dict[str, Any]:
    """As `_agent_loop_postprocess` writes it, and old log-probabilities; some of the engine's are 3 apart."""
    jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    made = policy_on_fsdp.mini_batch()
    rows: dict[str, list[Any]] = {
        name: [made[name][row, :length] for row, length in enumerate(RESPONSES)]
        for name in ("old_log_probs", "response_mask")
    }
    rows["rollout_log_probs"] = [each.clone() for each in rows["old_log_probs"]]
    rows["rm_scores"] = [torch.zeros_like(each) for each in rows["old_log_probs"]]
    for row, scores in enumerate(rows["rm_scores"]):
        scores[-1] = (1.0, 0.0, 0.5, 0.2, -1.0, 0.3, 0.0, 2.0)[row]
    for row in apart:
        rows["rollout_log_probs"][row][0] += 3
    fields: dict[str, Any] = {name: jagged(each) for name, each in rows.items()}
    return {**fields, "loss_mask": fields["response_mask"], "uid": [f"prompt{row // 4}" for row in range(8)]}


class Batch(SimpleNamespace):
    """What the trainer knows of a batch: its keys."""

    keys: list[str]

    def __len__(self) -> int:
        return len(self.keys)


def modules() -> tuple[Any, Any]:
    """The trainer's, and the one of what writes its batches."""
    absent_packages.install(absent_packages.ENGINES)
    try:
        trainer = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    except ModuleNotFoundError:
        module = importlib.import_module("verl.trainer.main_ppo_sync")
        return module, module
    return trainer, importlib.import_module("verl.trainer.ppo.v1.agent_loop_tq")


def configuration(**changes: Any) -> Any:
    made = OmegaConf.create(
        {
            "algorithm": {
                "use_kl_in_reward": False,
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
                "rollout_correction": {"rollout_is": None, "rollout_rs": TOKENS, "rollout_rs_threshold": THRESHOLDS},
            },
            "actor_rollout_ref": {
                "rollout": {"n": 4},
                "actor": {
                    "loss_agg_mode": "token-mean",
                    "ppo_mini_batch_size": 2,
                    "policy_loss": {"loss_mode": "vanilla"},
                },
            },
            "critic": {"loss_agg_mode": "token-mean", "ppo_mini_batch_size": 2},
        }
    )
    for name, value in changes.items():
        OmegaConf.update(made, name.replace("__", "."), value)
    return made


def written(fields: Mapping[str, Any], config: Any, **own: Any) -> dict[str, Any]:
    """The fields that the trainer writes.

    Args:
        fields: that it finds.
        config: its configuration.
        own: its attributes.
    """
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack

    module, writers = modules()
    found: dict[str, Any] = {}

    def get(*, select_fields: list[str], **_: Any) -> Any:
        chosen = {name: fields[name] for name in select_fields if name in fields and name != "uid"}
        if "uid" in select_fields:
            chosen["uid"] = NonTensorStack(*fields["uid"])
        return TensorDict(chosen, batch_size=len(RESPONSES))

    def put(*, fields: Any, **_: Any) -> None:
        found.update(fields.items())

    module.tq = SimpleNamespace(kv_batch_get=get, kv_batch_put=put)
    released: Any = module.PPOTrainer
    if module is not writers:
        released = importlib.import_module("verl.trainer.ppo.v1.trainer_sync").PPOTrainerSync
    trainer: Any = object.__new__(own.pop("trainer", lambda base: base)(released))
    replaced = own.pop("replaced", ())
    manager = object.__new__(writers.AgentLoopManagerTQ)
    manager.agent_loop_workers_class = writers.AgentLoopWorkerTQ
    name = "agent_loop_manager" if module is not writers else "async_rollout_manager"
    vars(trainer).update({name: manager, "config": config, "use_critic": False})
    vars(trainer).update({name if each == "manager" else each: value for each, value in own.items()})
    batch = Batch(keys=[f"{row // 4}_{row % 4}_0" for row in range(8)], partition_id="train")
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        trainer._compute_advantage(batch, {})
    return found


def gradient(fields: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Of the actor's step, with the fields that are stored; compared with float64."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    engine, data = policy_on_fsdp.prepared(4)
    for name in ("response_mask", "loss_mask", "advantages", "old_log_probs"):
        data[name] = fields[name]
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode)
    found = engine.forward_backward_batch(data, functools.partial(ppo_loss, config=config), forward_only=False)
    flat = torch.cat([each.grad.full_tensor().flatten() for each in engine.module.parameters()])
    return policy_on_fsdp.compared({"gradient": flat, "loss": sum(found["loss"])}, exactly(fields, mode))


def exactly(fields: Mapping[str, Any], mode: str) -> torch.Tensor:
    """PPO's gradient of the mean over the tokens that are kept, or of their responses' means; a row at a time."""
    model = copy.deepcopy(policy_on_fsdp.make_model()).double()
    losses, kept = [], [each.bool() for each in fields["response_mask"].unbind()]
    for row, mask in enumerate(kept):
        old, advantages = (fields[name].unbind()[row].double() for name in ("old_log_probs", "advantages"))
        ratio = (policy_on_fsdp.log_probs(model, row) - old).exp()
        losses.append(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[mask])
    if mode == "token-mean":
        loss = torch.cat(losses).mean()
    else:
        loss = torch.stack([each.mean() if len(each) else each.sum() for each in losses]).mean()
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


def as_lists(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [row.tolist() for row in each.unbind()] for name, each in fields.items()}


def with_own_weights(base: Any) -> Any:
    """A user's trainer that makes up for the rejected tokens: it is right as released."""

    def compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        storage = modules()[0].tq
        put = storage.kv_batch_put

        def weighted(*, fields: Any, **more: Any) -> None:
            mask, advantages = fields["response_mask"], fields["advantages"]
            weight = len(mask.values()) / mask.values().sum()
            put(fields={**fields, "advantages": advantages * weight}, **more)

        storage.kv_batch_put = weighted
        return base._compute_advantage(self, batch, metrics)

    return type("Own", (base,), {"_compute_advantage": compute_advantage})


def own_correction(module: Any) -> Any:
    released = getattr(module, CORRECTION)
    return lambda *given: released(*given)


def own_average(**_: Any) -> None:
    """It stands for the user's own, which is not called here."""


def cases() -> dict[str, Any]:
    """By name: the configuration, what is stored, and attributes of the trainer."""
    module, writers = modules()
    geo_mean = {"actor_rollout_ref__actor__policy_loss__loss_mode": "geo_mean"}
    whole = {"algorithm__rollout_correction__rollout_rs": WHOLE}
    per_response = {"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean"}
    own_mask = stored()
    own_mask["loss_mask"] = torch.nested.nested_tensor_from_jagged(
        own_mask["response_mask"].values() * 2, own_mask["response_mask"].offsets()
    )
    shorter = stored()
    shorter["loss_mask"] = torch.nested.as_nested_tensor(
        [row[:-1] if not at else row for at, row in enumerate(shorter["response_mask"].unbind())], layout=torch.jagged
    )
    missing = stored()
    del missing["loss_mask"]
    no_engine = stored()
    del no_engine["rollout_log_probs"]
    own_manager: Any = object.__new__(type("Own", (writers.AgentLoopManagerTQ,), {}))
    own_manager.agent_loop_workers_class = writers.AgentLoopWorkerTQ
    own_workers = object.__new__(writers.AgentLoopManagerTQ)
    own_workers.agent_loop_workers_class = object()
    empty = {"actor_rollout_ref__actor__ppo_mini_batch_size": 1, "actor_rollout_ref__rollout__n": 2}
    strided = stored()
    strided["loss_mask"] = torch.nested.nested_tensor(list(strided["loss_mask"].unbind()))
    padded = stored(REJECTED[:1])
    counted = [row * (at != REJECTED[1]) for at, row in enumerate(padded["response_mask"].unbind())]
    padded["response_mask"] = padded["loss_mask"] = torch.nested.as_nested_tensor(counted, layout=torch.jagged)
    return {
        "tokens": (configuration(), stored(), {}),
        "responses": (configuration(**whole), stored(), {}),
        "without a token mean": (configuration(**per_response), stored(), {}),
        "none rejected": (configuration(), stored(()), {}),
        "a mini-batch may be empty": (configuration(**whole, **empty), stored(), {}),
        "empty ones are fewer": (configuration(**whole, **{**empty, "actor_rollout_ref__rollout__n": 3}), stored(), {}),
        "padding": (configuration(**whole, **empty), padded, {}),
        "the critic alone": (configuration(**per_response), stored(), {"use_critic": True}),
        "weights alone": (
            configuration(
                algorithm__rollout_correction__rollout_is="token", algorithm__rollout_correction__rollout_rs=None
            ),
            stored(),
            {},
        ),
        "bypass": (configuration(algorithm__rollout_correction__bypass_mode=True), stored(), {}),
        "no correction": (configuration(algorithm__rollout_correction=None), stored(), {}),
        "no log-probabilities": (configuration(), no_engine, {}),
        "own mask": (configuration(), own_mask, {}),
        "shorter mask": (configuration(), shorter, {}),
        "no mask": (configuration(), missing, {}),
        "own manager": (configuration(), stored(), {"manager": own_manager}),
        "own workers": (configuration(), stored(), {"manager": own_workers}),
        "no manager": (configuration(), stored(), {"manager": None}),
        "strided mask": (configuration(), strided, {}),
        "own trainer": (configuration(), stored(), {"trainer": with_own_weights}),
        "own step": (configuration(), stored(), {"_update_actor": lambda *_: None}),
        "own correction": (configuration(), stored(), {"replaced": [(module, CORRECTION, own_correction(module))]}),
        "own average": (configuration(), stored(), {"replaced": [(module.core_algos, "agg_loss", own_average)]}),
        "geo_mean": (configuration(**geo_mean), stored(), {}),
        "geo_mean, entropy": (
            configuration(**geo_mean, actor_rollout_ref__actor__entropy_coeff=0.01),
            stored(),
            {},
        ),
        "own loss": (configuration(actor_rollout_ref__actor__policy_loss__loss_mode="own"), stored(), {}),
        "the workers' loss": (configuration(actor_rollout_ref__actor__policy_loss__loss_mode="theirs"), stored(), {}),
        "own configuration": (
            OmegaConf.merge(configuration(), {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": "many"}}}),
            stored(),
            {},
        ),
    }


def observe() -> dict[str, Any]:
    core_algos: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    core_algos.POLICY_LOSS_REGISTRY["own"] = lambda **_: None
    found: dict[str, Any] = {}
    for name, (config, fields, own) in cases().items():
        before = as_lists({key: value for key, value in fields.items() if key != "uid"})
        new = written(fields, config, **own)
        found[name] = {"written": as_lists(new)}
        assert as_lists({key: value for key, value in fields.items() if key != "uid"}) == before
        if name in TRAINED:
            mode = config.actor_rollout_ref.actor.loss_agg_mode
            found[name]["gradient"] = gradient({**fields, **new}, mode)
    return found


def main() -> None:
    options = states.parser().parse_args()
    torch.set_num_threads(1)
    on_cpu()
    torch.distributed.init_process_group("gloo")
    modules()
    with states.heard() as messages:
        states.report(NAME, observe, options.out)
    group = "verl-rejected-in-group"
    rows = rlhf_patches.apply(only=[NAME, group])
    whole = configuration(algorithm__rollout_correction__rollout_rs=WHOLE)
    both = {**stored(), **written(stored(), whole)}
    report = options.out / f"rank{os.environ['RANK']}.json"
    found = json.loads(report.read_text())
    found["both"] = {
        "statuses": [rows[each].status.value for each in (NAME, group)],
        "written": as_lists({name: both[name] for name in ("loss_mask", "response_mask", "advantages")}),
        "gradient": gradient(both, "token-mean"),
    }
    found["messages"] = messages
    rlhf_patches.revert()
    report.write_text(json.dumps(found))
