"""slime's losses by its own files, from a clone that SLIME_CLONE names; its model is a table of logits."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hunt import groups
from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer

FILES = ("utils/ppo_utils", "backends/megatron_utils/loss", "backends/megatron_utils/cp_utils")
SHAPES = ((9, 5), (12, 7), (5, 1), (16, 9), (7, 6), (11, 2), (8, 4), (6, 3))
VOCABULARY, SAMPLES = 16, len(SHAPES)
LOSSES = ("grpo", "gspo", "cispo", "opsm", "tis", "sft")
PER_TOKEN = ("grpo", "gspo", "sft")


@trainer(*(f"slime/{loss}" for loss in (*LOSSES, *(f"{loss}-per-token" for loss in PER_TOKEN))))
def losses(
    *,
    name: str,
    micro_batch: int = 8,
    accumulation: int = 1,
    ranks: int = 1,
    order: str = "given",
    parallel: str = "",
) -> Outcome:
    """`loss_function` over micro-batches; its sum and gradient as Megatron's schedule and mean of gradients have it."""
    import torch

    if parallel not in ("", "tensor", "context") or SAMPLES % (micro_batch * accumulation):
        raise CannotRun("a loss has no stages and no sequence parallelism, Megatron micro-batches of one size")
    context = ranks if parallel == "context" else 1
    groups.start_megatron(ranks if parallel == "tensor" else 1, ranks, context_parallel_size=context)
    from megatron.core import parallel_state

    loss_module, cp_utils = modules()
    per_token, table = name.endswith("-per-token"), samples()
    numbers = torch.arange(SAMPLES) if order == "given" else torch.arange(SAMPLES).flip(0)
    mine = numbers.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
    batches, total, tokens = mine.split(micro_batch), torch.zeros(()), torch.zeros(())
    for numbers in batches:
        batch, logits = batch_of([table[int(number)] for number in numbers], cp_utils)
        loss, normalizer, _ = loss_module.loss_function(
            arguments(name.partition("-")[0], per_token), batch, len(batches), SAMPLES, logits * 1
        )
        loss = loss if per_token else loss / normalizer / len(batches)
        loss.backward()
        total, tokens = total + loss.detach(), tokens + normalizer
    averaging = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for value in (total, tokens):
        torch.distributed.all_reduce(value, group=averaging)
    share = tokens if per_token else averaging.size()
    gradient = {f"sample {number}": whole_gradient(sample["logits"]) / share for number, sample in enumerate(table)}
    return {"loss": {"step": total / share}, "gradient": gradient}


def modules() -> tuple[Any, Any]:
    """slime's with the losses, and with what of a sequence is whose, of the clone's newest commit."""
    import torch

    from tests.harness import slime_clone

    if not slime_clone.CLONE:
        raise CannotRun("SLIME_CLONE names no clone of slime")
    torch.compiler.set_stance("force_eager")
    with tempfile.TemporaryDirectory(prefix="slime-") as folder:
        tree = str(slime_clone.write(Path(folder), "HEAD", "0.3.1", [f"slime/{file}.py" for file in FILES]))
        sys.path.insert(0, tree)
        slime_clone.install()
        found = [importlib.import_module(f"slime.backends.megatron_utils.{name}") for name in ("loss", "cp_utils")]
        sys.path.remove(tree)
    return found[0], found[1]


def arguments(loss: str, per_token: bool) -> SimpleNamespace:
    flags = ["use_rollout_logprobs", "get_mismatch_metrics", "allgather_cp", "recompute_loss_function"]
    return SimpleNamespace(
        **dict.fromkeys(flags, False),
        use_unbiased_kl=False,
        loss_type="sft_loss" if loss == "sft" else "policy_loss",
        advantage_estimator=loss if loss in ("gspo", "cispo") else "grpo",
        **{"use_opsm": loss == "opsm", "opsm_delta": 0.05},
        **{"use_tis": loss == "tis", "tis_clip": 1.5, "tis_clip_low": 0.2, "custom_tis_function_path": None},
        **{"use_kl_loss": loss == "grpo", "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.1},
        **{"eps_clip": 0.2, "eps_clip_high": 0.3, "eps_clip_c": None, "entropy_coef": 0.1},
        **{"log_probs_chunk_size": -1, "rollout_temperature": 1.5, "rollout_top_p": 1.0, "qkv_format": "thd"},
        calculate_per_token_loss=per_token,
    )


def samples() -> list[dict[str, Any]]:
    """The same on every rank: a policy near to the one that has sampled, and tokens in between that do not count."""
    import torch

    generator, made = torch.Generator().manual_seed(4), []
    for total, response in SHAPES:
        logits = torch.randn(total, VOCABULARY, generator=generator)
        tokens = torch.randint(VOCABULARY, (total,), generator=generator)
        own = (logits / 1.5).log_softmax(-1)[total - response - 1 : -1].gather(-1, tokens[-response:, None])[:, 0]
        near = {
            key: own + (torch.rand(response, generator=generator) - 0.5)
            for key in ("log_probs", "rollout_log_probs", "ref_log_probs")
        }
        advantages = torch.randn(1, generator=generator).expand(response)
        mask = (torch.arange(response) % 4 != 2).float()
        made.append(
            {"logits": logits.requires_grad_(), "tokens": tokens, "mask": mask, "advantages": advantages, **near}
        )
    return made


def batch_of(chosen: list[dict[str, Any]], cp_utils: Any) -> tuple[dict[str, Any], Any]:
    """A micro-batch as slime's data iterator makes it, and this rank's part of its logits."""
    import torch
    from megatron.core import parallel_state

    lengths = [(len(each["tokens"]), len(each["mask"])) for each in chosen]
    batch: dict[str, Any] = {
        "unconcat_tokens": [each["tokens"] for each in chosen],
        "loss_masks": [each["mask"] for each in chosen],
        "rollout_mask_sums": torch.stack([each["mask"].sum() for each in chosen]),
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [response for _, response in lengths],
    }
    for key in ("advantages", "log_probs", "rollout_log_probs", "ref_log_probs"):
        batch[key] = [
            cp_utils.slice_log_prob_with_cp(each[key], *sizes) for each, sizes in zip(chosen, lengths, strict=True)
        ]
    logits = torch.cat([cp_utils.slice_with_cp(each["logits"], 0) for each in chosen])
    parts = parallel_state.get_tensor_model_parallel_world_size()
    return batch, logits.chunk(parts, -1)[parallel_state.get_tensor_model_parallel_rank()][None]


def whole_gradient(logits: Any) -> Any:
    """What all ranks have added."""
    import torch

    gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
    torch.distributed.all_reduce(gradient)
    return gradient
