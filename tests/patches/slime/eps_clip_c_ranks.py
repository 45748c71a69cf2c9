"""slime's own policy loss of one tag on packed samples, with and without a third bound: before, after, and reverted.

``--out FOLDER`` on one rank, with slime's files on sys.path. Ratios are from 0.4 to 7, by the old log-probabilities.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.patches.slime.logprob_entropy_ranks import LENGTHS, RESPONSES, TEMPERATURE, loss_module, parallel_state

NAME = "slime-eps-clip-c"
VOCABULARY, EPS, EPS_HIGH = 48, 0.2, 0.3
BOUNDS = {"no bound": None, "3": 3.0, "1.5": 1.5}


def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    return {
        "logits": torch.randn(1, sum(LENGTHS), VOCABULARY, generator=generator) * 3,
        "tokens": [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS],
        "log_ratios": [torch.rand(length, generator=generator) * 2.9 - 0.95 for length in RESPONSES],
        "advantages": [torch.randn(length, generator=generator) for length in RESPONSES],
    }


def log_probs(logits: torch.Tensor, made: dict[str, Any]) -> list[torch.Tensor]:
    """Of each sample's response, from the definition."""
    found, start = [], 0
    for tokens, response in zip(made["tokens"], RESPONSES, strict=True):
        own = logits[0, start : start + len(tokens)] / TEMPERATURE
        ours = slice(len(tokens) - response - 1, len(tokens) - 1)
        found.append(own.log_softmax(-1)[ours].gather(-1, tokens[-response:, None])[:, 0])
        start += len(tokens)
    return found


def reference(bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the logits in float64: minus dual-clip PPO's objective, summed over the tokens."""
    made = inputs()
    logits = made["logits"].double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for current, log_ratios, advantages in zip(
        log_probs(logits, made), made["log_ratios"], made["advantages"], strict=True
    ):
        for one, log_ratio, advantage in zip(current, log_ratios.double(), advantages.double(), strict=True):
            ratio = (one - one.detach() + log_ratio).exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS_HIGH) * advantage)
            if bound is not None and advantage < 0:
                objective = torch.maximum(objective, bound * advantage)
            total = total - objective
    total.backward()
    assert logits.grad is not None
    return total.detach(), logits.grad


def loss_of(bound: float | None) -> dict[str, Any]:
    made = inputs()
    logits = made["logits"].clone().requires_grad_()
    with torch.no_grad():
        exact = log_probs(logits.double(), made)
    old = [(one - log_ratio).float() for one, log_ratio in zip(exact, made["log_ratios"], strict=True)]
    batch = {
        "unconcat_tokens": made["tokens"],
        "advantages": made["advantages"],
        "log_probs": old,
        "loss_masks": [torch.ones(length) for length in RESPONSES],
        "total_lengths": list(LENGTHS),
        "response_lengths": list(RESPONSES),
    }
    flags = ["use_rollout_logprobs", "use_opsm", "get_mismatch_metrics", "use_tis", "use_kl_loss", "allgather_cp"]
    args = SimpleNamespace(
        **dict.fromkeys([*flags, "calculate_per_token_loss"], False),
        **{"eps_clip": EPS, "eps_clip_high": EPS_HIGH, "eps_clip_c": bound},
        **{"advantage_estimator": "grpo", "entropy_coef": 0.0, "log_probs_chunk_size": -1},
        **{"rollout_temperature": TEMPERATURE, "rollout_top_p": 1.0, "qkv_format": "thd"},
    )
    # A copy: slime's fused cross entropy may write into it.
    loss, _ = loss_module().policy_loss_function(args, batch, logits * 1, lambda values: values.sum())
    loss.backward()
    found: dict[str, Any] = {"loss": loss.item()}
    assert logits.grad is not None
    for name, each in BOUNDS.items():
        expected, gradient = reference(each)
        found[f"distance from {name}"] = {
            "loss": abs(loss.item() / expected.item() - 1),
            "gradient": ((logits.grad.double() - gradient).abs().max() / gradient.abs().max()).item(),
        }
    return found


def with_own_functions() -> dict[str, Any]:
    """Functions of a user's in the place of slime's: as long as its first releases' calls, and with the bound in it."""
    module = loss_module()
    real = module.compute_policy_loss

    def four(ppo_kl: Any, advantages: Any, eps_clip: float, eps_clip_high: float) -> Any:
        return real(ppo_kl, advantages, eps_clip, eps_clip_high, 3.0)

    found: dict[str, Any] = {}
    try:
        for name, own in {"four": four, "partial": functools.partial(real, eps_clip_c=3.0)}.items():
            module.compute_policy_loss = own
            found[name] = {bound: loss_of(value) for bound, value in BOUNDS.items()}
    except TypeError as error:
        found["error"] = str(error)
    finally:
        module.compute_policy_loss = real
    return found


def observe() -> dict[str, Any]:
    return {**{name: loss_of(bound) for name, bound in BOUNDS.items()}, "own": with_own_functions()}


def main() -> None:
    options = states.parser().parse_args()
    importlib.import_module("torch._dynamo").config.disable = True  # compiling its products and sums takes a minute
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    states.report(NAME, observe, options.out)
