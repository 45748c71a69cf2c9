"""verl's distillation loss where one micro-batch has no token that counts: ``--out FOLDER``, on one rank."""

from __future__ import annotations

import importlib
import itertools
import traceback
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states

NAME = "verl-padding-only-micro-batch"
PROMPT, RESPONSE, TOPK = 2, 6, 4
MODE = "forward_kl_topk"
Tokens = list[list[tuple[int, int]]]
"""For two ranks with two micro-batches each: the number of tokens of each of the two responses that count."""
TOKENS: Tokens = [[(3, 6), (1, 4)], [(0, 0), (6, 6)]]


def micro_batch(tokens: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
    """Values per token of two rows of full length, ``[2, PROMPT + RESPONSE]``, and the mask of the responses."""
    generator = torch.Generator().manual_seed(seed)
    names = ("distillation_losses", "student_mass", "teacher_mass", "overlap_token_advantage", "log_probs", "teacher")
    values = {name: torch.rand(2, PROMPT + RESPONSE, generator=generator) for name in names}
    values["overlap_count"] = torch.randint(0, TOPK + 1, (2, PROMPT + RESPONSE), generator=generator)
    return {**values, "mask": (torch.arange(RESPONSE) < torch.tensor(tokens)[:, None]).long()}


def micro_batches(tokens: Tokens) -> list[list[dict[str, torch.Tensor]]]:
    return [
        [micro_batch(each, 10 * rank + number) for number, each in enumerate(of_rank)]
        for rank, of_rank in enumerate(tokens)
    ]


def counted(tokens: Tokens) -> int:
    """The number of tokens of the global mini-batch that count, 1 if there are none."""
    return max(sum(map(sum, itertools.chain(*tokens))), 1)


def of_responses(values: torch.Tensor) -> torch.Tensor:
    """The values of the responses' tokens, which are computed one token before."""
    return values[:, PROMPT - 1 : -1]


def loss_and_metrics(values: dict[str, torch.Tensor], mode: str, count: int) -> tuple[Any, dict[str, Any]]:
    """One micro-batch through verl's loss; ``count`` is the number of tokens of the global mini-batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig

    losses = importlib.import_module("verl.trainer.distillation.losses")
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2)
    settings = {"loss_mode": mode, "use_task_rewards": False, "use_policy_gradient": False, "loss_max_clamp": None}
    distillation = SimpleNamespace(distillation_loss=SimpleNamespace(**settings, topk=TOPK))
    ids = torch.ones(2, PROMPT + RESPONSE, dtype=torch.long)
    chosen = of_responses(values["log_probs"]).detach()
    data = TensorDict(
        {
            **{"prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": ids},
            **{"response_mask": values["mask"], "old_log_probs": chosen, "advantages": chosen},
            "teacher_logprobs": torch.nested.as_nested_tensor(list(values["teacher"][..., None]), layout=torch.jagged),
        },
        batch_size=2,
    )
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=count, global_batch_size=8)
    outputs = {name: value.flatten() for name, value in values.items() if name not in ("mask", "teacher")}
    found: tuple[Any, dict[str, Any]] = losses.distillation_ppo_loss(
        config=config, distillation_config=distillation, model_output=outputs, data=data
    )
    return found


def loss() -> dict[str, dict[str, float]]:
    """The loss over both ranks; and from the definition, in float64."""
    count, found, exact = counted(TOKENS), 0.0, 0.0
    for values in itertools.chain(*micro_batches(TOKENS)):
        found += loss_and_metrics(values, MODE, count)[0].item() / 2
        exact += of_responses(values["distillation_losses"].double())[values["mask"].bool()].sum().item() / count
    return {"found": {"loss": found}, "exact": {"loss": exact}}


def observe() -> dict[str, Any]:
    try:
        return {"one without": loss()}
    except RuntimeError:
        return {"one without": {"failed": traceback.format_exc()}}


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
