"""The layer of slime that gathers whole sequences for linear attention, with both of its defects.

Our own text. It keeps what a patch has to recognize, and no more: the names of the module, the class and the method,
the places where parts are gathered, and what is kept of the output. A part has, of each sequence, two chunks, one from
each end.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel


class _OwnPartBackward(torch.autograd.Function):
    """Of all ranks the tensor; backward keeps what this rank has."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        ctx.rank = torch.distributed.get_rank(group)
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[ctx.rank], None


class HuggingfaceAttention(torch.nn.Module):
    """A layer that has whole sequences."""

    def __init__(self, args: Any, config: Any, layer_number: int) -> None:
        super().__init__()
        self.args, self.config, self.layer_number = args, config, layer_number

    def forward(self, hidden_states: Any, attention_mask: Any, packed_seq_params: Any = None) -> tuple[Any, None]:
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        if self.args.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, group=mpu.get_tensor_model_parallel_group()
            )
        cp_size, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        sequences = list(itertools.pairwise(bounds))
        if cp_size > 1:
            hidden_states_list = _OwnPartBackward.apply(hidden_states, mpu.get_context_parallel_group())
            whole = []
            for start, end in sequences:
                parts = [part[start // cp_size : end // cp_size].chunk(2) for part in hidden_states_list]
                whole += [first for first, _ in parts] + [second for _, second in reversed(parts)]
            hidden_states = torch.cat(whole)
        output = self.hf_forward(hidden_states.transpose(0, 1), packed_seq_params).transpose(0, 1)
        if cp_size > 1:
            output_list: list[torch.Tensor] = []
            for start, end in sequences:
                chunks = output[start:end].chunk(2 * cp_size)
                output_list.append(chunks[cp_rank])
                output_list.append(chunks[2 * cp_size - 1 - cp_rank])
            output = torch.cat(output_list)
        if self.args.sequence_parallel:
            output = tensor_parallel.scatter_to_sequence_parallel_region(
                output, group=mpu.get_tensor_model_parallel_group()
            )
        return output, None
