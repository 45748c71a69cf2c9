"""Rehearsals of OpenRLHF's real actor and critic on the CPU: ``--out FOLDER``, without the patches and with them.

The model is a small Qwen2, in a real DeepSpeed engine in some cases. Two ranks have other rows, of other lengths.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from argparse import Namespace
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
sys.modules["flash_attn.ops.triton.cross_entropy"] = None  # type: ignore[assignment]  # OpenRLHF does without
torch._dynamo.config.disable = True  # OpenRLHF compiles the entropy

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.rehearsal import start
from rlhf_patches.rehearsal.openrlhf_trainer import TrainerRehearsal

PATCHES = ("openrlhf-masked-nan", "openrlhf-k3-gradient")
VOCABULARY, ROWS, PROMPT = 61, 8, 3
RESPONSES = ((4, 9, 2, 7, 5, 5, 8, 3), (6, 1, 9, 9, 3, 2, 4, 7))
OFF: dict[str, Any] = {"is_correction_level": "off", "is_correction_mode": "mask"}
TIS: dict[str, Any] = {"is_correction_level": "token", "is_correction_mode": "clip"}
ICEPOP: dict[str, Any] = {"is_correction_level": "token", "is_correction_mode": "mask"}
SEQUENCE: dict[str, Any] = {"is_correction_level": "seq", "is_correction_mode": "mask"}


def arguments(**changed: Any) -> Namespace:
    """OpenRLHF's, as far as the trainers read them; ``GROUP__NAME`` changes one."""
    advantage = {**OFF, "is_correction_gating": "ratio", "is_correction_threshold": [0.5, 5.0]}
    advantage.update(is_correction_enable=False, is_correction_type="tis")
    made = Namespace(
        train=Namespace(max_epochs=1, dynamic_batch_enable=False, batch_size=ROWS, colocate_all=True),
        actor=Namespace(
            eps_clip_low_high=(0.2, 0.2),
            dual_clip=None,
            loss_agg_mode="token-mean",
            policy_loss_type="ppo",
            aux_loss_coef=0.0,
            entropy_coef=None,
        ),
        algo=Namespace(
            advantage=Namespace(**advantage),
            kl=Namespace(use_loss=False, init_coef=0.1, estimator="k3", unbiased_gradient=False),
        ),
        ds=Namespace(packing_samples=False, tensor_parallel_size=1, ring_attn_size=1),
        vllm=Namespace(sync_backend="gloo"),
        rollout=Namespace(batch_size=ROWS, n_samples_per_prompt=1),
    )
    made.train.async_enable = False
    made.train.max_tokens_per_gpu = 24
    for name, value in changed.items():
        *groups, last = name.split("__")
        setattr(functools.reduce(getattr, groups, made), last, value)
    return made


def make_strategy(arguments: Namespace, micro: int) -> Any:
    """OpenRLHF's own, without what it does with CUDA before it makes an engine."""
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    made: Any = DeepspeedStrategy.__new__(DeepspeedStrategy)
    number = torch.distributed.get_world_size()
    made.args, made.world_size, made.ds_tensor_parallel_size = arguments, number, 1
    made.ds_device_mesh = torch.distributed.init_device_mesh("cpu", (number, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
    made.accumulated_gradient = arguments.train.batch_size // micro // number
    return made


def make_model(dropout: float = 0.0) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=dropout,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config)


def make_actor(model: Any) -> Any:
    from openrlhf.models import Actor

    actor = Actor(model)
    actor.packing_samples = False
    return actor


def make_critic() -> Any:
    from openrlhf.models.model import _get_critic_model
    from transformers import Qwen2Model, Qwen2PreTrainedModel

    config = make_model().config
    config.normalize_reward = False
    torch.manual_seed(8)
    return _get_critic_model(Qwen2PreTrainedModel, Qwen2Model)(config)


def experiences(actor: Any, fields: dict[str, Any]) -> list[Any]:
    """Of each row, as the replay buffer has it: right padding removed, a mask from the second token on."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    rank, number = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(11 + rank)
    made = []
    for row in range(ROWS // number):
        length = PROMPT + RESPONSES[rank][row]
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask = torch.arange(1, length) >= PROMPT
        mask[PROMPT : PROMPT + 1] &= row % 3 != 1  # a tool's answer
        with torch.no_grad():
            own = actor(tokens[None], mask[None], torch.ones(1, length, dtype=torch.long))[0]
        moved = {
            name: own + 0.3 * torch.randn(own.shape, generator=generator)
            for name in ("old", "base_action_log_probs", "rollout_log_probs", "values", "returns")
        }
        moved["action_log_probs"] = own if fields.get("first") else moved["old"]
        if fields.get("first"):
            moved["base_action_log_probs"] = own
        del moved["old"]
        moved["rollout_log_probs"] = own + fields.get("apart", 0.1) * (moved["rollout_log_probs"] - own)
        advantage = torch.randn(1, generator=generator).expand(length - 1) * mask
        if "base" in fields:
            moved["base_action_log_probs"] = fields["base"](moved["base_action_log_probs"], mask)
        if "masked" in fields:
            moved["rollout_log_probs"] = moved["rollout_log_probs"].masked_fill(~mask, fields["masked"])
        each = Experience(
            sequences=tokens,
            attention_mask=torch.ones(length, dtype=torch.long),
            action_mask=mask,
            advantages=advantage,
            info={},
            **moved,
        )
        if hasattr(each, "total_length"):
            each.total_length = torch.tensor(float(length))
        else:
            each.info["total_length"] = torch.tensor(float(length))
        made.append(each)
    return made


def actor_trainer(micro: int = 2, zero: int | None = None, dropout: float = 0.0, **changed: Any) -> Any:
    """OpenRLHF's trainer of the actor, with a mini-batch in its replay buffer."""
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    fields = changed.pop("fields", {})
    options = arguments(**changed)
    actor = make_actor(make_model(dropout))
    items = experiences(actor.eval(), fields)
    optimizer: Any = torch.optim.SGD(actor.parameters(), 0.1)
    if zero is not None:
        actor.model = on_cpu.engine(
            actor.model,
            {"stage": zero},
            optimizer,
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=ROWS // micro // torch.distributed.get_world_size(),
        )
    scheduler = SimpleNamespace(get_last_lr=lambda: [0.1])
    with mock.patch.object(torch.cuda, "current_device", return_value=0):  # the buffer names a device
        trainer = ActorPPOTrainer(
            make_strategy(options, micro), actor, None, optimizer, scheduler, micro_train_batch_size=micro
        )
    trainer.replay_buffer.items = items
    return trainer, (0.1,)


def critic_trainer(micro: int = 2, **changed: Any) -> Any:
    from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer

    clip = changed.pop("clip", 0.2)
    options = arguments(**changed)
    critic = make_critic()
    with mock.patch.object(torch.cuda, "current_device", return_value=0):
        trainer = CriticPPOTrainer(
            make_strategy(options, micro),
            critic,
            torch.optim.SGD(critic.parameters(), 0.1),
            SimpleNamespace(get_last_lr=lambda: [0.1]),
            micro_train_batch_size=micro,
            value_clip=clip,
        )
    trainer.replay_buffer.items = experiences(make_actor(make_model()).eval(), {})
    return trainer, ()


def far(base: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A masked token is 95 nats less likely under the policy."""
    place = int((~mask).nonzero()[-1])
    return base.index_fill(0, torch.tensor([place]), 95.0)


def replaced_head() -> Any:
    trainer, given = actor_trainer()
    trainer.actor_optim.param_groups[0]["params"].pop()
    return trainer, given


def at_another_temperature() -> Any:
    """The engine's log-probabilities are those of temperature 1."""
    trainer, given = actor_trainer(fields={"apart": 0.0})
    trainer.actor.temperature = 0.7
    return trainer, given


def same_answers() -> Any:
    trainer, given = actor_trainer()
    trainer.replay_buffer.items = [trainer.replay_buffer.items[2]] * len(trainer.replay_buffer.items)
    return trainer, given


def own_step() -> Any:
    """A trainer of a user's."""
    trainer, given = actor_trainer()
    released = type(trainer)

    class OwnTrainer(released):  # type: ignore[valid-type, misc]
        def training_step(self, *given: Any, **named: Any) -> Any:
            return super().training_step(*given, **named)

    trainer.__class__ = OwnTrainer
    return trainer, given


NAN = {"masked": float("nan")}
KL_LOSS = {"algo__kl__use_loss": True}
Case = Callable[[], Any]
RIGHT: dict[str, Case] = {
    **{f"ppo, micro {micro}": functools.partial(actor_trainer, micro) for micro in (1, 2, 4)},
    "ppo, before the first update": functools.partial(actor_trainer, fields={"first": True}),
    "ppo, sequence mean": functools.partial(actor_trainer, actor__loss_agg_mode="seq-mean"),
    "ppo, dual": functools.partial(actor_trainer, actor__dual_clip=1.5),
    "ppo, clip higher": functools.partial(actor_trainer, actor__eps_clip_low_high=(0.2, 0.28)),
    "ppo, entropy": functools.partial(actor_trainer, actor__entropy_coef=0.05),
    "ppo, entropy reported": functools.partial(actor_trainer, actor__entropy_coef=0.0),
    "ppo, dynamic": functools.partial(actor_trainer, train__dynamic_batch_enable=True),
    "ppo, dynamic, sequence mean": functools.partial(
        actor_trainer, train__dynamic_batch_enable=True, actor__loss_agg_mode="seq-mean"
    ),
    "gspo": functools.partial(actor_trainer, actor__policy_loss_type="gspo"),
    "gspo, micro 1": functools.partial(actor_trainer, 1, actor__policy_loss_type="gspo"),
    **{
        f"kl {kind}": functools.partial(actor_trainer, algo__kl__estimator=kind, **KL_LOSS)
        for kind in ("k1", "k2", "k3")
    },
    **{
        name: functools.partial(
            actor_trainer, **{f"algo__advantage__{key}": value for key, value in correction.items()}
        )
        for name, correction in (("tis", TIS), ("icepop", ICEPOP), ("seq-mask-tis", SEQUENCE))
    },
    **{
        f"{kind}": functools.partial(
            actor_trainer,
            **{f"algo__advantage__{key}": value for key, value in SEQUENCE.items()},
            algo__advantage__is_correction_gating=kind,
            algo__advantage__is_correction_threshold=[0.0, 5.0],
        )
        for kind in ("binary_kl", "tv")
    },
    **{f"ppo, ZeRO-{stage}": functools.partial(actor_trainer, zero=stage) for stage in (0, 1, 2)},
    **{f"critic, micro {micro}": functools.partial(critic_trainer, micro) for micro in (1, 2, 4)},
    "critic, no clip": functools.partial(critic_trainer, clip=None),
    "critic, dynamic": functools.partial(critic_trainer, train__dynamic_batch_enable=True),
}
DEEPSPEED = {name: RIGHT[name] for name in ("ppo, ZeRO-1", "ppo, ZeRO-2")}
OF_DEEPSPEED = "deepspeed-zero2-accumulation"
TIS_BEFORE = {"algo__advantage__is_correction_enable": True}
BUGS: dict[str, Case] = {
    "masked nan": functools.partial(
        actor_trainer,
        fields=NAN,
        **{f"algo__advantage__{key}": value for key, value in TIS.items()},
        **TIS_BEFORE,
    ),
    "k3": functools.partial(actor_trainer, fields={"base": far}, **KL_LOSS),
}
OTHERS: dict[str, Case] = {
    "ppo, micro 2": RIGHT["ppo, micro 2"],
    "ppo, before the first update": RIGHT["ppo, before the first update"],
    "critic, micro 2": RIGHT["critic, micro 2"],
    "dropout": functools.partial(actor_trainer, dropout=0.3),
    "router": functools.partial(actor_trainer, actor__aux_loss_coef=0.1),
    "replaced head": replaced_head,
    "another temperature": at_another_temperature,
    "another policy": functools.partial(actor_trainer, fields={"apart": 2.0}),
    "same answers": same_answers,
    "own step": own_step,
    "too few rows": functools.partial(actor_trainer, train__batch_size=64),
}


def observe(make: Case) -> dict[str, Any]:
    trainer, given = make()
    part = "critic" if hasattr(trainer, "critic") else "actor"
    model = getattr(trainer, part)
    before, drawn = [each.detach().clone() for each in model.parameters()], torch.get_rng_state()
    attributes, items = dict(vars(trainer)), [dict(vars(each)) for each in trainer.replay_buffer.items]
    rehearsal = TrainerRehearsal(trainer, *given)
    rehearsal.ends = hasattr(getattr(model, "model", model), "zero_optimization_stage")
    relations = {each.name: [each.verdict.value, each.measured, each.text] for each in rehearsal.relations()}
    same = all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    kept = vars(trainer).keys() == attributes.keys() and all(
        value is attributes[name] for name, value in vars(trainer).items()
    )
    kept = kept and all(
        value is old[name]
        for each, old in zip(trainer.replay_buffer.items, items, strict=True)
        for name, value in vars(each).items()
    )
    cleared = all(each.grad is None for each in model.parameters())
    return {
        "relations": relations,
        "size": rehearsal.size,
        "name": rehearsal.name,
        "as it was": same and kept and cleared and torch.equal(drawn, torch.get_rng_state()),
    }


def by_command(out: Path) -> dict[str, Any]:
    """A critic and an actor in a process with RLHF_PATCHES_REHEARSE."""
    path = out / f"results{os.environ['RANK']}.json"
    os.environ.update(RLHF_PATCHES_REHEARSE="1", RLHF_PATCHES_REHEARSED=str(path))
    start.arm()
    ended = []
    for name in ("critic, micro 2", "ppo, micro 2"):
        trainer, given = OTHERS[name]()
        try:
            with mock.patch.multiple(
                type(trainer.strategy),
                backward=lambda self, loss, *_: loss.backward(),
                optimizer_step=lambda *_, **__: None,
            ):
                trainer.ppo_train(*given)
            ended.append(name)
        except SystemExit as error:
            ended.append(f"status {error.code}")
    return {"ended": ended, "results": json.loads(path.read_text()) if path.exists() else None}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--right", action="store_true", help="the configurations that have no known bug")
    parser.add_argument("--deepspeed", action="store_true", help="a bug of DeepSpeed's")
    options = parser.parse_args()
    on_cpu.start()
    cases = RIGHT if options.right else DEEPSPEED if options.deepspeed else {**BUGS, **OTHERS}
    found: dict[str, Any] = {}
    if not options.right:
        found["without"] = {name: observe(make) for name, make in cases.items()}
    patches = (OF_DEEPSPEED,) if options.deepspeed else PATCHES
    report = rlhf_patches.apply(only=patches)
    found["applied"] = [name for name in patches if report[name].status is rlhf_patches.Status.APPLIED]
    found["with"] = {name: observe(make) for name, make in cases.items()}
    if not options.right and not options.deepspeed:
        found["command"] = by_command(options.out)
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
