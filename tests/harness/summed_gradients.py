"""What gradients add up to in megatron-core's data-parallel buffers, and what their exact sum is.

To be imported after `megatron_on_cpu.install()`. The model is the smallest that megatron-core wraps; what a
micro-batch's gradients are does not matter here, only their sum over micro-batches and ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

WIDTH, TOKENS = 16, 4
# Each sum of gradients in float32 is off by 2**-24 of it at most; bfloat16's is 2**-8.
ROUNDING = 1e-6


class Layers(torch.nn.Module):
    """A chunk of a pipeline, as far as frameworks and megatron-core look at one; the same weights every time."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(5)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.share_embeddings_and_output_weights = self.pre_process = self.post_process = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.down(torch.tanh(self.up(inputs))))

    def set_input_tensor(self, tensor: Any) -> None:
        """No stage comes before this one."""


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """CUDA's streams, in which frameworks make their buffers: here all is in order anyway."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "current_stream"):
            patch.setattr(torch.cuda, name, lambda *args, **kwargs: stream)
        yield


def micro_batch(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)


def loss(outputs: torch.Tensor) -> torch.Tensor:
    """With a gradient that has a direction, as a batch's has, and noise around it."""
    return (outputs.float() - 1).square().mean()


_exact: dict[Any, list[torch.Tensor]] = {}
"""What `exactly` has found, by micro-batches, their type and the weights, which a worker has again and again."""


def exactly(inner: Any, parameters: list[Any], micro_batches: int, ranks: int) -> list[torch.Tensor]:
    """Of each parameter, the sum of all ranks' gradients in float64, over their number."""
    found = [torch.zeros(parameter.numel(), dtype=torch.float64) for parameter in parameters]
    for each in range(ranks):
        for number in range(micro_batches):
            value = loss(inner(micro_batch(each, number, parameters[0].dtype)))
            for of, gradient in zip(found, torch.autograd.grad(value, parameters), strict=True):
                of += gradient.double().flatten() / ranks
    return found


def added_up(model: Any, micro_batches: int) -> dict[str, Any]:
    """Train a step's forward and backward passes on this rank, and reduce.

    Args:
        model: megatron-core's DistributedDataParallel.
        micro_batches: of each rank.

    Returns:
        The buffer's ``dtype``, its ``bytes`` for each number, how far the gradients are ``off``, relative to the norm
        of the exact sum, and the ``sums`` themselves, of which a rank has a part under the distributed optimizer.
    """
    (buffer,) = model.buffers
    dtype = next(model.parameters()).dtype
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    exact = torch.zeros(buffer.numel, dtype=torch.float64)
    places = {parameter: place[:2] for parameter, place in buffer.param_index_map.items()}
    weights = tuple(parameter.detach().double().sum().item() for parameter in places)
    if (micro_batches, dtype, weights) not in _exact:
        _exact[micro_batches, dtype, weights] = exactly(model.module, list(places), micro_batches, ranks)
    for (start, end), wanted in zip(places.values(), _exact[micro_batches, dtype, weights], strict=True):
        exact[start:end] = wanted
    model.zero_grad_buffer()
    for number in range(micro_batches):
        with contextlib.nullcontext() if number == micro_batches - 1 else model.no_sync():
            loss(model(micro_batch(rank, number, dtype))).backward()
    model.finish_grad_sync()
    sums = buffer.grad_data.detach().clone()
    if model.ddp_config.use_distributed_optimizer:  # this rank's part of each bucket is what was reduced
        parts = [torch.arange(bucket.offset, bucket.offset + len(bucket.grad_data)) for bucket in buffer.buckets]
        mine = torch.cat([part.chunk(ranks)[rank] for part in parts])
        sums, exact = sums[mine], exact[mine]
    return {
        "dtype": str(sums.dtype).removeprefix("torch."),
        "bytes": buffer.grad_data.element_size(),
        "off": ((sums.double() - exact).norm() / exact.norm()).item(),
        "sums": sums.float().tolist(),
    }
