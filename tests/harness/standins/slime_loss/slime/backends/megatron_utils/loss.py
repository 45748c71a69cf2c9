"""The place in slime's Megatron backend that whitens advantages, with its defect.

Our own text. It keeps what a patch has to recognize, and no more: the names of the module and the function, the
condition, the group and the call in their form. Advantages are GRPO's: a sample's reward, at each of its tokens. Of a
response a context-parallel rank has the tokens within two chunks of the sequence, one from each end.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core import mpu


def distributed_masked_whiten(values: Any, mask: Any, process_group: Any = None, shift_mean: bool = True) -> Any:
    """Of mean 0 and variance 1 over the tokens of all ranks that the mask has."""
    sums = torch.stack([(values * mask).sum(), (values.square() * mask).sum(), mask.sum().to(values.dtype)])
    torch.distributed.all_reduce(sums, group=process_group)
    total, squares, count = sums.tolist()
    if count == 0:
        raise ValueError("no rank has a token")
    mean = total / count
    variance = (squares / count - mean**2) * count / max(count - 1, 1)
    return (values - mean * shift_mean) * (variance + 1e-8) ** -0.5


def own_tokens(total: int, response: int) -> list[int]:
    """Positions within the response that are this context-parallel rank's."""
    rank, ranks = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    size, prompt = -(-total // (2 * ranks)), total - response
    # A token belongs to the rank that has the one before it, which predicts it.
    chunks = [(position - 1) // size for position in range(prompt, total)]
    return [at for at, chunk in enumerate(chunks) if chunk in (rank, 2 * ranks - 1 - rank)]


def compute_advantages_and_returns(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Write the advantages of this rank's tokens into `rollout_data`."""
    loss_masks = rollout_data["loss_masks"]
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    advantages = [
        torch.full_like(own, reward)
        for own, reward in zip(rollout_data["log_probs"], rollout_data["rewards"], strict=True)
    ]
    rollout_data["returns"] = list(advantages)
    if args.normalize_advantages:
        all_advs = torch.cat(advantages)
        cp_size = mpu.get_context_parallel_world_size()
        if cp_size == 1:
            all_masks = torch.cat(loss_masks)
        else:
            all_masks = torch.cat(
                [mask[own_tokens(*each)] for mask, each in zip(loss_masks, lengths, strict=True)],
            )
        if all_masks.numel() > 0:
            dp_group = mpu.get_data_parallel_group()
            whitened = distributed_masked_whiten(all_advs, all_masks, process_group=dp_group, shift_mean=True)
            advantages = list(torch.split(whitened, [chunk.size(0) for chunk in advantages]))
    rollout_data["advantages"] = advantages
