"""Rehearsals of SkyRL's real FSDP workers on the CPU: ``--out FOLDER``, without the patches and with them.

A small Qwen2 is sharded by ``fully_shard`` over the ranks. `HFModelWrapper`, which imports flash-attention, is not
there: a module with its interface is.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import rlhf_patches
from rlhf_patches.proving import states
from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from rlhf_patches.rehearsal import start
from rlhf_patches.rehearsal.skyrl_worker import WorkerRehearsal
from tests.harness import skyrl_on_cpu

PATCHES = (
    *("skyrl-kl-no-grad", "skyrl-step-wise-advantages", "skyrl-loss-outputs-packed"),
    "skyrl-rollout-temperature",
)
VOCABULARY, LENGTH, ACTIONS, ROWS = 100, 14, 9, 8  # SkyRL draws tokens of padding below 100
RESPONSES = ((4, 9, 2, 7, 5, 5, 8, 3), (6, 1, 9, 9, 3, 2, 4, 7))


class Model(torch.nn.Module):
    """Called as SkyRL's wrapper is; of a critic it has values."""

    def __init__(self, head: int, dropout: float = 0.0) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import Qwen2Config, Qwen2Model

        super().__init__()
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
        self.model = torch.nn.ModuleDict({"body": Qwen2Model(config), "head": torch.nn.Linear(16, head)})
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for each in (self.model["body"], self.model["head"]):
            fully_shard(each, mesh=mesh)
        self.values = head == 1

    def forward(
        self, sequences: Any, num_actions: int, attention_mask: Any = None, temperature: float = 1.0, **_: Any
    ) -> Any:
        places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        hidden = self.model["body"](sequences, attention_mask=attention_mask, position_ids=places).last_hidden_state
        logits = self.model["head"](hidden.float())
        if self.values:
            return logits[:, -num_actions - 1 : -1, 0], {}
        log_probs = (logits / temperature).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        found = log_probs[:, :-1].gather(-1, sequences[:, 1:, None])[:, -num_actions:, 0]
        return found, {"entropy": entropy}


def make_strategy() -> Any:
    """SkyRL's, of which backward, the step and the all-reduce of metrics are used here."""
    from skyrl.backends.skyrl_train.distributed.strategy import DistributedStrategy

    class Strategy(DistributedStrategy):
        def backward(self, loss: Any, model: Any, optimizer: Any, **_: Any) -> None:
            loss.backward()

        def optimizer_step(self, optimizer: Any, *_: Any, **__: Any) -> None:
            optimizer.step()

    Strategy.__abstractmethods__ = frozenset()
    made: Any = Strategy()
    made.world_size = torch.distributed.get_world_size()
    return made


def algorithm(**changed: Any) -> SimpleNamespace:
    made: dict[str, Any] = {
        **{"policy_loss_type": "regular", "loss_reduction": "token_mean"},
        **{"temperature": 1.0, "eps_clip_low": 0.2, "eps_clip_high": 0.28, "clip_ratio_c": 3.0, "value_clip": 0.2},
        **{"use_entropy_loss": False, "entropy_loss_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.001},
        **{"kl_estimator_type": "k3", "advantage_estimator": "grpo", "max_seq_len": 16},
        **{"enable_sample_support_replay": False},
    }
    found = SimpleNamespace(**{**made, **changed})
    found.off_policy_correction = SimpleNamespace(
        tis_ratio_type=None, sequence_mask_metric=None, outlier_token_is_threshold_low=None
    )
    found.off_policy_correction.outlier_token_is_threshold_high = None
    found.off_policy_correction.token_mask_is_threshold_low = None
    found.off_policy_correction.token_mask_is_threshold_high = None
    found.cispo = SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.2)
    found.sapo = SimpleNamespace(tau_pos=1.0, tau_neg=1.05)
    return found


def make_worker(kind: str, micro: int, tokens: int, dropout: float, settings: SimpleNamespace) -> Any:
    """What `forward_backward` and `optim_step` read of a worker."""
    from skyrl.backends.skyrl_train.utils import ppo_utils

    workers = importlib.import_module("skyrl.backends.skyrl_train.workers.worker")
    released = getattr(workers, f"{kind}WorkerBase")
    worker = released.__new__(released)
    worker.cfg = SimpleNamespace(
        algorithm=settings,
        micro_train_batch_size_per_gpu=micro,
        max_tokens_per_microbatch=tokens,
        logprobs_chunk_size=None,
        remove_microbatch_padding=False,
        use_sample_packing=False,
        policy=SimpleNamespace(sequence_parallel_size=1),
    )
    worker.model = Model(1 if kind == "Critic" else VOCABULARY, dropout)
    worker.optimizer = torch.optim.SGD(worker.model.parameters(), 0.1)
    worker.scheduler = SimpleNamespace(get_last_lr=lambda: [0.1])
    worker.strategy, worker.record_memory, worker._micro_batches_accumulated = make_strategy(), False, 0
    worker.device_mesh = SimpleNamespace(get_group=lambda name: torch.distributed.group.WORLD)
    worker.mesh_rank = SimpleNamespace(dp_size=torch.distributed.get_world_size())
    if kind == "Critic":
        worker.critic_loss_fn = ppo_utils.ppo_critic_loss
    else:
        worker.policy_loss_fn = ppo_utils.PolicyLossRegistry.get(settings.policy_loss_type)
    return worker


def mini_batch(model: Model, settings: SimpleNamespace, first: bool) -> Any:
    """This rank's rows, padded on the left and the right; a tool's answers do not count."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.backends.skyrl_train.utils import ppo_utils

    rank, number = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = ROWS // number
    generator = torch.Generator().manual_seed(11 + rank)
    lengths = torch.tensor(RESPONSES[rank][:rows])
    responses = (torch.arange(ACTIONS) < lengths[:, None]).long()
    prompts = (torch.arange(LENGTH - ACTIONS) >= torch.arange(rows)[:, None] % 3).long()
    attention = torch.cat([prompts, responses], 1)
    mask = responses.clone()
    mask[::3, 1] = 0
    mask[:, 0] = responses[:, 0]
    sequences = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator) * attention
    with torch.no_grad():
        own = model(sequences, ACTIONS, attention_mask=attention)[0] if not model.values else -torch.ones(rows, ACTIONS)
    noise = [0.3 * torch.randn(own.shape, generator=generator) for _ in range(5)]
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, ACTIONS) * responses
    reduce = getattr(ppo_utils, "apply_loss_reduction_to_advantages_minibatch", None)
    if reduce is not None and settings.loss_reduction != "no":
        advantages = reduce(advantages, mask, settings.loss_reduction, 2, 16)
    data = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention,
            "loss_mask": mask,
            "response_mask": responses,
            "advantages": advantages,
            "action_log_probs": own if first else own + noise[0],
            "base_action_log_probs": own if first else own + noise[1],
            "rollout_logprobs": own + noise[2] / 10,
            "values": noise[3],
            "returns": noise[4],
        }
    )
    data.metadata = {"response_length": ACTIONS}
    return data


def made(
    kind: str = "Policy",
    micro: int = 2,
    tokens: int = -1,
    dropout: float = 0.0,
    first: bool = False,
    loss: str | None = None,
    **changed: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """A worker, and the arguments of its `forward_backward`."""
    settings = algorithm(**changed)
    worker = make_worker(kind, micro, tokens, dropout, settings)
    data = mini_batch(worker.model, settings, first)
    return worker, (data,) if loss is None else (data, loss)


def step_wise() -> tuple[Any, tuple[Any, ...]]:
    """SkyRL's own trainer makes the advantages of trajectories whose last step is short; this rank gets its rows."""
    from rlhf_patches.patches.skyrl.proofs import step_wise_advantages_ranks as steps

    worker, (data,) = made(loss_reduction="sequence_mean")
    kept = dict(sys.modules)
    steps.modules.trainer()  # it puts names in the workers' place
    sys.modules.update(kept)
    lengths = tuple((int(before), 2) for before in data["response_mask"].sum(-1)[:4])
    found, _ = steps.advantages("grpo", of=lengths)
    mask = torch.zeros_like(data["response_mask"])
    advantages = torch.zeros_like(data["advantages"])
    for row, each in enumerate(found[: len(mask)]):
        mask[row, : len(each)] = 1
        advantages[row, : len(each)] = torch.tensor(each)
    data["response_mask"] = data["loss_mask"] = mask
    data["attention_mask"][:, -ACTIONS:] = mask
    data["advantages"] = advantages
    return worker, (data,)


def sampled() -> tuple[Any, tuple[Any, ...]]:
    """Rollouts at temperature 0.7, with the log-probabilities for which SkyRL's own function asks vLLM."""
    from tests.patches.skyrl import rollout_temperature_ranks as of_vllm

    kept = dict(sys.modules)
    of_vllm.install_vllm()
    skyrl_on_cpu.servers()
    mode = of_vllm.of_servers({"temperature": 0.7})
    sys.modules.update(kept)
    worker, (data,) = made(temperature=0.7, loss_reduction="sequence_mean")
    with torch.no_grad():
        data["rollout_logprobs"], _ = worker.model(
            data["sequences"],
            ACTIONS,
            attention_mask=data["attention_mask"],
            temperature={"raw_logprobs": 1.0, "processed_logprobs": 0.7}[mode],
        )
    return worker, (data,)


def same_answers() -> tuple[Any, tuple[Any, ...]]:
    """All prompts and all answers are equal."""
    worker, (data,) = made()
    for name in ("sequences", "attention_mask", "loss_mask", "response_mask"):
        data[name] = data[name][2:3].repeat(len(data[name]), 1)
    return worker, (data,)


def own_worker() -> Any:
    worker, given = made()
    released = type(worker)

    class OwnWorker(released):  # type: ignore[valid-type, misc]
        def _forward_backward_micro(self, *given: Any, **named: Any) -> Any:
            return super()._forward_backward_micro(*given, **named)

    own: Any = OwnWorker.__new__(OwnWorker)
    vars(own).update(vars(worker))
    return own, given


def replaced_head() -> Any:
    worker, given = made()
    worker.optimizer.param_groups[0]["params"].pop()
    return worker, given


def accumulated() -> Any:
    """A request before it left its gradients."""
    worker, given = made()
    worker.forward_backward(*given)
    return worker, given


Case = Callable[[], Any]
KL_LOSS: dict[str, Any] = {"use_kl_loss": True}
RIGHT: dict[str, Case] = {
    **{f"regular, micro {micro}": functools.partial(made, micro=micro) for micro in (1, 2, 4)},
    "regular, before the first update": functools.partial(made, first=True),
    **{
        f"regular, {how}": functools.partial(made, loss_reduction=how)
        for how in ("token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm")
    },
    **{name: functools.partial(made, policy_loss_type=name) for name in ("dual_clip", "gspo", "sapo", "cispo")},
    **{
        f"{name}, tokens": functools.partial(made, tokens=26, policy_loss_type=name)
        for name in ("regular", "dual_clip", "gspo", "sapo", "cispo")
    },
    **{f"kl {kind}": functools.partial(made, kl_estimator_type=kind, **KL_LOSS) for kind in ("k1", "abs", "k2", "k3")},
    "kl, tokens": functools.partial(made, tokens=26, **KL_LOSS),
    "kl, micro 4": functools.partial(made, micro=4, **KL_LOSS),
    "cross entropy": functools.partial(made, loss="cross_entropy"),
    "rloo": functools.partial(made, advantage_estimator="rloo"),
    "gae": functools.partial(made, advantage_estimator="gae"),
    **{f"critic, micro {micro}": functools.partial(made, "Critic", micro) for micro in (1, 2, 4)},
    "critic, no clip": functools.partial(made, "Critic", value_clip=None),
    "critic, tokens": functools.partial(made, "Critic", tokens=26),
}
OTHERS: dict[str, Case] = {
    "regular, micro 2": RIGHT["regular, micro 2"],
    "before the first update": RIGHT["regular, before the first update"],
    "kl": functools.partial(made, loss_reduction="sequence_mean", **KL_LOSS),
    "outputs": functools.partial(made, tokens=26, loss="cross_entropy"),
    "entropy": functools.partial(made, use_entropy_loss=True, entropy_loss_coef=0.01),
    "critic": RIGHT["critic, micro 2"],
    "dropout": functools.partial(made, dropout=0.3),
    "own worker": own_worker,
    "replaced head": replaced_head,
    "accumulated": accumulated,
    "sampled": sampled,
    "same answers": same_answers,
}


def observe(make: Case) -> dict[str, Any]:
    worker, (data, *given) = make()
    for each in (worker.model.model["body"], worker.model.model["head"]):
        each.reshard()
    before = [each.to_local().clone() for each in worker.model.parameters()]
    gradients, drawn = [each.grad for each in worker.model.parameters()], torch.get_rng_state()
    attributes, tensors, settings = dict(vars(worker)), dict(data.items()), repr(worker.cfg)
    rehearsal = WorkerRehearsal(worker, data, *given)
    relations = {each.name: [each.verdict.value, each.measured, each.text] for each in rehearsal.relations()}
    same = all(torch.equal(a, b.to_local()) for a, b in zip(before, worker.model.parameters(), strict=True))
    same = same and all(a is b.grad for a, b in zip(gradients, worker.model.parameters(), strict=True))
    kept = vars(worker).keys() == attributes.keys() and all(
        value is attributes[name] for name, value in vars(worker).items()
    )
    kept = kept and dict(data.items()).keys() == tensors.keys() and repr(worker.cfg) == settings
    kept = kept and all(value is tensors[name] for name, value in data.items())
    return {
        "relations": relations,
        "size": rehearsal.size,
        "name": rehearsal.name,
        "as it was": same and kept and torch.equal(drawn, torch.get_rng_state()),
    }


def by_command(out: Path) -> dict[str, Any]:
    """A critic and a policy in a process with RLHF_PATCHES_REHEARSE."""
    path = out / f"results{os.environ['RANK']}.json"
    os.environ.update(RLHF_PATCHES_REHEARSE="1", RLHF_PATCHES_REHEARSED=str(path))
    start.arm()
    ended = []
    for name in ("critic", "regular, micro 2"):
        worker, given = OTHERS[name]()
        try:
            worker.forward_backward(*given)
            worker.optim_step()
            ended.append(name)
        except SystemExit as error:
            ended.append(f"status {error.code}")
    return {"ended": ended, "results": json.loads(path.read_text()) if path.exists() else None}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--right", action="store_true", help="the configurations that have no known bug")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    old = skyrl_on_cpu.install().startswith("0.1")
    names = f"{skyrl_on_cpu.modules.TRAIN}.utils.io.io"
    sys.modules[names] = skyrl_on_cpu.modules.Names(names)  # 0.4.0's profiler imports it
    skyrl_on_cpu.worker_dispatch()
    cases = RIGHT if options.right else {**OTHERS, **({"step-wise": step_wise} if old else {})}
    found: dict[str, Any] = {}
    if not options.right:
        found["without"] = {name: observe(make) for name, make in cases.items()}
    report = rlhf_patches.apply(only=PATCHES)
    found["applied"] = [name for name in PATCHES if report[name].status is rlhf_patches.Status.APPLIED]
    found["with"] = {name: observe(make) for name, make in cases.items()}
    if not options.right:
        found["command"] = by_command(options.out)
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
