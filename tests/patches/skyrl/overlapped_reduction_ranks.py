"""Steps with different numbers of micro-batches on two data-parallel ranks: ``--out FOLDER``.

SkyRL's real `MegatronModelWrapper` around a GPTModel in megatron-core's DistributedDataParallel. The first step has two
micro-batches; reported is the gradient of the second step, and how far it is from that without overlap_grad_reduce.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core.distributed import DistributedDataParallelConfig

from rlhf_patches.proving import states
from tests.harness import skyrl_on_cpu, small_gpt
from tests.patches.skyrl import logprob_backward_training_ranks as training

NAME = "skyrl-overlapped-reduction"
CASES = (1, 2, 3)


def without_expert_adapters() -> None:
    """0.4.0 takes Megatron-Bridge's functions from git, which also reduce adapters of experts; there are none here."""
    from megatron.bridge.peft import utils
    from megatron.core.distributed import finalize_model_grads

    stand_ins = {
        "enable_expert_parallel_grad_sync_in_finalize": lambda chunks: None,
        "finalize_model_grads_with_expert_adapter_sync": finalize_model_grads,
    }
    for name, function in stand_ins.items():
        if not hasattr(utils, name):
            setattr(utils, name, function)


def wrapped(overlap: bool) -> Any:
    algorithm = SimpleNamespace(
        **{"policy_loss_type": "regular", "temperature": 1.0, "use_entropy_loss": False, "entropy_loss_coef": 0.0},
        **{"use_kl_loss": False, "kl_loss_coef": 0.0, "enable_sample_support_replay": False},
    )
    megatron = SimpleNamespace(mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
    config = SimpleNamespace(
        algorithm=algorithm,
        use_sample_packing=False,
        logprobs_chunk_size=None,
        vocab_entropy_chunk_size=None,
        vocab_entropy_chunk_memory_mb=None,
        remove_microbatch_padding=False,
        policy=SimpleNamespace(megatron_config=megatron, sequence_parallel_size=1),
    )
    made = functools.partial(DistributedDataParallelConfig, overlap_grad_reduce=overlap)
    with mock.patch.object(small_gpt, "DistributedDataParallelConfig", made):
        model = small_gpt.make_model(False, length=training.LENGTH)
    return skyrl_on_cpu.model_wrapper().MegatronModelWrapper(config, [model], None, training.policy_loss)


def step(wrapper: Any, number: int) -> Any:
    """The gradient of a step; each rank has other micro-batches."""
    (model,) = wrapper.actor_module
    model.zero_grad_buffer()
    batches = [dict(training.make_micro_batches()[each % 2]) for each in range(number)]
    for place, batch in enumerate(batches):
        batch["advantages"] = batch["advantages"] + place + 2 * torch.distributed.get_rank()
        batch |= {"rollout_expert_indices": None, "response_mask": batch["loss_mask"].bool()}  # 0.4.0
        batch["num_microbatches"] = batch["num_real_microbatches"] = number
    wrapper.forward_backward_mini_batch(batches, training.LENGTH, training.ROWS)
    if hasattr(wrapper, "run_pending_grad_sync"):  # since 0.4.0
        wrapper.run_pending_grad_sync()
    return torch.cat([parameter.main_grad.double().flatten() for parameter in model.parameters()])


def second(overlap: bool, number: int) -> Any:
    wrapper = wrapped(overlap)
    step(wrapper, 2)
    return step(wrapper, number)


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in CASES:
        wanted = second(False, number)
        try:
            gradient = second(True, number)
        except AssertionError as error:
            found[f"{number}"] = {"failed": str(error)}
            continue
        found[f"{number}"] = {
            "error": float((gradient - wanted).norm() / wanted.norm()),
            "norm": float(gradient.norm()),
        }
    return found


def main() -> None:
    from megatron.core import parallel_state

    options = states.parser().parse_args()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    if skyrl_on_cpu.install() >= "0.4":
        without_expert_adapters()
    states.report(NAME, observe, options.out)
