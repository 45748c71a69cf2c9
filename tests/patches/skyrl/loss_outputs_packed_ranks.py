"""SkyRL's workers on two data-parallel ranks: real `forward_backward` of FSDP's and of Megatron's.

``--out FOLDER``, with SkyRL 0.3.0 on sys.path. The model is a table of logits under FSDP's worker, and a GPTModel under
Megatron's; `TokenBasedBatchIterator`, `MegatronModelWrapper` and `WorkerOutput.cat` are real, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from rlhf_patches.proving import states
from tests.harness import skyrl_on_cpu, small_gpt

NAME = "skyrl-loss-outputs-packed"
LENGTH, ACTIONS = 24, 10
VOCABULARY = 100  # the tokens that SkyRL pads with
BUDGET = 26
# Real tokens of each sample. The first rank packs its own into two micro-batches, the other into four: two are padding.
TOKENS = ((9, 5, 12, 7, 6, 8), (20, 24, 6, 13, 14, 11))


def make_batch(rank: int) -> Any:
    """This rank's samples, padded on the left; each has another number of actions."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    generator = torch.Generator().manual_seed(5 + rank)
    lengths = torch.tensor(TOKENS[rank])
    attention = (torch.arange(LENGTH) >= LENGTH - lengths[:, None]).long()
    actions = (torch.arange(ACTIONS) >= ACTIONS - (lengths // 2).clamp(max=ACTIONS)[:, None]).long()
    batch = TrainingInputBatch(
        {
            "sequences": torch.randint(1, VOCABULARY, (len(lengths), LENGTH), generator=generator) * attention,
            "attention_mask": attention,
            "loss_mask": actions,
            "response_mask": actions,
            "advantages": torch.randn(len(lengths), ACTIONS, generator=generator),
            "action_log_probs": torch.full((len(lengths), ACTIONS), -3.0),
        }
    )
    batch.metadata = {"response_length": ACTIONS}
    return batch


def policy_loss(log_probs: Any, old: Any, advantages: Any, config: Any, loss_mask: Any, rollout_logprobs: Any) -> Any:
    """The policy gradient, without any clipping."""
    return -((log_probs - old).exp() * advantages * loss_mask).sum(), {}


class Table(torch.nn.Module):
    """Logits that depend on the token before; called as SkyRL's `HFModelWrapper` is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2))
        )

    def forward(self, sequences: Any, actions: int, **_: Any) -> Any:
        log_probs = self.weight[sequences[:, :-1]].log_softmax(-1)
        entropy = torch.nn.functional.pad(-(log_probs.exp() * log_probs).sum(-1), (0, 1))
        return log_probs.gather(-1, sequences[:, 1:, None])[:, -actions:, 0], {"entropy": entropy}


def make_strategy() -> Any:
    """SkyRL's, of which backward and the all-reduce of metrics are used here."""
    from skyrl.backends.skyrl_train.distributed.strategy import DistributedStrategy

    class Strategy(DistributedStrategy):
        def backward(self, loss: Any, model: Any, optimizer: Any, **_: Any) -> None:
            loss.backward()

    Strategy.__abstractmethods__ = frozenset()
    strategy: Any = Strategy()
    strategy.world_size = torch.distributed.get_world_size()
    return strategy


def configure(worker: Any, tokens: int) -> Any:
    """What `forward_backward` reads of a worker."""
    algorithm = SimpleNamespace(
        policy_loss_type="regular", temperature=1.0, use_entropy_loss=False, entropy_loss_coef=0.0, use_kl_loss=False
    )
    algorithm.kl_loss_coef = 0.0
    megatron = SimpleNamespace(mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
    worker.cfg = SimpleNamespace(
        algorithm=algorithm,
        max_tokens_per_microbatch=tokens,
        micro_train_batch_size_per_gpu=2,
        logprobs_chunk_size=None,
        remove_microbatch_padding=False,
        policy=SimpleNamespace(megatron_config=megatron, sequence_parallel_size=1),
    )
    worker.policy_loss_fn = policy_loss
    worker.strategy = make_strategy()
    worker.optimizer = None
    return worker


def fsdp(module: Any, tokens: int) -> tuple[Any, Any]:
    worker = configure(module.PolicyWorkerBase.__new__(module.PolicyWorkerBase), tokens)
    worker.model = Table()
    worker.scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
    worker.device_mesh = SimpleNamespace(get_group=lambda name: torch.distributed.group.WORLD)
    worker.mesh_rank = SimpleNamespace(dp_size=torch.distributed.get_world_size())
    return worker, lambda sequence: worker.model.weight[sequence]


def megatron(module: Any, tokens: int) -> tuple[Any, Any]:
    worker = configure(module.MegatronPolicyWorkerBase.__new__(module.MegatronPolicyWorkerBase), tokens)
    model = small_gpt.make_model(False, length=LENGTH)
    worker.actor_module = [model]
    worker.model = module.MegatronModelWrapper(worker.cfg, [model], None, policy_loss)
    worker.enable_router_replay = worker.empty_cuda_cache = False
    return worker, lambda sequence: model(sequence[None], torch.arange(len(sequence))[None], None)[0]


def expected(logits_of: Any, batch: Any) -> list[list[float]]:
    """Each sample's log-probabilities, alone, without padding, in float64 from the logits on."""
    found = []
    for tokens, attention, actions in zip(
        batch["sequences"], batch["attention_mask"], batch["response_mask"], strict=True
    ):
        tokens = tokens[attention.bool()]
        with torch.no_grad():
            log_probs = logits_of(tokens).double().log_softmax(-1)[:-1]
        found.append(log_probs.gather(1, tokens[1:, None])[-int(actions.sum()) :, 0].tolist())
    return found


def norm(parameter: Any) -> float:
    gradient = getattr(parameter, "main_grad", None)  # Megatron's
    return float((parameter.grad if gradient is None else gradient).double().norm())


def of_all(mine: Any) -> list[Any]:
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def observe() -> dict[str, Any]:
    """Of both backends and losses: what the controller has of all ranks, and what each sample's should be."""
    from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput

    module = skyrl_on_cpu.megatron_worker()
    infos = [
        SimpleNamespace(rank=SimpleNamespace(is_collection_dp_rank=lambda: True, dp=rank, dp_size=2))
        for rank in range(2)
    ]
    report = {}
    for backend in (fsdp, megatron):
        for packed in (True, False):
            for loss in ("cross_entropy", None):
                torch.manual_seed(11)  # SkyRL draws the tokens of padding
                worker, logits_of = backend(module, BUDGET if packed else -1)
                batch = make_batch(torch.distributed.get_rank())
                reference = [sample for rank in of_all(expected(logits_of, batch)) for sample in rank]
                whole = WorkerOutput.cat(infos, of_all(worker.forward_backward(batch, loss_fn=loss)))
                parameters = worker.model.parameters() if backend is fsdp else worker.actor_module[0].parameters()
                report[f"{backend.__name__}, {'packed' if packed else 'plain'}, {loss or 'policy'}"] = {
                    "log_probs": [output["logprobs"] for output in whole.loss_fn_outputs],
                    "losses": [output.get("elementwise_loss") for output in whole.loss_fn_outputs],
                    "expected": reference,
                    "metrics": whole.metrics,
                    "gradients": of_all(sum(map(norm, parameters))),
                }
    return report


def main() -> None:
    from megatron.core import parallel_state

    options = states.parser().parse_args()
    small_gpt.VOCABULARY = VOCABULARY
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    skyrl_on_cpu.install()
    states.report(NAME, observe, options.out)
