"""Rehearsals of verl's real FSDP engines on the CPU: ``--out FOLDER``, each case without the patches and with them.

The mini-batches are those of policy_on_fsdp.py and critic_loss_scale_ranks.py.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import rlhf_patches
from rlhf_patches.proving import states
from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from rlhf_patches.patches.verl.proofs import critic_loss_scale_ranks, dr_grpo_length_bias_ranks, policy_on_fsdp
from rlhf_patches.patches.verl.proofs.critic_loss_scale_ranks import PROMPTS, RESPONSE, RESPONSES
from rlhf_patches.patches.verl.proofs.gmpo_micro_batches_ranks import make_config
from rlhf_patches.rehearsal import start
from rlhf_patches.rehearsal.verl_engine import EngineRehearsal

PATCHES = ("verl-gmpo-micro-batches", "verl-dr-grpo-length-bias", "verl-critic-loss-scale")
OF_BEFORE = ("verl-rollout-seed", "verl-rejected-loss-mask", "verl-rotary-precision")


def policy(mode: str, rows: int, width: int | None = RESPONSE, **fields: Any) -> tuple[Any, Any, Any]:
    from verl.workers.utils.losses import ppo_loss

    engine, data = policy_on_fsdp.prepared(rows, width, **fields)
    return engine, data, functools.partial(ppo_loss, config=make_config(mode))


def own_log_probs() -> torch.Tensor:
    """The old log-probabilities of a run before its first update."""
    old = torch.zeros(len(PROMPTS), RESPONSE)
    with torch.no_grad():
        for row, response in enumerate(RESPONSES):
            old[row, :response] = policy_on_fsdp.log_probs(policy_on_fsdp.make_model(), row)
    return old


def rollouts(temperature: float = 1.0) -> tuple[Any, Any, Any]:
    """The engine's log-probabilities are those of temperature 1, but for rounding."""
    from verl.utils import tensordict_utils as tu

    own = own_log_probs()
    noise = 0.01 * torch.randn(own.shape, generator=torch.Generator().manual_seed(5))
    engine, data, loss = policy("vanilla", 2, old_log_probs=own, rollout_log_probs=own + noise)
    tu.assign_non_tensor(data, temperature=temperature)
    return engine, data, loss


def of_one_prompt() -> tuple[Any, Any, Any]:
    """A prompt's samples as verl's own server draws them with ``full_determinism``."""
    from rlhf_patches.patches.verl.proofs import rollout_seed_ranks

    engine, data, loss = policy("vanilla", 2, None)
    rows, rank, ranks = len(PROMPTS), torch.distributed.get_rank(), torch.distributed.get_world_size()
    drawn = rollout_seed_ranks.asked_by_v1(rollout_seed_ranks.make_server(), index=3)["tokens"]
    answers = torch.tensor(drawn)[:rows] % 64
    prompts = torch.tensor([[1, 2, 3]]).expand(rows, -1)
    shape = answers.shape
    fields = {
        "input_ids": torch.cat([prompts, answers], 1),
        "position_ids": torch.arange(3 + shape[1]).expand(rows, -1),
        "prompts": prompts,
        "responses": answers,
        "response_mask": torch.ones(shape, dtype=torch.long),
        "loss_mask": torch.ones(shape, dtype=torch.long),
        "old_log_probs": torch.full(shape, -4.0),
        "advantages": torch.randn(rows, 1, generator=torch.Generator().manual_seed(3)).expand(shape),
    }
    for name, value in fields.items():
        data[name] = torch.nested.as_nested_tensor([*value.chunk(ranks)[rank]], layout=torch.jagged)
    return engine, data, loss


def rejected() -> tuple[Any, Any, Any]:
    """What verl's own trainer has stored after it has rejected tokens."""
    from tests.patches.verl import rejected_loss_mask_ranks as of_trainer

    engine, data, loss = policy("vanilla", 2, None)
    stored = of_trainer.stored()
    fields = {**stored, **of_trainer.written(stored, of_trainer.configuration())}
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name in ("response_mask", "loss_mask", "advantages", "old_log_probs"):
        rows = [*fields[name].unbind()][rank * len(data) : (rank + 1) * len(data)]
        assert len(rows) * ranks == len(PROMPTS)
        data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return engine, data, loss


def in_half() -> tuple[Any, Any, Any]:
    """An actor as verl's own engine builds it with ``model_dtype=bf16``."""
    from torch.distributed.fsdp import fully_shard

    from rlhf_patches.patches.verl.proofs import rotary_precision_ranks

    engine, data, loss = policy("vanilla", 2)
    folder = states.folder()
    policy_on_fsdp.make_model().save_pretrained(folder)
    with mock.patch.object(rotary_precision_ranks, "folder", return_value=folder):
        module = rotary_precision_ranks.built({"dtype": "bf16"})
    engine.module = fully_shard(module, mesh=policy_on_fsdp.mesh(torch.distributed.get_world_size()))
    return engine, data, loss


def dynamic() -> tuple[Any, Any, Any]:
    from verl.utils import tensordict_utils as tu

    engine, data, loss = policy("vanilla", 2, old_log_probs=own_log_probs())
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=24)
    return engine, data, loss


def with_dropout() -> tuple[Any, Any, Any]:
    made = policy("vanilla", 2)
    for layer in made[0].module.model.layers:
        layer.self_attn.attention_dropout = 0.3
    made[0].module.train()
    return made


def dr_grpo() -> tuple[Any, Any, Any]:
    """As verl's own worker makes the loss, for the trainer without padding."""
    worker = dr_grpo_length_bias_ranks.make_worker(
        f"data.max_response_length={dr_grpo_length_bias_ranks.LENGTH}",
        f"actor_rollout_ref.actor.loss_agg_mode={dr_grpo_length_bias_ranks.MODE}",
    )
    return *policy_on_fsdp.prepared(2), worker.actor.loss_function


def right(mode: str, how: str, width: int | None = None, **settings: Any) -> tuple[Any, Any, Any]:
    """A loss of verl's that adds up over micro-batches, with all that it may read."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.torch_functional import entropy_from_logits
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    rows = policy_on_fsdp.mini_batch()
    generator = torch.Generator().manual_seed(3)
    fields = {
        "ref_log_prob": rows["old_log_probs"] + 0.1 * torch.randn(rows["old_log_probs"].shape, generator=generator),
        "rollout_log_probs": own_log_probs() + 0.02 * torch.randn(rows["old_log_probs"].shape, generator=generator),
        "rollout_is_weights": 0.5 + torch.rand(rows["old_log_probs"].shape, generator=generator),
    }
    engine, data = policy_on_fsdp.prepared(2, width, **fields)
    engine.compute_entropy_from_logits = entropy_from_logits
    tu.assign_non_tensor(data, calculate_entropy=True)
    settings = {"entropy_coeff": 0.0, "loss_agg_mode": how, "loss_scale_factor": 16, **settings}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=mode, **({"dro_beta": 0.1} if mode == "dro" else {})),
        **settings,
    )
    return engine, data, functools.partial(ppo_loss, config=config)


def critic(case: str) -> tuple[Any, Any, Any]:
    return critic_loss_scale_ranks.prepared(critic_loss_scale_ranks.CASES[case])


CASES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "vanilla": lambda: policy("vanilla", 2),
    "vanilla, rows of one": lambda: policy("vanilla", 1),
    "vanilla, before the first update": lambda: policy("vanilla", 2, old_log_probs=own_log_probs()),
    "vanilla, dynamic": dynamic,
    "gmpo": lambda: policy("geo_mean", 2),
    "dr-grpo": dr_grpo,
    "critic": lambda: critic("two"),
    "critic, seq-mean-token-sum": lambda: critic("two, seq-mean-token-sum"),
    "dropout": with_dropout,
    "replaced head": lambda: policy("vanilla", 2),
    "rollouts": rollouts,
    "rollouts, temperature": lambda: rollouts(0.1),  # the logits of this small model are close to each other
}
BEFORE = {"samples": of_one_prompt, "rejected": rejected, "bf16": in_half}


LOSSES = ("bypass_mode", "cispo", "dppo_kl", "dppo_tv", "dro", "gpg", "gspo", "sapo", "vanilla", "kl_cov")
HOWS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MORE: dict[str, dict[str, Any]] = {
    "entropy": {"entropy_coeff": 0.1},
    "KL": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "k3": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3+"},
    "dual clipping": {"clip_ratio_c": 1.5},
}
RIGHT = {
    **{f"{mode}, nested": functools.partial(right, mode, HOWS[0]) for mode in LOSSES},
    **{f"{mode}, padded": functools.partial(right, mode, HOWS[0], RESPONSE) for mode in LOSSES},
    **{f"vanilla, {how}": functools.partial(right, "vanilla", how) for how in HOWS[1:]},
    **{name: functools.partial(right, "vanilla", HOWS[0], **more) for name, more in MORE.items()},
}
CASES.update({**RIGHT, **BEFORE})


def by_command(out: Path) -> dict[str, Any]:
    """A critic and an actor in a process with RLHF_PATCHES_REHEARSE: what ends, and the results for the command."""
    path = out / f"results{os.environ['RANK']}.json"
    os.environ.update(RLHF_PATCHES_REHEARSE="1", RLHF_PATCHES_REHEARSED=str(path))
    start.arm()
    stepped = []
    for name in ("critic", "gmpo"):
        engine, data, loss = CASES[name]()
        engine.optimizer = torch.optim.SGD(engine.module.parameters(), 0.1)
        engine.optimizer_config, engine._qat_enabled = SimpleNamespace(clip_grad=1.0), False
        try:
            for _ in range(2):
                engine.train_batch(data, loss)
                stepped.append(name)
        except SystemExit as ended:
            stepped.append(f"status {ended.code}")
    results = json.loads(path.read_text()) if path.exists() else None
    return {"stepped": stepped, "results": results}


def observe(name: str) -> dict[str, Any]:
    engine, data, loss = CASES[name]()
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), 0.1)
    if name == "replaced head":
        engine.optimizer.param_groups[0]["params"].pop()
    before, drawn = [each.to_local().clone() for each in engine.module.parameters()], torch.get_rng_state()
    keys = sorted(map(str, data.keys()))
    rehearsal = EngineRehearsal(engine, data, loss)
    relations = {each.name: [each.verdict.value, each.measured, each.text] for each in rehearsal.relations()}
    same = all(torch.equal(a, b.to_local()) for a, b in zip(before, engine.module.parameters(), strict=True))
    left = torch.equal(drawn, torch.get_rng_state()) and keys == sorted(map(str, data.keys()))
    cleared = all(each.grad is None for each in engine.module.parameters())
    return {
        "relations": relations,
        "size": rehearsal.size,
        "name": rehearsal.name,
        "as it was": same and left and cleared,
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("--right", action="store_true", help="the losses that add up over micro-batches")
    parser.add_argument("--before", action="store_true", help="bugs before the loss")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    patches = OF_BEFORE if options.before else PATCHES
    others = [name for name in CASES if name not in (*RIGHT, *BEFORE)]
    names = [*(RIGHT if options.right else BEFORE if options.before else others)]
    found: dict[str, Any] = {}
    if not options.right:
        found["without"] = {name: observe(name) for name in names if "rollouts" not in name}
    report = rlhf_patches.apply(only=patches)
    found["applied"] = [name for name in patches if report[name].status is rlhf_patches.Status.APPLIED]
    found["with"] = {name: observe(name) for name in names}
    if names == others:
        found["command"] = by_command(options.out)
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
