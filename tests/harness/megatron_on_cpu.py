"""Run megatron-core where there is no GPU: what it asks of CUDA, it gets from the CPU.

Call `install()` before megatron is imported, because megatron binds names such as
`torch.cuda._lazy_call` at import. It changes torch only, in this process and for good, and
nothing of megatron's. It belongs to the tests and the examples, never to the package.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _names_cuda(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


_CUDA, _TO, _TYPE = torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.type


class _CudaMeansCpu(TorchFunctionMode):
    """Sends to the CPU every tensor that is created on CUDA or moved there. Everything torch does comes through it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _CUDA:
            return args[0]
        if kwargs:
            kwargs = {key: CPU if _names_cuda(value) else value for key, value in kwargs.items()}
        if func is _TO:
            args = tuple(CPU if _names_cuda(value) else value for value in args)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func is _TYPE and isinstance(result, str):
            # Megatron's optimizers sort parameters by this name and refuse one without "cuda".
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _EveryDevice(dict[Any, torch.Generator]):
    """Stands for `torch.cuda.default_generators`: any index gives the CPU's generator."""

    def __missing__(self, device: object) -> torch.Generator:
        return torch.default_generator


def _always(value: object) -> Any:
    """A new function each time: Dynamo refuses to start where one stands under two of its names."""
    return lambda *args, **kwargs: value


@functools.cache
def install() -> None:
    """Map CUDA onto the CPU for the rest of this process; once."""
    cuda: Any = torch.cuda
    cuda.is_available = _always(False)
    cuda.current_device = _always(CPU)
    for context in ("device", "stream"):
        setattr(cuda, context, _always(contextlib.nullcontext()))
    # There is nothing to wait for and nothing to free.
    for name in ("set_device", "synchronize", "empty_cache", "current_stream", "default_stream"):
        setattr(cuda, name, _always(None))
    # torch puts these calls off until CUDA is initialized, which would be never: run them now,
    # because megatron's random-state tracker sets its states in one.
    cuda._lazy_init = _always(None)
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.default_generators = _EveryDevice()
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    if hasattr(torch._C, "_cuda_setRNGState"):  # a torch built for CUDA, on a machine without
        torch._C._cuda_setRNGState = lambda state: torch.set_rng_state(state)
    _CudaMeansCpu().__enter__()
